/* What this process sees of its machine. A machine doesn't change while a process lives, so it is looked at once for each GPU and network
 * that the process uses. The list only grows, by one exchange of its head: no lock, so that a child forked meanwhile finds it usable. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"

static _Atomic(const struct tp_topo_found *) all_found;

#define MAX_PORTS 64
#define MAX_PLACES 64

static void bus_of_path(const char *path, char out[20])
{
	const char *last = strrchr(path, '/');
	unsigned domain, bus, device, function;
	char end;
	*out = 0;
	if (!last || sscanf(last + 1, "%x:%x:%x.%x%c", &domain, &bus, &device, &function, &end) != 4) return;
	snprintf(out, 20, "%04x:%02x:%02x.%x", domain, bus & 0xff, device & 0x1f, function & 7);
}

/* The transport's ports in its numbering. */
static int list_ports(const struct tp_net_ops *ops, const struct tp_gpu *gpu, struct tp_topo_port *ports)
{
	int count = 0, kept = 0;
	if (ops->devices(&count) != ncclSuccess) return 0;
	for (int i = 0; i < TP_MIN(count, MAX_PORTS); i++) {
		struct tp_net_properties p;
		if (ops->properties(i, &p) != ncclSuccess) continue;
		struct tp_topo_port *port = &ports[kept++];
		*port = (struct tp_topo_port){ .guid = p.guid, .port = (int)p.port, .mbps = (int)TP_MIN(p.speed_mbps, 10000000u), .latency_us = (double)p.latency_us,
			.gdr = p.memory & TP_NET_CUDA || (p.memory & TP_NET_DMABUF && (!gpu || gpu->dma_buf)) };
		snprintf(port->name, sizeof(port->name), "%.31s", p.name);
		bus_of_path(p.pci_path, port->bus_id);
	}
	return kept;
}

static ncclResult_t describe(const struct tp_topo_find *find, uint64_t key, struct tp_topo_found **out)
{
	struct tp_topo_doc *doc;
	struct tp_topo_found *found = tp_alloc(1, sizeof(*found), "a description of the machine");
	if (!found) return ncclSystemError;
	ncclResult_t result = tp_topo_discover(find, &doc);
	if (result == ncclSuccess) {
		result = tp_topo_doc_text(doc, &found->text, &found->bytes);
		tp_topo_doc_free(doc);
	}
	if (result != ncclSuccess) {
		free(found);
		return result;
	}
	found->key = key;
	found->hash = tp_hash64(found->text, found->bytes, 0) | 1;
	*out = found;
	return ncclSuccess;
}

static const struct tp_topo_found *look_up(uint64_t key)
{
	const struct tp_topo_found *f = atomic_load_explicit(&all_found, memory_order_acquire);     /* pairs with the exchange below */
	while (f && f->key != key) f = f->next;
	return f;
}

/* A card that is a program takes memory of any GPU. */
static bool is_software(const struct tp_net_ops *ops, int dev)
{
	struct tp_net_properties p;
	return ops && ops->properties(dev, &p) == ncclSuccess && p.software;
}

bool tp_topo_find_own(const struct ncclComm *comm, const struct tp_topo_found **out)
{
	int dev = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	const char *bus_id = comm->gpu ? comm->gpu->gpu->bus_id : NULL;
	/* Which host it is may change between communicators: NCCL_HOSTID. */
	uint64_t key = tp_hash64(&ops, sizeof(ops), tp_host_hash());
	if (bus_id) key = tp_hash64(bus_id, strlen(bus_id), key);
	*out = look_up(key);
	if (*out) return true;
	struct tp_topo_port ports[MAX_PORTS];
	struct tp_topo_find find = { .root = "", .gpu_bus_id = bus_id, .rank = -1 };
	if (ops) {
		find.ports = ports;
		find.nports = list_ports(ops, comm->gpu ? comm->gpu->gpu : NULL, ports);
	}
	if (comm->gpu) find.gpu_sm = 10 * comm->gpu->gpu->major + comm->gpu->gpu->minor;
	if (comm->gpu) find.gpu_gdr = comm->gpu->gpu->rdma || comm->gpu->gpu->dma_buf || is_software(ops, dev) ? 1 : -1;
	struct tp_topo_found *made;
	if (describe(&find, key, &made) != ncclSuccess) return false;
	const struct tp_topo_found *head = atomic_load_explicit(&all_found, memory_order_relaxed);
	do made->next = head;
	while (!atomic_compare_exchange_weak_explicit(&all_found, &head, made, memory_order_acq_rel, memory_order_relaxed));  /* pairs with look_up */
	*out = made;
	return true;
}

