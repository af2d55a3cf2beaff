/* What can't be true of any machine is refused before anything is built from it. A sorted list of identities finds what is there
 * twice; numbers are read once here, so that their errors have a line. */
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

struct identity {
	uint64_t host;
	int64_t id;
	const struct tp_element *element;
};

struct identities {
	struct identity *list;
	size_t count, room;
};

static ncclResult_t add(struct identities *all, uint64_t host, int64_t id, const struct tp_element *element)
{
	if (all->count == all->room) {
		size_t room = all->room ? all->room * 2 : 256;
		struct identity *list = realloc(all->list, room * sizeof(*list));
		if (!list) return TP_FAIL(ncclSystemError, "no memory for %zu elements of a description", room);
		all->list = list;
		all->room = room;
	}
	all->list[all->count++] = (struct identity){ host, id, element };
	return ncclSuccess;
}

static int by_identity(const void *a, const void *b)
{
	const struct identity *x = a, *y = b;
	if (x->host != y->host) return x->host < y->host ? -1 : 1;
	if (x->id != y->id) return x->id < y->id ? -1 : 1;
	return x->element->line - y->element->line;
}

static ncclResult_t find_twice(const struct tp_topo_doc *doc, struct identities *all, const char *what)
{
	char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
	if (!all->count) return ncclSuccess;
	qsort(all->list, all->count, sizeof(all->list[0]), by_identity);
	for (size_t i = 1; i < all->count; i++) {
		const struct identity *a = &all->list[i - 1], *b = &all->list[i];
		if (a->host == b->host && a->id == b->id)
			return TP_FAIL(ncclInvalidUsage, "%s has the same %s as %s", tp_element_where(doc, b->element, second), what,
				tp_element_where(doc, a->element, first));
	}
	return ncclSuccess;
}

/* Which elements may hold it; NULL: not one of ours, kept and not looked at. */
static const char *const *parents_of(const char *name)
{
	static const struct { const char *name; const char *const parents[4]; } known[] = {
		{ "cpu", { "system" } }, { "pci", { "cpu", "pci" } }, { "pcilink", { "pci" } }, { "gpu", { "pci" } }, { "nvlink", { "gpu" } },
		{ "xgmi", { "gpu" } }, { "nopeer", { "gpu" } }, { "c2c", { "gpu" } }, { "nic", { "pci", "cpu" } }, { "net", { "nic" } }, { "cache", { "cpu" } },
		{ "core", { "cpu", "cache" } }, { "hostrank", { "cpu", "system" } },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(known); i++)
		if (strcmp(known[i].name, name) == 0) return known[i].parents;
	return NULL;
}

static ncclResult_t check_place(const struct tp_topo_doc *doc, const struct tp_element *e)
{
	const char *const *parents = parents_of(e->name);
	char where[TP_WHERE_BYTES];
	if (!parents) return ncclSuccess;
	for (int i = 0; i < 4 && parents[i]; i++)
		if (e->parent && strcmp(e->parent->name, parents[i]) == 0) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "%s lies in <%.20s>, its place is in <%s>%s%s%s", tp_element_where(doc, e, where),
		e->parent ? e->parent->name : "nothing", parents[0], parents[1] ? " or <" : "", parents[1] ? parents[1] : "", parents[1] ? ">" : "");
}

static ncclResult_t check_bus(const struct tp_topo_doc *doc, const struct tp_element *e, const char *name, int64_t *bus)
{
	const char *text = tp_element_get(e, name);
	char where[TP_WHERE_BYTES];
	if (!text) return TP_FAIL(ncclInvalidUsage, "%s has no %s", tp_element_where(doc, e, where), name);
	if (!tp_bus_id_parse(text, bus))
		return TP_FAIL(ncclInvalidUsage, "%s: %s=\"%.40s\" should be a bus id such as 0000:1b:00.0", tp_element_where(doc, e, where), name, text);
	return ncclSuccess;
}

