/* Descriptions as XML, through expat: no entities, no document types (what makes small files grow huge), bounded depth and size. */
#include <errno.h>
#include <expat.h>
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

struct reader {
	struct tp_topo_doc *doc;
	struct tp_element *at;
	XML_Parser parser;
	int depth;
	ncclResult_t result;            /* the first error; logged */
};

static void stop(struct reader *r, ncclResult_t result)
{
	if (r->result == ncclSuccess) r->result = result;
	XML_StopParser(r->parser, XML_FALSE);
}

static int line_of(const struct reader *r)
{
	return (int)XML_GetCurrentLineNumber(r->parser);
}

static void on_start(void *arg, const XML_Char *name, const XML_Char **attributes)
{
	struct reader *r = arg;
	if (r->result != ncclSuccess) return;
	if (++r->depth > TP_TOPO_MAX_DEPTH) {
		stop(r, TP_FAIL(ncclInvalidUsage, "%s:%d: <%.40s> lies deeper than %d elements, which no machine needs", r->doc->name, line_of(r), name,
			TP_TOPO_MAX_DEPTH));
		return;
	}
	struct tp_element *element = tp_doc_add(r->doc, r->at, name);
	if (!element) {
		stop(r, ncclSystemError);
		return;
	}
	element->line = line_of(r);
	for (int i = 0; attributes[i]; i += 2) {
		ncclResult_t result = tp_doc_set(r->doc, element, attributes[i], attributes[i + 1]);
		if (result != ncclSuccess) {
			stop(r, result);
			return;
		}
	}
	r->at = element;
}

static void on_end(void *arg, const XML_Char *name)
{
	struct reader *r = arg;
	(void)name;
	if (r->result != ncclSuccess) return;
	r->depth--;
	r->at = r->at->parent;
}

static void on_doctype(void *arg, const XML_Char *name, const XML_Char *system, const XML_Char *public, int internal)
{
	struct reader *r = arg;
	(void)system;
	(void)public;
	(void)internal;
	stop(r, TP_FAIL(ncclInvalidUsage, "%s:%d: a document type (<!DOCTYPE %.40s>) has no place in a description of a machine", r->doc->name,
		line_of(r), name));
}

static ncclResult_t read_elements(struct reader *r, const char *text, size_t bytes)
{
	enum XML_Status status = XML_Parse(r->parser, text, (int)bytes, XML_TRUE);
	if (r->result != ncclSuccess) return r->result;
	if (status != XML_STATUS_OK)
		return TP_FAIL(ncclInvalidUsage, "%s:%d: no well-formed XML: %s%s%.40s%s", r->doc->name, line_of(r),
			XML_ErrorString(XML_GetErrorCode(r->parser)), r->at ? ", in <" : "", r->at ? r->at->name : "", r->at ? ">" : "");
	return ncclSuccess;
}

ncclResult_t tp_topo_doc_parse(const char *text, size_t bytes, const char *name, struct tp_topo_doc **out)
{
	struct reader r = { 0 };
	if (bytes > TP_TOPO_MAX_TEXT)
		return TP_FAIL(ncclInvalidUsage, "%s: %zu bytes; a description of machines has at most %u", name, bytes, TP_TOPO_MAX_TEXT);
	TP_TRY(tp_doc_create(name, NULL, &r.doc));
	ncclResult_t result = ncclSystemError;
	r.parser = XML_ParserCreate(NULL);
	if (!r.parser) {
		TP_WARN("%s: no memory for reading it", name);
	} else {
		XML_SetUserData(r.parser, &r);
		XML_SetElementHandler(r.parser, on_start, on_end);
		XML_SetStartDoctypeDeclHandler(r.parser, on_doctype);
		result = read_elements(&r, text, bytes);
		XML_ParserFree(r.parser);
	}
	if (result == ncclSuccess) result = tp_doc_mend(r.doc);
	if (result == ncclSuccess) result = tp_doc_check(r.doc);
	if (result != ncclSuccess) tp_topo_doc_free(r.doc);
	else *out = r.doc;
	return result;
}

