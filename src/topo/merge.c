/* What several processes found, made one: elements are matched by what identifies them, and what one has and the other hasn't is
 * taken over. The description that is there first decides what can't be told apart from a change in time (a link that sleeps).
 * Contradictions are errors, or notes where a job has to run on; where a file is merged with what was found, they are what files are for. */
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"
#include "topo/merge.h"

#define MAX_LOOKS (INT64_C(1) << 27)        /* at elements, for one that may be the same; a rack of GPUs needs less than a hundredth */

enum merge_mode { STRICT, LENIENT, INTO_FILE };
struct merge {
	struct tp_topo_doc *into;
	const struct tp_topo_doc *from;
	enum merge_mode mode;
	FILE *notes;                    /* LENIENT: a line for each contradiction */
	uint64_t host;                  /* of the CPU that is being merged */
	int64_t looks;
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
	/* A file was written when other ranks had the GPUs. */
	if (strcmp(a->name, "gpu") == 0)
		return may_be_same(a, b, "mlopart") && (m->mode == INTO_FILE || (may_be_same(a, b, "rank") && may_be_same(a, b, "dev")));
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

/* What belongs to this job, not to the machine that a file describes. */
static bool is_of_the_job(const char *element, const char *attribute)
{
	if (strcmp(element, "gpu") == 0) return strcmp(attribute, "rank") == 0;
	if (strcmp(element, "hostrank") == 0) return true;
	return strcmp(element, "net") == 0 && (strcmp(attribute, "dev") == 0 || strcmp(attribute, "gdr") == 0);
}

static ncclResult_t merge_attributes(struct merge *m, struct tp_element *a, const struct tp_element *b)
{
	for (const struct tp_attribute *t = b->attributes; t; t = t->next) {
		const char *have = tp_element_get(a, t->name);
		char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
		if (!have || (m->mode == INTO_FILE && is_of_the_job(a->name, t->name))) {
			TP_TRY(tp_doc_set(m->into, a, t->name, t->value));
			continue;
		}
		if (m->mode == INTO_FILE || strcmp(have, t->value) == 0 || !is_fixed(a->name, t->name)) continue;
		if (m->mode == STRICT)
			return TP_FAIL(ncclInvalidUsage, "two processes of one machine say different things of one device: %s has %s=\"%.60s\", %s has \"%.60s\"",
				tp_element_where(m->into, a, first), t->name, have, tp_element_where(m->from, b, second), t->value);
		fprintf(m->notes, "%s of %s is %.60s, for %.60s it is %.60s\n", t->name, tp_element_where(m->into, a, first), have, m->from->name, t->value);
	}
	return ncclSuccess;
}

/* A device of this bus id at another place of the same host. */
static const struct tp_element *elsewhere(struct merge *m, const struct tp_element *pci)
{
	uint64_t host = 0;
	for (const struct tp_element *e = m->into->root; e && m->looks < MAX_LOOKS; e = tp_doc_walk(m->into, e), m->looks++) {
		if (strcmp(e->name, "cpu") == 0 && tp_element_hex(m->into, e, "host_hash", 0, &host) != ncclSuccess) return NULL;
		if (strcmp(e->name, "pci") == 0 && host == m->host && same_bus(e, pci, "busid")) return e;
	}
	return NULL;
}

/* A port of no PCI device (software, a guest's) that a file places somewhere. */
static const struct tp_element *placed(struct merge *m, const struct tp_element *net)
{
	uint64_t host = 0;
	if (m->mode != INTO_FILE || !net->parent || !net->parent->parent || strcmp(net->parent->parent->name, "cpu") != 0) return NULL;
	for (const struct tp_element *e = m->into->root; e && m->looks < MAX_LOOKS; e = tp_doc_walk(m->into, e), m->looks++) {
		if (strcmp(e->name, "cpu") == 0 && tp_element_hex(m->into, e, "host_hash", 0, &host) != ncclSuccess) return NULL;
		if (strcmp(e->name, "net") == 0 && host == m->host && is_same(m, e, net)) return e;
	}
	return NULL;
}

static ncclResult_t merge_children(struct merge *m, struct tp_element *into, const struct tp_element *from);

static ncclResult_t take_over(struct merge *m, struct tp_element *into, const struct tp_element *from)
{
	const struct tp_element *other = strcmp(from->name, "pci") == 0 ? elsewhere(m, from) : strcmp(from->name, "net") == 0 ? placed(m, from) : NULL;
	char first[TP_WHERE_BYTES], second[TP_WHERE_BYTES];
	if (other && m->mode == STRICT)
		return TP_FAIL(ncclInvalidUsage, "two processes of one machine found one device at different places: %s in <%s %.20s>, %s in <%s %.20s>",
			tp_element_where(m->into, other, first), other->parent->name, tp_element_get(other->parent, "busid") ? : "",
			tp_element_where(m->from, from, second), from->parent->name, tp_element_get(from->parent, "busid") ? : "");
	if (other && m->mode == LENIENT)
		fprintf(m->notes, "%s found %s elsewhere: in <%s %.20s>\n", m->from->name, tp_element_where(m->into, other, first), from->parent->name,
			tp_element_get(from->parent, "busid") ? : "");
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
		for (; match && !is_same(m, match, child) && m->looks < MAX_LOOKS; m->looks++) match = match->next;
		if (m->looks >= MAX_LOOKS)
			return TP_FAIL(ncclInvalidUsage, "%s and %s are too large to be made one: %zu and %zu elements", m->into->name, m->from->name, m->into->elements,
				m->from->elements);
		if (!match) {
			TP_TRY(take_over(m, into, child));
			continue;
		}
		TP_TRY(merge_attributes(m, match, child));
		TP_TRY(merge_children(m, match, child));
	}
	return ncclSuccess;
}

