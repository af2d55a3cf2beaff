/* What several processes found, made one: elements are matched by what identifies them, and what one has and the other hasn't is
 * taken over. The description that is there first decides what can't be told apart from a change in time (a link that sleeps). */
#include <string.h>

#include "topo/doc.h"
#include "topo/merge.h"

struct merge {
	struct tp_topo_doc *into;
	const struct tp_topo_doc *from;
	bool strict;                    /* contradictions are errors */
	uint64_t host;                  /* of the CPU that is being merged */
};

static bool same_text(const struct tp_element *a, const struct tp_element *b, const char *name)
{
	const char *x = tp_element_get(a, name), *y = tp_element_get(b, name);
	return x && y ? strcmp(x, y) == 0 : x == y;
}

static bool same_bus(const struct tp_element *a, const struct tp_element *b, const char *name)
{
	const char *x = tp_element_get(a, name), *y = tp_element_get(b, name);
	int64_t i, j;
	return x && y && tp_bus_id_parse(x, &i) && tp_bus_id_parse(y, &j) && i == j;
}

/* Where one says nothing it may be the same. */
static bool may_be_same(const struct tp_element *a, const struct tp_element *b, const char *name)
{
	return !tp_element_get(a, name) || !tp_element_get(b, name) || same_text(a, b, name);
}

static bool is_same(const struct merge *m, const struct tp_element *a, const struct tp_element *b)
{
	uint64_t x, y;
	if (strcmp(a->name, b->name) != 0) return false;
	if (strcmp(a->name, "cpu") == 0)
		return tp_element_hex(m->into, a, "host_hash", 0, &x) == ncclSuccess && tp_element_hex(m->from, b, "host_hash", 0, &y) == ncclSuccess &&
			x == y && same_text(a, b, "numaid");
	if (strcmp(a->name, "pci") == 0) return same_bus(a, b, "busid");
	if (strcmp(a->name, "nvlink") == 0 || strcmp(a->name, "xgmi") == 0 || strcmp(a->name, "pcilink") == 0 ||
		strcmp(a->name, "nopeer") == 0) return same_bus(a, b, "target");
	if (strcmp(a->name, "gpu") == 0) return may_be_same(a, b, "rank") && may_be_same(a, b, "dev") && may_be_same(a, b, "mlopart");
	if (strcmp(a->name, "nic") == 0) return strcmp(a->parent->name, "pci") == 0 || same_text(a, b, "name");
	if (strcmp(a->name, "c2c") == 0) return true;
	if (strcmp(a->name, "net") == 0) return same_text(a, b, "name") && may_be_same(a, b, "port");
	if (strcmp(a->name, "hostrank") == 0) return same_text(a, b, "rank");
	if (strcmp(a->name, "cache") == 0 || strcmp(a->name, "core") == 0) return same_text(a, b, "affinity") && same_text(a, b, "level");
	for (const struct tp_attribute *t = b->attributes; t; t = t->next)
		if (!same_text(a, b, t->name)) return false;
	return true;
}

/* What can't change while a machine runs. */
static bool is_fixed(const char *element, const char *attribute)
{
	static const char *const fixed[][2] = {
		{ "cpu", "arch" }, { "cpu", "vendor" }, { "cpu", "familyid" }, { "cpu", "modelid" }, { "pci", "class" }, { "pci", "vendor" },
		{ "pci", "device" }, { "pci", "subsystem_vendor" }, { "pci", "subsystem_device" }, { "gpu", "sm" }, { "gpu", "gcn" }, { "gpu", "dev" },
		{ "nvlink", "count" }, { "xgmi", "count" }, { "net", "dev" }, { "net", "guid" }, { "net", "speed" },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(fixed); i++)
		if (strcmp(fixed[i][0], element) == 0 && strcmp(fixed[i][1], attribute) == 0) return true;
	return false;
}

static ncclResult_t merge_attributes(struct merge *m, struct tp_element *a, const struct tp_element *b)
{
	for (const struct tp_attribute *t = b->attributes; t; t = t->next) {
		const char *have = tp_element_get(a, t->name);
		char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
		if (!have) {
			TP_TRY(tp_doc_set(m->into, a, t->name, t->value));
		} else if (m->strict && strcmp(have, t->value) != 0 && is_fixed(a->name, t->name)) {
			return TP_FAIL(ncclInvalidUsage, "two processes of one machine say different things of one device: %s has %s=\"%.60s\", %s has \"%.60s\"",
				tp_element_where(m->into, a, first), t->name, have, tp_element_where(m->from, b, second), t->value);
		}
	}
	return ncclSuccess;
}