static bool uses(const struct ncclComm *comm, const struct tp_net_ops *ops, int first, int dev)
{
	int count = 0;
	const struct tp_link_seat *seats = tp_links_seats(comm->links, comm->rank, &count);
	for (int i = 0; i < count; i++)
		if (seats[i].dev == dev) return true;
	return !seats && (ops->spreads || dev == first);
}

/* All ports that the links of a rank take turns with, else its GPU. A network without hardware, as a host without a GPU, is near to all. */
void tp_topo_seat_engine(const struct ncclComm *comm)
{
	int dev = 0, count = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	struct tp_net_properties p;
	uint64_t cpus[TP_CPU_WORDS];
	char bus_id[20], device[144];
	bool seated = false;
	if (ops && ops->devices(&count) != ncclSuccess) count = 0;
	for (int i = 0; i < count; i++) {
		if (!uses(comm, ops, dev, i) || ops->properties(i, &p) != ncclSuccess) continue;
		bus_of_path(p.pci_path, bus_id);
		if (!*bus_id || !tp_topo_cpus_near("", bus_id, cpus)) continue;
		snprintf(device, sizeof(device), "NIC %s", p.name);
		tp_engine_sit_by(device, cpus);
		seated = true;
	}
	if (seated || !comm->gpu || !tp_topo_cpus_near("", comm->gpu->gpu->bus_id, cpus)) return;
	snprintf(device, sizeof(device), "GPU %.32s", comm->gpu->gpu->bus_id);
	tp_engine_sit_by(device, cpus);
}

#define MAX_SAID 256
bool tp_topo_first_time(const char *text)
{
	static _Atomic uint64_t said[MAX_SAID];
	uint64_t hash = tp_hash64(text, strlen(text), 0) | 1;
	for (int i = 0; i < MAX_SAID; i++) {
		uint64_t none = 0;
		if (atomic_compare_exchange_strong_explicit(&said[i], &none, hash, memory_order_relaxed, memory_order_relaxed)) return true;
		if (none == hash) return false;
	}
	return false;
}

/* A place is a dozen small files, and a process's ranks run in one or few places: each is looked up once. */
struct known_place { const struct known_place *next; uint64_t mask[TP_CPU_WORDS]; struct tp_topo_place place; };
static _Atomic(const struct known_place *) known_places;

static void find_place(const uint64_t mask[TP_CPU_WORDS], struct tp_topo_place *out)
{
	const struct known_place *k = atomic_load_explicit(&known_places, memory_order_acquire);    /* pairs with the exchange below */
	int count = 0;
	for (; k && memcmp(k->mask, mask, sizeof(k->mask)); k = k->next) count++;
	if (k) {
		*out = k->place;
		return;
	}
	tp_topo_place_of("", mask, out);
	struct known_place *made = count < MAX_PLACES ? calloc(1, sizeof(*made)) : NULL;
	if (!made) return;
	memcpy(made->mask, mask, sizeof(made->mask));
	made->place = *out;
	made->next = atomic_load_explicit(&known_places, memory_order_relaxed);
	while (!atomic_compare_exchange_weak_explicit(&known_places, &made->next, made, memory_order_acq_rel, memory_order_relaxed)) ;
}

void tp_topo_fill_card(const struct ncclComm *comm, struct tp_topo_card *out)
{
	const struct tp_topo_found *own;
	int dev = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	struct tp_net_properties p;
	memset(out, 0, sizeof(*out));
	if (tp_topo_find_own(comm, &own) && own->bytes <= UINT32_MAX) {
		out->doc_hash = own->hash;
		out->doc_bytes = (uint32_t)own->bytes;
	} else if (tp_topo_first_time("no description")) {
		TP_WARN("comm %p rank %d: this machine can't be described (see above): nothing is known of its paths", (const void *)comm, comm->rank);
	}
	tp_cpu_mask(out->mask);
	out->machine = tp_machine_hash();
	out->place = (struct tp_topo_place){ -1, -1, -1 };
	if (comm->gpu) snprintf(out->bus_id, sizeof(out->bus_id), "%.19s", comm->gpu->gpu->bus_id);
	else find_place(out->mask, &out->place);
	if (!ops || ops->properties(dev, &p) != ncclSuccess) return;
	snprintf(out->net, sizeof(out->net), "%.31s", p.name);
	snprintf(out->address, sizeof(out->address), "%s", p.address);
	out->port = (int32_t)p.port;
	out->gbps = (float)p.speed_mbps / 8000;
	out->latency_us = p.latency_us;
}
