/* A description in memory: elements, attributes, and the errors that name their place. */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

#define BLOCK_BYTES 16384

struct tp_doc_block {
	struct tp_doc_block *next;
	size_t used, room;
	max_align_t memory[];
};

void *tp_doc_alloc(struct tp_topo_doc *doc, size_t bytes)
{
	bytes = tp_align_up(bytes ? bytes : 1, sizeof(max_align_t));
	struct tp_doc_block *block = doc->blocks;
	if (!block || block->room - block->used < bytes) {
		size_t room = TP_MAX(bytes, (size_t)BLOCK_BYTES);
		block = tp_alloc(1, sizeof(*block) + room, "a description of the machine");
		if (!block) return NULL;
		block->room = room;
		block->next = doc->blocks;
		doc->blocks = block;
	}
	void *memory = (char *)block->memory + block->used;
	block->used += bytes;
	doc->bytes += bytes;
	return memory;
}

static const char *keep(struct tp_topo_doc *doc, const char *text)
{
	size_t bytes = strlen(text) + 1;
	char *copy = tp_doc_alloc(doc, bytes);
	return copy ? memcpy(copy, text, bytes) : NULL;
}

ncclResult_t tp_doc_create(const char *name, const char *root, struct tp_topo_doc **out)
{
	struct tp_topo_doc *doc = tp_alloc(1, sizeof(*doc), "a description of the machine");
	if (!doc) return ncclSystemError;
	doc->name = keep(doc, name);
	if (!doc->name || (root && !tp_doc_add(doc, NULL, root))) {
		tp_topo_doc_free(doc);
		return ncclSystemError;
	}
	*out = doc;
	return ncclSuccess;
}

void tp_topo_doc_free(struct tp_topo_doc *doc)
{
	if (!doc) return;
	for (struct tp_doc_block *block = doc->blocks, *next; block; block = next) {
		next = block->next;
		free(block);
	}
	free(doc);
}

struct tp_element *tp_doc_add(struct tp_topo_doc *doc, struct tp_element *parent, const char *name)
{
	if (doc->elements >= TP_DOC_MAX_ELEMENTS) {
		TP_WARN("%s: more than %d elements, which no machine has", doc->name, TP_DOC_MAX_ELEMENTS);
		return NULL;
	}
	struct tp_element *element = tp_doc_alloc(doc, sizeof(*element));
	if (!element || !(element->name = keep(doc, name))) return NULL;
	doc->elements++;
	element->parent = parent;
	if (!parent) {
		doc->root = element;
	} else {
		if (parent->last) parent->last->next = element;
		else parent->first = element;
		parent->last = element;
	}
	return element;
}

ncclResult_t tp_doc_set(struct tp_topo_doc *doc, struct tp_element *element, const char *name, const char *value)
{
	struct tp_attribute **at = &element->attributes;
	const char *copy = keep(doc, value);
	int count = 0;
	if (!copy) return ncclSystemError;
	for (; *at; at = &(*at)->next, count++) {
		if (strcmp((*at)->name, name) == 0) {
			(*at)->value = copy;
			return ncclSuccess;
		}
	}
	char where[TP_WHERE_BYTES];
	if (count == TP_DOC_MAX_ATTRIBUTES)
		return TP_FAIL(ncclInvalidUsage, "%s has more than %d attributes", tp_element_where(doc, element, where), TP_DOC_MAX_ATTRIBUTES);
	struct tp_attribute *attribute = tp_doc_alloc(doc, sizeof(*attribute));
	if (!attribute || !(attribute->name = keep(doc, name))) return ncclSystemError;
	attribute->value = copy;
	*at = attribute;
	return ncclSuccess;
}

ncclResult_t tp_doc_setf(struct tp_topo_doc *doc, struct tp_element *element, const char *name, const char *format, ...)
{
	char text[512];
	va_list list;
	va_start(list, format);
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);
	return tp_doc_set(doc, element, name, text);
}

void tp_doc_unset(struct tp_element *element, const char *name)
{
	for (struct tp_attribute **at = &element->attributes; *at; at = &(*at)->next) {
		if (strcmp((*at)->name, name) != 0) continue;
		*at = (*at)->next;
		return;
	}
}

void tp_doc_remove(struct tp_element *element)
{
	struct tp_element *parent = element->parent, *before = NULL;
	if (!parent) return;
	for (struct tp_element *e = parent->first; e != element; e = e->next) before = e;
	if (before) before->next = element->next;
	else parent->first = element->next;
	if (parent->last == element) parent->last = before;
	element->parent = element->next = NULL;
}

const char *tp_element_get(const struct tp_element *element, const char *name)
{
	for (const struct tp_attribute *a = element->attributes; a; a = a->next)
		if (strcmp(a->name, name) == 0) return a->value;
	return NULL;
}

struct tp_element *tp_element_child(const struct tp_element *element, const char *name)
{
	for (struct tp_element *e = element->first; e; e = e->next)
		if (strcmp(e->name, name) == 0) return e;
	return NULL;
}

struct tp_element *tp_element_child_with(const struct tp_element *element, const char *name, const char *attribute, const char *value)
{
	for (struct tp_element *e = element->first; e; e = e->next) {
		const char *found = strcmp(e->name, name) == 0 ? tp_element_get(e, attribute) : NULL;
		if (found && strcmp(found, value) == 0) return e;
	}
	return NULL;
}

