#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "plan/filter.h"

static const struct { const char *name, *why; } foreign[] = {
	{ "CollnetDirect", "it reduces in network switches, which host memory has no way to ask for" },
	{ "CollnetChain", "it reduces in network switches, which host memory has no way to ask for" },
	{ "Collnet", "it reduces in network switches, which host memory has no way to ask for" },
	{ "NVLS", "it reduces in NVLink switches, which only GPUs reach" },
	{ "NVLSTree", "it reduces in NVLink switches, which only GPUs reach" },
};
static const char *const protos[] = { "LL", "LL128", "Simple" };

const char *tp_filter_foreign_name(int bit) { return (size_t)bit < TP_ARRAY_LEN(foreign) ? foreign[bit].name : NULL; }
const char *tp_filter_foreign_why(int bit) { return (size_t)bit < TP_ARRAY_LEN(foreign) ? foreign[bit].why : NULL; }

struct word { const char *at; size_t length; };

static struct word trim(const char *at, const char *end)
{
	while (at < end && strchr(" \t", *at)) at++;
	while (end > at && strchr(" \t", end[-1])) end--;
	return (struct word){ at, (size_t)(end - at) };
}

static bool same(struct word w, const char *name) { return strlen(name) == w.length && !strncasecmp(w.at, name, w.length); }

static int find_coll(struct word w)
{
	for (int c = 0; c < TP_SEND_RECV; c++)
		if (same(w, tp_coll_name((enum tp_coll)c))) return c;
	return -1;
}

/* The bit of a name: an algorithm's, or from TP_NALGOS on that of one that is only NCCL's; -1: none. */
static int find_algo(struct word w)
{
	for (int a = 0; a < TP_NALGOS; a++)
		if (same(w, tp_algo_name((enum tp_algo)a))) return a;
	for (size_t i = 0; i < TP_ARRAY_LEN(foreign); i++)
		if (same(w, foreign[i].name)) return TP_NALGOS + (int)i;
	return -1;
}

static int find_proto(struct word w)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(protos); i++)
		if (same(w, protos[i])) return (int)i;
	return -1;
}

struct syntax {
	const char *variable, *what;
	int (*find)(struct word w);
	int nnames;
	const char *(*name)(int bit);
};

static const char *algo_name(int bit) { return bit < TP_NALGOS ? tp_algo_name((enum tp_algo)bit) : foreign[bit - TP_NALGOS].name; }
static const char *proto_name(int bit) { return protos[bit]; }

static const struct syntax algo_syntax = { "NCCL_ALGO", "algorithm", find_algo, TP_NALGOS + (int)TP_ARRAY_LEN(foreign), algo_name };
static const struct syntax proto_syntax = { "NCCL_PROTO", "protocol", find_proto, (int)TP_ARRAY_LEN(protos), proto_name };

static ncclResult_t refuse_name(const struct syntax *s, struct word w)
{
	char list[256] = "";
	for (int i = 0; i < s->nnames; i++) {
		size_t used = strlen(list);
		snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", s->name(i));
	}
	return TP_FAIL(ncclInvalidUsage, "%s: \"%.*s\" is no %s; there are %s", s->variable, (int)TP_MIN(w.length, 40), w.at, s->what,
		list);
}

/* "name,name": the bits that they name. */
static ncclResult_t parse_names(const struct syntax *s, const char *at, const char *end, uint32_t *out)
{
	uint32_t bits = 0;
	while (at <= end) {
		const char *comma = memchr(at, ',', (size_t)(end - at));
		struct word w = trim(at, comma ? comma : end);
		int bit = s->find(w);
		if (bit < 0) return refuse_name(s, w);
		bits |= 1u << bit;
		at = comma ? comma + 1 : end + 1;
	}
	*out = bits;
	return ncclSuccess;
}

/* Names of one entry, after the function: with ^ all but those. */
static ncclResult_t parse_entry(const struct syntax *s, const char *at, const char *end, uint32_t *allowed, uint32_t *named)
{
	struct word w = trim(at, end);
	bool negated = w.length && *w.at == '^';
	uint32_t bits = 0, all = (1u << s->nnames) - 1;
	TP_TRY(parse_names(s, w.at + negated, w.at + w.length, &bits));
	*allowed = negated ? all & ~bits : bits;
	*named |= negated ? 0 : bits;
	return ncclSuccess;
}

/* allowed[coll], and whether an entry names it; named: all bits that are asked for by name. */
static ncclResult_t parse(const struct syntax *s, const char *text, uint32_t *allowed, bool *by_name, bool *for_all, uint32_t *named)
{
	const char *at = text, *stop = text + strlen(text);
	bool first = true;
	while (at < stop) {
		const char *end = memchr(at, ';', (size_t)(stop - at));
		if (!end) end = stop;
		const char *colon = memchr(at, ':', (size_t)(end - at));
		struct word function = trim(at, colon ? colon : at), entry = trim(at, end);
		uint32_t bits = 0;
		at = end < stop ? end + 1 : stop;
		if (!entry.length) continue;
		int coll = colon ? find_coll(function) : -1;
		if (colon && coll < 0)
			return TP_FAIL(ncclInvalidUsage, "%s: \"%.*s\" is no collective; there are AllReduce, AllGather, ReduceScatter, Broadcast, "
				"Reduce, AlltoAll, Gather, Scatter", s->variable, (int)TP_MIN(function.length, 40), function.at);
		if (!colon && !first)
			return TP_FAIL(ncclInvalidUsage, "%s: only the first entry may go without a collective; say \"AllReduce:%.*s\" or the like",
				s->variable, (int)TP_MIN(entry.length, 60), entry.at);
		TP_TRY(parse_entry(s, colon ? colon + 1 : entry.at, end, &bits, named));
		for (int c = 0; c < TP_NCOLLS; c++)
			if (!colon || c == coll) allowed[c] = bits;
		if (colon) by_name[coll] = true;
		else *for_all = true;
		first = false;
	}
	return ncclSuccess;
}

ncclResult_t tp_filter_parse_algo(const char *text, struct tp_filter *out)
{
	struct tp_filter f = { 0 };
	uint32_t named = 0;
	for (int c = 0; c < TP_NCOLLS; c++) f.algos[c] = ~0u;
	if (text) TP_TRY(parse(&algo_syntax, text, f.algos, f.named, &f.restricted, &named));
	for (int c = 0; c < TP_NCOLLS; c++) f.algos[c] &= (1u << TP_NALGOS) - 1;
	f.foreign = named >> TP_NALGOS;
	*out = f;
	return ncclSuccess;
}

ncclResult_t tp_filter_parse_proto(const char *text, uint32_t *named)
{
	uint32_t allowed[TP_NCOLLS], found = 0;
	bool by_name[TP_NCOLLS], for_all = false;
	if (text) TP_TRY(parse(&proto_syntax, text, allowed, by_name, &for_all, &found));
	*named = found;
	return ncclSuccess;
}
