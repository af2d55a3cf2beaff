/* What can't be true of any machine is refused before anything is built from it. A sorted list of identities finds what is there
 * twice; numbers are read once here, so that their errors have a line. */
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

#define MOST_MENDED 64          /* a file with more of it is another kind of thing */

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
		{ "gpu", "dev", -1, 1 << 20 }, { "gpu", "rank", -1, 1 << 24 }, { "gpu", "sm", 0, 100000 }, { "gpu", "gdr", 0, 255 }, { "gpu", "mlopart", -1, 1024 },
		{ "nvlink", "count", 0, 1024 }, { "xgmi", "count", 0, 1024 }, { "c2c", "count", 0, 1024 }, { "c2c", "bw", 0, 100000000 },
		{ "net", "dev", -1, 1 << 20 }, { "net", "speed", -1, INT32_MAX }, { "net", "port", -1, 65535 }, { "net", "maxconn", INT32_MIN, INT64_C(1) << 40 },
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

/* Parts of one GPU: few, and each once. */
static ncclResult_t check_parts(const struct tp_topo_doc *doc, const struct tp_element *pci)
{
	char where[TP_WHERE_BYTES], other[TP_WHERE_BYTES];
	const struct tp_element *gpus[TP_TOPO_MAX_PARTS];
	int count = 0;
	for (const struct tp_element *e = pci->first; e; e = e->next) {
		int64_t part, before;
		if (strcmp(e->name, "gpu") != 0) continue;
		if (count == TP_TOPO_MAX_PARTS)
			return TP_FAIL(ncclInvalidUsage, "%s holds more than %d GPUs, and the parts of one are few", tp_element_where(doc, pci, where), TP_TOPO_MAX_PARTS);
		TP_TRY(tp_element_int(doc, e, "mlopart", -1, 1024, -1, &part));
		for (int i = 0; i < count && part >= 0; i++) {
			TP_TRY(tp_element_int(doc, gpus[i], "mlopart", -1, 1024, -1, &before));
			if (before == part)
				return TP_FAIL(ncclInvalidUsage, "%s is the same part (mlopart) of its GPU as %s", tp_element_where(doc, e, where), tp_element_where(doc, gpus[i], other));
		}
		gpus[count++] = e;
	}
	return ncclSuccess;
}

struct sets { struct identities bus, rank, net, numa; };

static void free_sets(struct sets *sets)
{
	free(sets->bus.list);
	free(sets->rank.list);
	free(sets->net.list);
	free(sets->numa.list);
}

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
		TP_TRY(check_parts(doc, e));
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
	free_sets(&sets);
	return result;
}

/* ---- What can be mended ---- */

static bool is_bridge(const struct tp_element *e)
{
	const char *class = tp_element_get(e, "class");
	return (class && strncmp(class, "0x0604", 6) == 0) || tp_element_child(e, "pci");
}

static void move_children(struct tp_element *from, struct tp_element *to)
{
	if (!from->first) return;
	for (struct tp_element *e = from->first; e; e = e->next) e->parent = to;
	if (to->last) to->last->next = from->first;
	else to->first = from->first;
	to->last = from->last;
	from->first = from->last = NULL;
}

static bool is_taken(const struct identities *all, uint64_t host, int64_t id)
{
	for (size_t i = 0; i < all->count; i++)
		if (all->list[i].host == host && all->list[i].id == id) return true;
	return false;
}

/* A switch that is written out for each of its children, as dumps that were put together by hand have it, is one; a device that has the bus id of a bridge
 * gets one that is free. Two devices of one bus id can't be told apart. */
