/* Collectives by the names that people type; see coll.h. */
#include "coll.h"

#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "tools.h"

bool tool_same_name(const char *a, const char *b)
{
	for (;; a++, b++) {
		while (*a == '_' || *a == '-') a++;
		while (*b == '_' || *b == '-') b++;
		if (strncasecmp(a, b, 1)) return false;
		if (!*a) return true;
	}
}

bool tool_find_coll(const char *name, enum tp_coll *out)
{
	for (int c = 0; c < TP_SEND_RECV; c++) {
		if (!tool_same_name(name, tp_coll_name((enum tp_coll)c))) continue;
		*out = (enum tp_coll)c;
		return true;
	}
	return false;
}

const char *tool_coll_name(enum tp_coll coll)
{
	static const char *const names[] = { "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "gather", "scatter", "sendrecv" };
	return names[coll];
}

bool tool_is_rooted(enum tp_coll coll) { return coll == TP_BROADCAST || coll == TP_REDUCE || coll == TP_GATHER || coll == TP_SCATTER; }
bool tool_is_reduction(enum tp_coll coll) { return coll == TP_ALL_REDUCE || coll == TP_REDUCE_SCATTER || coll == TP_REDUCE; }
bool tool_has_blocks(enum tp_coll coll) { return coll != TP_ALL_REDUCE && coll != TP_BROADCAST && coll != TP_REDUCE; }

ncclResult_t tool_layout(int nranks, int nhosts, struct tp_layout **out)
{
	int *hosts = tp_alloc((size_t)nranks, sizeof(*hosts), "a layout");
	if (!hosts) return ncclSystemError;
	for (int r = 0; r < nranks; r++) hosts[r] = tool_place_of(r, nranks, nhosts).host;
	ncclResult_t result = tp_layout_create(nranks, hosts, out);
	free(hosts);
	return result;
}

const char *tool_size_text(size_t bytes, char text[32])
{
	static const char units[] = "KMG";
	int unit = -1;
	size_t whole = bytes;
	while (unit < 2 && whole >= 1024 && whole % 1024 == 0) {
		whole /= 1024;
		unit++;
	}
	if (unit < 0) snprintf(text, 32, "%zu B", bytes);
	else snprintf(text, 32, "%zu %ciB", whole, units[unit]);
	return text;
}