static ncclResult_t check_numbers(const struct tp_topo_doc *doc, const struct tp_element *e)
{
	static const struct { const char *element, *name; int64_t min, max; } ranges[] = {
		{ "cpu", "numaid", -1, 65535 }, { "cpu", "familyid", 0, 65535 }, { "cpu", "modelid", 0, 65535 },
		{ "pci", "link_width", -1, 255 }, { "pci", "max_link_width", -1, 255 },
		{ "gpu", "dev", -1, 1 << 20 }, { "gpu", "rank", -1, 1 << 24 }, { "gpu", "sm", 0, 100000 }, { "gpu", "gdr", 0, 255 },
		{ "nvlink", "count", 0, 1024 }, { "xgmi", "count", 0, 1024 }, { "c2c", "count", 0, 1024 }, { "c2c", "bw", 0, 100000000 },
		{ "net", "dev", -1, 1 << 20 }, { "net", "speed", -1, 100000000 }, { "net", "port", -1, 65535 }, { "net", "maxconn", INT32_MIN, INT64_C(1) << 40 },
		{ "net", "gdr", 0, 255 }, { "net", "coll", 0, 255 }, { "net", "rail", -1, 65535 }, { "net", "plane", -1, 65535 },
		{ "hostrank", "rank", 0, 1 << 24 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(ranges); i++) {
		int64_t value;
		if (strcmp(e->name, ranges[i].element) == 0)
			TP_TRY(tp_element_int(doc, e, ranges[i].name, ranges[i].min, ranges[i].max, 0, &value));
	}
	return ncclSuccess;
}

struct sets { struct identities bus, rank, net, numa; };

static ncclResult_t check_element(const struct tp_topo_doc *doc, const struct tp_element *e, uint64_t *host, struct sets *sets)
{
	int64_t value;
	TP_TRY(check_place(doc, e));
	TP_TRY(check_numbers(doc, e));
	if (strcmp(e->name, "cpu") == 0) {
		uint64_t mask[TP_CPU_WORDS];
		TP_TRY(tp_element_mask(doc, e, "affinity", mask));
		TP_TRY(tp_element_hex(doc, e, "host_hash", 0, host));
		TP_TRY(tp_element_int(doc, e, "numaid", -1, 65535, -1, &value));
		return add(&sets->numa, *host, value, e);
	}
	if (strcmp(e->name, "pci") == 0) {
		TP_TRY(check_bus(doc, e, "busid", &value));
		return add(&sets->bus, *host, value, e);
	}
	if (strcmp(e->name, "nvlink") == 0 || strcmp(e->name, "xgmi") == 0 || strcmp(e->name, "pcilink") == 0 || strcmp(e->name, "nopeer") == 0)
		return check_bus(doc, e, "target", &value);
	if (strcmp(e->name, "net") == 0 && tp_element_get(e, "dev")) {
		TP_TRY(tp_element_int(doc, e, "dev", -1, 1 << 20, -1, &value));
		return value < 0 ? ncclSuccess : add(&sets->net, *host, value, e);
	}
	if (strcmp(e->name, "gpu") == 0 || strcmp(e->name, "hostrank") == 0) {
		TP_TRY(tp_element_int(doc, e, "rank", -1, 1 << 24, -1, &value));
		return value < 0 ? ncclSuccess : add(&sets->rank, 0, value, e);
	}
	return ncclSuccess;
}

ncclResult_t tp_doc_check(const struct tp_topo_doc *doc)
{
	struct sets sets = { 0 };
	uint64_t host = 0;
	ncclResult_t result = ncclSuccess;
	if (strcmp(doc->root->name, "graphs") == 0) return ncclSuccess;
	if (strcmp(doc->root->name, "system") != 0)
		return TP_FAIL(ncclInvalidUsage, "%s:%d: <%.40s> is no description of a machine, which starts with <system> (graphs: <graphs>)", doc->name,
			doc->root->line, doc->root->name);
	for (const struct tp_element *e = doc->root; e && result == ncclSuccess; e = tp_doc_walk(doc, e))
		result = check_element(doc, e, &host, &sets);
	if (result == ncclSuccess) result = find_twice(doc, &sets.numa, "host and NUMA node");
	if (result == ncclSuccess) result = find_twice(doc, &sets.bus, "bus id");
	if (result == ncclSuccess) result = find_twice(doc, &sets.rank, "rank");
	if (result == ncclSuccess) result = find_twice(doc, &sets.net, "device number (dev)");
	free(sets.bus.list);
	free(sets.rank.list);
	free(sets.net.list);
	free(sets.numa.list);
	return result;
}