static ncclResult_t mend_bus(struct tp_topo_doc *doc, struct identities *all, size_t i)
{
	struct tp_element *a = (struct tp_element *)(uintptr_t)all->list[i - 1].element, *b = (struct tp_element *)(uintptr_t)all->list[i].element;
	char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES], text[20];
	tp_element_where(doc, a, first);
	tp_element_where(doc, b, second);
	if (is_bridge(a) && is_bridge(b)) {
		if (a->parent != b->parent) return ncclSuccess;
		TP_WARN("%s is %s again: taken for one bridge", second, first);
		move_children(b, a);
		tp_doc_remove(b);
		all->list[i].element = a;
		return ncclSuccess;
	}
	if (!is_bridge(a) && !is_bridge(b)) return ncclSuccess;
	struct identity *device = is_bridge(a) ? &all->list[i] : &all->list[i - 1];
	int64_t bus = device->id;
	while ((bus & 15) < 7 && is_taken(all, device->host, bus)) bus++;
	if (is_taken(all, device->host, bus)) return ncclSuccess;
	tp_bus_id_text(bus, text);
	TP_WARN("%s has the bus id of %s, which is a bridge: taken for %s", device == &all->list[i] ? second : first, device == &all->list[i] ? first : second, text);
	device->id = bus;
	return tp_doc_set(doc, (struct tp_element *)(uintptr_t)device->element, "busid", text);
}

static bool is_virtual(const struct tp_element *net) { return net->parent && net->parent->parent && strcmp(net->parent->parent->name, "cpu") == 0; }

/* Ports of different names to which two ranks gave one number. And an interface that is no PCI device is written by each rank below its own CPU: NCCL's dumps
 * have it once a CPU. */
static ncclResult_t mend_net(struct tp_topo_doc *doc, struct identities *all, size_t i)
{
	struct tp_element *a = (struct tp_element *)(uintptr_t)all->list[i - 1].element, *b = (struct tp_element *)(uintptr_t)all->list[i].element;
	const char *x = tp_element_get(a, "name"), *y = tp_element_get(b, "name");
	char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
	int64_t dev = all->list[i].id;
	if (!x || !y) return ncclSuccess;
	if (strcmp(x, y) == 0) {
		if (!is_virtual(a) || !is_virtual(b)) return ncclSuccess;
		TP_INFO(TP_GRAPH, "%s is %s again", tp_element_where(doc, b, second), tp_element_where(doc, a, first));
		tp_doc_remove(b);
		all->list[i].element = a;
		return ncclSuccess;
	}
	while (is_taken(all, all->list[i].host, dev)) dev++;
	TP_WARN("%s has the number (dev) of %s: taken for %d", tp_element_where(doc, b, second), tp_element_where(doc, a, first), (int)dev);
	all->list[i].id = dev;
	return tp_doc_setf(doc, b, "dev", "%d", (int)dev);
}

static ncclResult_t mend_each(struct tp_topo_doc *doc, struct identities *all, ncclResult_t (*mend)(struct tp_topo_doc *doc, struct identities *all, size_t i))
{
	int mended = 0;
	if (!all->count) return ncclSuccess;
	qsort(all->list, all->count, sizeof(all->list[0]), by_identity);
	for (size_t i = 1; i < all->count && mended < MOST_MENDED; i++) {
		const struct identity *a = &all->list[i - 1], *b = &all->list[i];
		if (a->host != b->host || a->id != b->id || a->element == b->element) continue;
		TP_TRY(mend(doc, all, i));
		mended++;
	}
	return ncclSuccess;
}

ncclResult_t tp_doc_mend(struct tp_topo_doc *doc)
{
	struct sets sets = { 0 };
	uint64_t host = 0;
	ncclResult_t result = ncclSuccess;
	if (strcmp(doc->root->name, "system") != 0) return ncclSuccess;
	for (const struct tp_element *e = doc->root; e && result == ncclSuccess; e = tp_doc_walk(doc, e)) result = check_element(doc, e, &host, &sets);
	if (result == ncclSuccess) result = mend_each(doc, &sets.bus, mend_bus);
	if (result == ncclSuccess) result = mend_each(doc, &sets.net, mend_net);
	free_sets(&sets);
	return result;
}
