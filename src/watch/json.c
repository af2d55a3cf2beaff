/* JSON, written by hand: the library needs nothing but libc. Texts come from peers and from the machine, so what isn't UTF-8 is replaced;
 * numbers don't go through printf's %g, since a program's locale may put a comma into them. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "watch/internal.h"

#define LARGEST 9e12                    /* as many millionths fit into 64 bits */

/* Bytes of the character at text; 0: it is none (cut short, a surrogate, longer than it need be). */
static int character_bytes(const unsigned char *text)
{
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	int bytes = text[0] < 0x80 ? 1 : (text[0] & 0xe0) == 0xc0 ? 2 : (text[0] & 0xf0) == 0xe0 ? 3 : (text[0] & 0xf8) == 0xf0 ? 4 : 0;
	if (bytes < 2) return bytes;
	uint32_t code = text[0] & (0x7fu >> bytes);
	for (int i = 1; i < bytes; i++) {
		if ((text[i] & 0xc0) != 0x80) return 0;
		code = code << 6 | (text[i] & 0x3fu);
	}
	return code < least[bytes] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : bytes;
}

void tp_watch_json_string(FILE *out, const char *text)
{
	fputc('"', out);
	for (const unsigned char *c = (const unsigned char *)text; *c;) {
		int bytes = character_bytes(c);
		if (bytes == 0) fputs("\\ufffd", out);
		else if (*c == '"' || *c == '\\') fprintf(out, "\\%c", *c);
		else if (*c < ' ' || *c == 0x7f) fprintf(out, "\\u%04x", *c);
		else fwrite(c, 1, (size_t)bytes, out);
		c += bytes ? bytes : 1;
	}
	fputc('"', out);
}

void tp_watch_json_number(FILE *out, double value)
{
	if (!isfinite(value) || fabs(value) > LARGEST) {
		fputs("null", out);
		return;
	}
	int64_t millionths = (int64_t)(value * 1e6 + (value < 0 ? -0.5 : 0.5));
	uint64_t size = millionths < 0 ? 0 - (uint64_t)millionths : (uint64_t)millionths;
	int digits = 6;
	uint64_t part = size % 1000000;
	fprintf(out, "%s%" PRIu64, millionths < 0 ? "-" : "", size / 1000000);
	for (; part && part % 10 == 0; part /= 10) digits--;
	if (part) fprintf(out, ".%0*" PRIu64, digits, part);
}

static void text_or_null(FILE *out, const char *key, const char *text)
{
	fprintf(out, ",\"%s\":", key);
	if (*text) tp_watch_json_string(out, text);
	else fputs("null", out);
}

static void known_or_null(FILE *out, const char *key, double value)
{
	fprintf(out, ",\"%s\":", key);
	tp_watch_json_number(out, value > 0 ? value : (double)NAN);
}

void tp_watch_json_path(FILE *out, const struct tp_watch_path *path, const struct tp_watch_refusal *refusals, int nrefusals,
	const struct tp_watch_channel *channels, int nchannels)
{
	fprintf(out, "{\"from\":%d,\"to\":%d,\"same_host\":%s,\"via\":", path->from, path->to, path->same_host ? "true" : "false");
	tp_watch_json_string(out, path->via);
	text_or_null(out, "type", path->type);
	text_or_null(out, "device", path->device);
	fprintf(out, ",\"gdr\":%s", path->gdr < 0 ? "null" : path->gdr ? "true" : "false");
	known_or_null(out, "bandwidth_gbs", (double)path->gbps);
	known_or_null(out, "latency_us", (double)path->latency_us);
	text_or_null(out, "note", path->why);
	fputs(",\"refused\":[", out);
	for (int i = 0; i < nrefusals; i++) {
		fprintf(out, "%s{\"kind\":", i ? "," : "");
		tp_watch_json_string(out, refusals[i].kind);
		text_or_null(out, "code", refusals[i].code);
		text_or_null(out, "why", refusals[i].text);
		fputc('}', out);
	}
	fputc(']', out);
	if (nchannels) fputs(",\"channels\":[", out);
	for (int i = 0; i < nchannels; i++) {
		fprintf(out, "%s{\"channel\":%d", i ? "," : "", i);
		text_or_null(out, "device", channels[i].device);
		known_or_null(out, "bandwidth_gbs", (double)channels[i].gbps);
		known_or_null(out, "latency_us", (double)channels[i].latency_us);
		fputc('}', out);
	}
	fputs(nchannels ? "]}" : "}", out);
}