static ncclResult_t merge(struct tp_topo_doc *into, const struct tp_topo_doc *from, enum merge_mode mode, FILE *notes)
{
	struct merge m = { .into = into, .from = from, .mode = mode, .notes = notes };
	if (strcmp(into->root->name, "system") != 0 || strcmp(from->root->name, "system") != 0)
		return TP_FAIL(ncclInvalidUsage, "%s and %s can't be made one: descriptions of machines start with <system>", into->name, from->name);
	TP_TRY(merge_attributes(&m, into->root, from->root));
	return merge_children(&m, into->root, from->root);
}

ncclResult_t tp_topo_doc_merge(struct tp_topo_doc *into, const struct tp_topo_doc *from)
{
	TP_TRY(merge(into, from, STRICT, NULL));
	return tp_doc_check(into);
}

/* How many hosts a file describes, and whether this one is among them. */
static ncclResult_t count_hosts(const struct tp_topo_doc *file, uint64_t own, int *hosts, bool *has_own)
{
	const struct tp_element *first = NULL;
	uint64_t hash, first_hash = 0;
	*hosts = 0;
	*has_own = false;
	for (const struct tp_element *cpu = file->root->first; cpu; cpu = cpu->next) {
		if (strcmp(cpu->name, "cpu") != 0 || !tp_element_get(cpu, "host_hash")) continue;
		TP_TRY(tp_element_hex(file, cpu, "host_hash", 0, &hash));
		*has_own |= hash == own;
		if (!first) *hosts = 1;
		else if (hash != first_hash) *hosts = 2;
		else continue;
		first = first ? first : cpu;
		first_hash = hash;
	}
	return ncclSuccess;
}

ncclResult_t tp_doc_merge_found(struct tp_topo_doc *file, const struct tp_topo_doc *found)
{
	const struct tp_element *here = tp_element_child(found->root, "cpu");
	const char *text = here ? tp_element_get(here, "host_hash") : NULL;
	uint64_t own = 0;
	int hosts = 0;
	bool has_own = true;
	if (text) {
		TP_TRY(tp_element_hex(found, here, "host_hash", 0, &own));
		TP_TRY(count_hosts(file, own, &hosts, &has_own));
	}
	/* A hash changes with every start of a machine: a file of one host that isn't this one is of it before, or of its twin. */
	bool rename = text && !has_own && hosts == 1;
	if (!has_own && hosts > 1)
		TP_WARN("%s describes several hosts and none of them is this one (host_hash=\"%.40s\"): it tells nothing of this machine. Give it the file of one host, or "
			"that hash to the host that is meant", file->name, text);
	/* Files of providers describe any machine of a kind: this one. */
	for (struct tp_element *cpu = file->root->first; cpu && text; cpu = cpu->next)
		if (strcmp(cpu->name, "cpu") == 0 && (rename || !tp_element_get(cpu, "host_hash"))) TP_TRY(tp_doc_set(file, cpu, "host_hash", text));
	return merge(file, found, INTO_FILE, NULL);
}