ncclResult_t tp_topo_doc_read(const char *path, struct tp_topo_doc **out)
{
	FILE *file = fopen(path, "re");
	if (!file) return TP_FAIL(ncclSystemError, "%s can't be opened: %s (errno %d)", path, strerror(errno), errno);
	size_t room = 65536, bytes = 0, got;
	char *text = malloc(room);
	ncclResult_t result = ncclSuccess;
	while (text && (got = fread(text + bytes, 1, room - bytes, file)) > 0) {
		bytes += got;
		if (bytes > TP_TOPO_MAX_TEXT) break;
		if (bytes < room) continue;
		char *larger = realloc(text, room * 2);
		if (!larger) free(text);
		text = larger;
		room *= 2;
	}
	if (!text) result = TP_FAIL(ncclSystemError, "%s: no memory for reading it", path);
	else if (ferror(file)) result = TP_FAIL(ncclSystemError, "%s can't be read: %s (errno %d)", path, strerror(errno), errno);
	else result = tp_topo_doc_parse(text, bytes, path, out);
	free(text);
	fclose(file);
	return result;
}

/* The bytes of a character that XML can hold; 0: it can't. Firmware and drivers write what they like. */
static int character_bytes(const char *at)
{
	const unsigned char *p = (const unsigned char *)at;
	int bytes = *p < 0x80 ? 1 : *p >= 0xc2 && *p < 0xe0 ? 2 : *p >= 0xe0 && *p < 0xf0 ? 3 : *p >= 0xf0 && *p < 0xf5 ? 4 : 0;
	uint32_t code = bytes < 2 ? *p : *p & (0x7fu >> bytes);
	for (int i = 1; i < bytes; i++) {
		if ((p[i] & 0xc0) != 0x80) return 0;
		code = code << 6 | (p[i] & 0x3f);
	}
	bool least = bytes < 3 || (bytes == 3 ? code >= 0x800 : code >= 0x10000);
	bool allowed = (code >= 0x20 && code < 0xd800) || (code >= 0xe000 && code < 0xfffe) || (code >= 0x10000 && code < 0x110000) || code == '\n' || code == '\t' || code == '\r';
	return least && allowed ? bytes : 0;
}

static void write_value(FILE *out, const char *value)
{
	for (int bytes; *value; value += TP_MAX(bytes, 1)) {
		bytes = character_bytes(value);
		if (bytes != 1) {
			fprintf(out, "%.*s", bytes ? bytes : 1, bytes ? value : "?");
			continue;
		}
		switch (*value) {
		case '&': fputs("&amp;", out); break;
		case '<': fputs("&lt;", out); break;
		case '>': fputs("&gt;", out); break;
		case '"': fputs("&quot;", out); break;
		case '\n': case '\t': case '\r': fprintf(out, "&#%d;", *value); break;
		default: fputc(*value, out);
		}
	}
}

static void write_element(FILE *out, const struct tp_element *element, int depth)
{
	fprintf(out, "%*s<%s", depth * 2, "", element->name);
	for (const struct tp_attribute *a = element->attributes; a; a = a->next) {
		fprintf(out, " %s=\"", a->name);
		write_value(out, a->value);
		fputc('"', out);
	}
	if (!element->first) {
		fputs("/>\n", out);
		return;
	}
	fputs(">\n", out);
	for (const struct tp_element *child = element->first; child; child = child->next) write_element(out, child, depth + 1);
	fprintf(out, "%*s</%s>\n", depth * 2, "", element->name);
}

ncclResult_t tp_topo_doc_text(const struct tp_topo_doc *doc, char **text, size_t *bytes)
{
	char *made = NULL;
	size_t size = 0;
	FILE *out = open_memstream(&made, &size);
	if (!out) return TP_FAIL(ncclSystemError, "no memory for the text of %s", doc->name);
	write_element(out, doc->root, 0);
	bool failed = ferror(out);
	if (fclose(out) || failed) {
		free(made);
		return TP_FAIL(ncclSystemError, "no memory for the text of %s", doc->name);
	}
	*text = made;
	*bytes = size;
	return ncclSuccess;
}

ncclResult_t tp_topo_doc_write(const struct tp_topo_doc *doc, const char *path)
{
	FILE *out = fopen(path, "we");
	if (!out) return TP_FAIL(ncclSystemError, "%s can't be written: %s (errno %d)", path, strerror(errno), errno);
	write_element(out, doc->root, 0);
	bool failed = ferror(out);
	if (fclose(out) || failed) return TP_FAIL(ncclSystemError, "%s can't be written: %s (errno %d)", path, strerror(errno), errno);
	return ncclSuccess;
}