/* A device of this bus id at another place of the same host. */
static const struct tp_element *elsewhere(const struct merge *m, const struct tp_element *pci)
{
	uint64_t host = 0;
	for (const struct tp_element *e = m->into->root; e; e = tp_doc_walk(m->into, e)) {
		if (strcmp(e->name, "cpu") == 0 && tp_element_hex(m->into, e, "host_hash", 0, &host) != ncclSuccess) return NULL;
		if (strcmp(e->name, "pci") == 0 && host == m->host && same_bus(e, pci, "busid")) return e;
	}
	return NULL;
}

static ncclResult_t merge_children(struct merge *m, struct tp_element *into, const struct tp_element *from);

static ncclResult_t take_over(struct merge *m, struct tp_element *into, const struct tp_element *from)
{
	const struct tp_element *other = strcmp(from->name, "pci") == 0 ? elsewhere(m, from) : NULL;
	char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
	if (other && m->strict)
		return TP_FAIL(ncclInvalidUsage, "two processes of one machine found one device at different places: %s in <%s %.20s>, %s in <%s %.20s>",
			tp_element_where(m->into, other, first), other->parent->name, tp_element_get(other->parent, "busid") ? : "",
			tp_element_where(m->from, from, second), from->parent->name, tp_element_get(from->parent, "busid") ? : "");
	/* A file that places a device says so because the machine doesn't. */
	if (other) {
		TP_TRY(merge_attributes(m, (struct tp_element *)other, from));
		return merge_children(m, (struct tp_element *)other, from);
	}
	struct tp_element *made = tp_doc_add(m->into, into, from->name);
	if (!made) return ncclSystemError;
	TP_TRY(merge_attributes(m, made, from));
	return merge_children(m, made, from);
}

static ncclResult_t merge_children(struct merge *m, struct tp_element *into, const struct tp_element *from)
{
	for (const struct tp_element *child = from->first; child; child = child->next) {
		struct tp_element *match = into->first;
		if (strcmp(child->name, "cpu") == 0) TP_TRY(tp_element_hex(m->from, child, "host_hash", 0, &m->host));
		while (match && !is_same(m, match, child)) match = match->next;
		if (!match) {
			TP_TRY(take_over(m, into, child));
			continue;
		}
		TP_TRY(merge_attributes(m, match, child));
		TP_TRY(merge_children(m, match, child));
	}
	return ncclSuccess;
}

static ncclResult_t merge(struct tp_topo_doc *into, const struct tp_topo_doc *from, bool strict)
{
	struct merge m = { .into = into, .from = from, .strict = strict };
	if (strcmp(into->root->name, "system") != 0 || strcmp(from->root->name, "system") != 0)
		return TP_FAIL(ncclInvalidUsage, "%s and %s can't be made one: descriptions of machines start with <system>", into->name, from->name);
	TP_TRY(merge_attributes(&m, into->root, from->root));
	TP_TRY(merge_children(&m, into->root, from->root));
	return tp_doc_check(into);
}

ncclResult_t tp_topo_doc_merge(struct tp_topo_doc *into, const struct tp_topo_doc *from)
{
	return merge(into, from, true);
}

ncclResult_t tp_doc_merge_found(struct tp_topo_doc *file, const struct tp_topo_doc *found)
{
	const struct tp_element *here = tp_element_child(found->root, "cpu");
	const char *hash = here ? tp_element_get(here, "host_hash") : NULL;
	/* Files of providers describe any machine of a kind: this one. */
	for (struct tp_element *cpu = file->root->first; cpu && hash; cpu = cpu->next)
		if (strcmp(cpu->name, "cpu") == 0 && !tp_element_get(cpu, "host_hash")) TP_TRY(tp_doc_set(file, cpu, "host_hash", hash));
	return merge(file, found, false);
}

ncclResult_t tp_topo_doc_fuse(const struct tp_topo_text *texts, int count, struct tp_topo_doc **out)
{
	struct tp_topo_doc *all = NULL;
	ncclResult_t result = ncclSuccess;
	for (int i = 0; i < count && result == ncclSuccess; i++) {
		char name[32];
		struct tp_topo_doc *one = NULL;
		/* Ranks of one process send the same once; the others nothing. */
		if (!texts[i].bytes) continue;
		snprintf(name, sizeof(name), "rank %d", texts[i].rank);
		result = tp_topo_doc_parse(texts[i].text, texts[i].bytes, name, &one);
		if (result == ncclSuccess && !all) {
			all = one;
			continue;
		}
		if (result == ncclSuccess) result = tp_topo_doc_merge(all, one);
		tp_topo_doc_free(one);
	}
	if (result == ncclSuccess && !all) result = TP_FAIL(ncclInternalError, "no rank described its machine");
	if (result != ncclSuccess) tp_topo_doc_free(all);
	else *out = all;
	return result;
}