struct tp_element *tp_doc_walk(const struct tp_topo_doc *doc, const struct tp_element *at)
{
	if (!at) return doc->root;
	if (at->first) return at->first;
	while (at && !at->next) at = at->parent;
	return at ? at->next : NULL;
}

const char *tp_element_where(const struct tp_topo_doc *doc, const struct tp_element *element, char where[TP_WHERE_BYTES])
{
	const char *id = tp_element_get(element, "busid");
	if (!id) id = tp_element_get(element, "name");
	if (!id) id = tp_element_get(element, "target");
	char line[16] = "";
	if (element->line) snprintf(line, sizeof(line), ":%d", element->line);
	snprintf(where, TP_WHERE_BYTES, "%.100s%s: <%.20s%s%.32s>", doc->name, line, element->name, id ? " " : "", id ? id : "");
	return where;
}

static ncclResult_t bad_value(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, const char *value,
	const char *right)
{
	char where[TP_WHERE_BYTES];
	return TP_FAIL(ncclInvalidUsage, "%s: %s=\"%.60s\" should be %s", tp_element_where(doc, element, where), name, value, right);
}

ncclResult_t tp_element_int(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, int64_t min, int64_t max,
	int64_t fallback, int64_t *out)
{
	const char *text = tp_element_get(element, name);
	char *end, right[96];
	if (!text) {
		*out = fallback;
		return ncclSuccess;
	}
	errno = 0;
	bool hex = text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
	int64_t value = strtoll(text, &end, hex ? 16 : 10);
	if (end == text || *end || errno || value < min || value > max) {
		snprintf(right, sizeof(right), "a number from %lld to %lld", (long long)min, (long long)max);
		return bad_value(doc, element, name, text, right);
	}
	*out = value;
	return ncclSuccess;
}

ncclResult_t tp_element_hex(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, uint64_t fallback, uint64_t *out)
{
	const char *text = tp_element_get(element, name);
	char *end;
	if (!text) {
		*out = fallback;
		return ncclSuccess;
	}
	errno = 0;
	uint64_t value = strtoull(text, &end, 16);
	if (end == text || *end || errno || text[0] == '-')
		return bad_value(doc, element, name, text, "a hexadecimal number of 64 bits");
	*out = value;
	return ncclSuccess;
}

ncclResult_t tp_element_real(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, double min, double max,
	double fallback, double *out)
{
	const char *text = tp_element_get(element, name);
	char *end, right[96];
	if (!text) {
		*out = fallback;
		return ncclSuccess;
	}
	double value = strtod(text, &end);
	if (end == text || *end || !isfinite(value) || value < min || value > max) {
		snprintf(right, sizeof(right), "a number from %g to %g", min, max);
		return bad_value(doc, element, name, text, right);
	}
	*out = value;
	return ncclSuccess;
}

ncclResult_t tp_element_mask(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, uint64_t mask[TP_CPU_WORDS])
{
	static const char right[] = "groups of at most 8 hexadecimal digits";
	const char *text = tp_element_get(element, name);
	uint64_t found[TP_CPU_WORDS] = { 0 };
	int word = 0;                   /* of 32 bits, from the right */
	for (size_t end = text ? strlen(text) : 0, from; end > 0; end = from ? from - 1 : 0, word++) {
		char group[9] = "";
		for (from = end; from > 0 && text[from - 1] != ','; from--) ;
		size_t bytes = end - from;
		if (bytes == 0 || bytes > 8 || from == 1) return bad_value(doc, element, name, text, right);
		memcpy(group, text + from, bytes);
		if (strspn(group, "0123456789abcdefABCDEF") != bytes) return bad_value(doc, element, name, text, right);
		/* Kernels for many processors write many groups; what lies beyond can't be named here. */
		if (word < TP_CPU_WORDS * 2) found[word / 2] |= (uint64_t)strtoul(group, NULL, 16) << (word % 2 * 32);
	}
	memcpy(mask, found, sizeof(found));
	return ncclSuccess;
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9') return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool tp_bus_id_parse(const char *text, int64_t *out)
{
	int64_t value = 0;
	int digits = 0, colons = 0, dots = 0, run = 0;
	for (const char *p = text; *p; p++) {
		if (*p == ':' || *p == '.') {
			if (!run || dots) return false;
			colons += *p == ':';
			dots += *p == '.';
			run = 0;
			continue;
		}
		int digit = hex_digit(*p);
		if (digit < 0 || ++digits > 15) return false;
		value = value << 4 | digit;
		run++;
	}
	if (!run || colons != 2) return false;
	*out = value;
	return true;
}

void tp_bus_id_text(int64_t bus, char text[20])
{
	snprintf(text, 20, "%04llx:%02x:%02x.%x", (unsigned long long)(bus >> 20 & 0xffffffffff), (unsigned)(bus >> 12 & 0xff),
		(unsigned)(bus >> 4 & 0xff), (unsigned)(bus & 0xf));
}

float tp_pci_speed_parse(const char *text)
{
	char *end;
	float value = text ? strtof(text, &end) : 0;
	if (!text || end == text || !isfinite(value) || value <= 0 || value > 1024) return 0;
	while (*end == ' ') end++;
	return strncmp(end, "GT/s", 4) == 0 ? value : 0;
}
