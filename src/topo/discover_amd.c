/* AMD's GPUs from /sys/class/kfd: the compute driver's list of nodes (CPUs and GPUs) and the links between them. */
#include <stdlib.h>
#include <string.h>

#include "topo/discover.h"

#define NODES "/sys/class/kfd/kfd/topology/nodes"
#define XGMI 11                     /* the driver's number for such a link */
#define MAX_NODES 256
#define MAX_PEERS 64

struct properties { char text[4096]; };

static bool read_properties(const struct tp_discovery *d, struct properties *p, const char *where)
{
	size_t bytes = tp_sys_bytes(d, (uint8_t *)p->text, sizeof(p->text) - 1, NODES "/%s/properties", where);
	p->text[bytes] = 0;
	return bytes > 0;
}

/* "name value" lines. */
static int64_t property(const struct properties *p, const char *name)
{
	size_t bytes = strlen(name);
	for (const char *line = p->text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, name, bytes) == 0 && line[bytes] == ' ') return strtoll(line + bytes, NULL, 10);
	}
	return 0;
}

/* The bus id of a node; "": a CPU. */
static void bus_of(const struct properties *p, char out[20])
{
	int64_t location = property(p, "location_id"), domain = property(p, "domain");
	*out = 0;
	if (!property(p, "simd_count")) return;
	snprintf(out, 20, "%04llx:%02x:%02x.%x", (unsigned long long)(domain & 0xffffffff), (unsigned)(location >> 8 & 255),
		(unsigned)(location >> 3 & 31), (unsigned)(location & 7));
}

static ncclResult_t describe_node(struct tp_discovery *d, const struct properties *p, int dev, struct tp_element *gpu)
{
	int64_t version = property(p, "gfx_target_version"), per_cu = property(p, "simd_per_cu");
	TP_TRY(tp_doc_setf(d->doc, gpu, "dev", "%d", dev));
	/* RCCL writes compute units here. */
	TP_TRY(tp_doc_setf(d->doc, gpu, "sm", "%lld", (long long)(property(p, "simd_count") / (per_cu > 0 ? per_cu : 4))));
	if (!version) return ncclSuccess;
	return tp_doc_setf(d->doc, gpu, "gcn", "gfx%lld%llx%llx", (long long)(version / 10000), (long long)(version / 100 % 100), (long long)(version % 100));
}

static ncclResult_t add_link(struct tp_discovery *d, struct tp_element *gpu, const struct properties *link, const struct properties *peer)
{
	char bus[20];
	int64_t most = property(link, "max_bandwidth"), least = property(link, "min_bandwidth");
	bus_of(peer, bus);
	/* To a CPU of the same package (MI300A): its bandwidth is in MB/s, NCCL's element for such a link likewise. */
	struct tp_element *e = tp_doc_add(d->doc, gpu, *bus ? "xgmi" : "c2c");
	if (!e) return ncclSystemError;
	if (!*bus) {
		TP_TRY(tp_doc_setf(d->doc, e, "bw", "%lld", (long long)TP_MAX(most, least)));
		return tp_doc_set(d->doc, e, "count", "1");
	}
	TP_TRY(tp_doc_set(d->doc, e, "target", bus));
	/* The least is one link's, the most that of all of them. */
	TP_TRY(tp_doc_setf(d->doc, e, "count", "%lld", (long long)(least > 0 && most > least ? most / least : 1)));
	return tp_doc_set(d->doc, e, "tclass", "0x038000");
}

static ncclResult_t add_links(struct tp_discovery *d, const char *node, struct tp_element *gpu)
{
	char links[MAX_PEERS][TP_TOPO_NAME_BYTES], where[160];
	struct properties link, peer;
	int count = tp_sys_list(d, links, MAX_PEERS, NODES "/%s/io_links", node);
	for (int i = 0; i < count; i++) {
		snprintf(where, sizeof(where), "%.63s/io_links/%.63s", node, links[i]);
		if (!read_properties(d, &link, where) || property(&link, "type") != XGMI) continue;
		snprintf(where, sizeof(where), "%lld", (long long)property(&link, "node_to"));
		if (!read_properties(d, &peer, where)) continue;
		TP_TRY(add_link(d, gpu, &link, &peer));
	}
	return ncclSuccess;
}

ncclResult_t tp_discover_amd(struct tp_discovery *d, const char *bus_id, struct tp_element *gpu)
{
	char (*names)[TP_TOPO_NAME_BYTES] = tp_alloc(MAX_NODES, sizeof(*names), "the machine's GPUs"), bus[20];
	struct properties p;
	int64_t wanted, found;
	ncclResult_t result = ncclSuccess;
	if (!names) return ncclSystemError;
	int count = tp_bus_id_parse(bus_id, &wanted) ? tp_sys_list(d, names, MAX_NODES, NODES) : 0;
	for (int i = 0, dev = 0; i < count; i++) {
		if (!read_properties(d, &p, names[i])) continue;
		bus_of(&p, bus);
		if (!*bus) continue;
		if (tp_bus_id_parse(bus, &found) && found == wanted) {
			result = describe_node(d, &p, dev, gpu);
			if (result == ncclSuccess) result = add_links(d, names[i], gpu);
			break;
		}
		dev++;
	}
	free(names);
	return result;
}