#define MAX_PORTS 4096
struct port { struct tp_element *element; uint64_t host; int64_t dev; };

/* Numbers that ranks gave to different devices: whoever comes later gets the next that is free. notes NULL: without a word. */
static ncclResult_t number_anew(struct tp_topo_doc *doc, const char *name, struct port *ports, FILE *notes)
{
	char where[TP_WHERE_BYTES];
	uint64_t host = 0;
	int count = 0, next = 0;
	for (struct tp_element *e = doc->root; e && count < MAX_PORTS; e = tp_doc_walk(doc, e)) {
		if (strcmp(e->name, "cpu") == 0) TP_TRY(tp_element_hex(doc, e, "host_hash", 0, &host));
		if (strcmp(e->name, name) != 0) continue;
		ports[count] = (struct port){ .element = e, .host = host };
		TP_TRY(tp_element_int(doc, e, "dev", -1, 1 << 20, -1, &ports[count].dev));
		next = TP_MAX(next, (int)ports[count].dev + 1);
		count++;
	}
	for (int i = 0; i < count; i++) {
		int twin = 0;
		while (twin < i && (ports[twin].host != ports[i].host || ports[twin].dev != ports[i].dev)) twin++;
		if (twin == i || ports[i].dev < 0) continue;
		if (notes)
			fprintf(notes, "%s is number %lld as %.60s is: some rank uses other NICs\n", tp_element_where(doc, ports[i].element, where), (long long)ports[i].dev,
				tp_element_get(ports[twin].element, "name") ? : "another");
		TP_TRY(tp_doc_setf(doc, ports[i].element, "dev", "%d", next));
		ports[i].dev = next++;
	}
	return ncclSuccess;
}

static ncclResult_t fuse(const struct tp_topo_text *texts, int count, enum merge_mode mode, FILE *notes, struct tp_topo_doc **out)
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
		if (result == ncclSuccess) result = merge(all, one, mode, notes);
		tp_topo_doc_free(one);
	}
	if (result == ncclSuccess && !all) result = TP_FAIL(ncclInternalError, "no rank described its machine");
	if (result != ncclSuccess) tp_topo_doc_free(all);
	else *out = all;
	return result;
}

ncclResult_t tp_topo_doc_fuse(const struct tp_topo_text *texts, int count, struct tp_topo_doc **out)
{
	struct tp_topo_doc *all;
	TP_TRY(fuse(texts, count, STRICT, NULL, &all));
	/* Once, of all of them: each has been checked by itself. */
	ncclResult_t result = tp_doc_check(all);
	if (result != ncclSuccess) tp_topo_doc_free(all);
	else *out = all;
	return result;
}

ncclResult_t tp_topo_doc_join(const struct tp_topo_text *texts, int count, FILE *notes, struct tp_topo_doc **out)
{
	struct tp_topo_doc *all;
	TP_TRY(fuse(texts, count, LENIENT, notes, &all));
	struct port *ports = tp_alloc(MAX_PORTS, sizeof(*ports), "the machine's network ports");
	ncclResult_t result = ports ? number_anew(all, "net", ports, notes) : ncclSystemError;
	/* A process that sees one GPU and no driver's number for it calls it the first. */
	if (result == ncclSuccess) result = number_anew(all, "gpu", ports, NULL);
	free(ports);
	if (result == ncclSuccess) result = tp_doc_check(all);
	if (result != ncclSuccess) tp_topo_doc_free(all);
	else *out = all;
	return result;
}
