/* What is worse than the hardware allows. A machine is judged by what it says it could do, and by its like: a GPU with fewer
 * NVLinks than the others, a NIC in a narrower slot than its twins. What is so by design (every NIC shared by two GPUs) is no fault.
 * Faults with one cause are one warning. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"
#include "topo/paths.h"

/* What hangs below a switch. */
struct load { int gpus, nics, switches; };

struct faults {
	const struct tp_topo *topo;
	const struct tp_topo_policy *policy;
	struct load *loads;             /* [nodes] */
	struct tp_topo_warning *list;
	int count, room;
};

__attribute__((format(printf, 5, 6)))
static ncclResult_t add(struct faults *f, enum tp_topo_fault fault, int32_t node, int32_t peer, const char *format, ...)
{
	if (f->count == f->room) {
		int room = f->room ? f->room * 2 : 16;
		void *list = realloc(f->list, (size_t)room * sizeof(*f->list));
		if (!list) return TP_FAIL(ncclSystemError, "no memory for %d warnings about the machine", room);
		f->list = list;
		f->room = room;
	}
	struct tp_topo_warning *w = &f->list[f->count++];
	va_list list;
	*w = (struct tp_topo_warning){ .fault = fault, .node = node, .peer = peer };
	va_start(list, format);
	vsnprintf(w->text, sizeof(w->text), format, list);
	va_end(list);
	return ncclSuccess;
}

/* The ports of a NIC, whose names users know. */
static const char *device_name(const struct tp_topo *topo, const struct tp_topo_node *node)
{
	for (int32_t l = node->first_link; node->kind == TP_TOPO_NIC && l < node->first_link + node->nlinks; l++)
		if (topo->nodes[topo->links[l].to].kind == TP_TOPO_NET) return topo->nodes[topo->links[l].to].name;
	return node->name;
}

static double port_speed(const struct tp_topo *topo, const struct tp_topo_node *nic)
{
	double bw = 0;
	for (int32_t l = nic->first_link; l < nic->first_link + nic->nlinks; l++)
		if (topo->links[l].kind == TP_WIRE_NET) bw += topo->links[l].bw;
	return bw;
}

/* Switches of one model serve slots of many kinds: only those on which as much hangs are alike. */
static bool serve_alike(const struct load *a, const struct load *b)
{
	return a->gpus + a->nics > 0 && a->gpus == b->gpus && a->nics == b->nics && a->switches == b->switches;
}

/* Devices of one model should have one kind of link. Without identities: GPUs of one generation, NICs of one speed. */
static bool are_alike(const struct faults *f, const struct tp_topo_node *a, const struct tp_topo_node *b)
{
	const struct tp_topo *topo = f->topo;
	if (a->kind != b->kind) return false;
	if (a->kind == TP_TOPO_PCI) return a->pci.vendor == b->pci.vendor && a->pci.device == b->pci.device && serve_alike(&f->loads[a->index], &f->loads[b->index]);
	if (a->pci.vendor && b->pci.vendor)
		return a->pci.vendor == b->pci.vendor && a->pci.device == b->pci.device && a->pci.subsystem_device == b->pci.subsystem_device;
	return a->kind == TP_TOPO_GPU ? a->gpu.sm == b->gpu.sm : port_speed(topo, a) == port_speed(topo, b);
}

/* What this device's link should be: as it says itself, or as most of its like have it. */
static void expected_link(const struct faults *f, const struct tp_topo_node *node, int *width, float *speed, const struct tp_topo_node **twin)
{
	const struct tp_topo *topo = f->topo;
	*width = TP_MAX(node->pci.width, node->pci.max_width);
	*speed = TP_MAX(node->pci.speed, node->pci.max_speed);
	*twin = NULL;
	int alike = 0, wider = 0;
	for (int32_t i = 0; i < topo->count[node->kind]; i++) {
		const struct tp_topo_node *other = tp_topo_node_of(topo, node->kind, i);
		if (other == node || !are_alike(f, node, other)) continue;
		bool better = other->pci.width > node->pci.width || other->pci.speed > node->pci.speed;
		alike++;
		if (!better) continue;
		wider++;
		*twin = other;
	}
	/* Of two that differ the worse one is in question; a lone better one among many is the odd one. Of nameless switches less is known. */
	if (!wider || wider * 2 < alike || (node->kind == TP_TOPO_PCI && !node->pci.vendor && (alike < 2 || wider * 4 < alike * 3))) {
		*twin = NULL;
		return;
	}
	*width = TP_MAX(*width, (*twin)->pci.width);
	*speed = TP_MAX(*speed, (*twin)->pci.speed);
}

static ncclResult_t count_loads(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	f->loads = tp_alloc((size_t)topo->nnodes, sizeof(*f->loads), "warnings about the machine");
	if (!f->loads) return ncclSystemError;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		enum tp_topo_kind kind = topo->nodes[i].kind;
		for (int32_t up = topo->nodes[i].parent; up >= 0; up = topo->nodes[up].parent) {
			f->loads[up].gpus += kind == TP_TOPO_GPU;
			f->loads[up].nics += kind == TP_TOPO_NIC;
			f->loads[up].switches += kind == TP_TOPO_PCI;
		}
	}
	return ncclSuccess;
}

static ncclResult_t find_narrow(struct faults *f)
{
	static const enum tp_topo_kind kinds[] = { TP_TOPO_GPU, TP_TOPO_NIC, TP_TOPO_PCI };
	for (size_t k = 0; k < TP_ARRAY_LEN(kinds); k++) {
		for (int32_t i = 0; i < f->topo->count[kinds[k]]; i++) {
			const struct tp_topo_node *node = tp_topo_node_of(f->topo, kinds[k], i), *twin;
			int width;
			float speed;
			if (!node->pci.width) continue;
			expected_link(f, node, &width, &speed, &twin);
			const char *name = device_name(f->topo, node), *like = twin ? ", as others of its kind do" : "";
			const char *below = node->kind == TP_TOPO_PCI ? " for all that hangs on this switch" : "";
			if (node->pci.width < width)
				TP_TRY(add(f, TP_FAULT_PCI_WIDTH, node->index, twin ? twin->index : -1, "%s (%s) has %d PCIe lanes, it could have %d%s: %.4g of %.4g GB/s%s. "
					"Reseat the card or the riser; look at the slot", name, node->pci.bus_id, node->pci.width, width, like,
					tp_topo_pcie_bw(node->pci.speed, node->pci.width), tp_topo_pcie_bw(node->pci.speed, width), below));
			if (node->pci.speed > 0 && node->pci.speed < speed)
				TP_TRY(add(f, TP_FAULT_PCI_SPEED, node->index, twin ? twin->index : -1, "%s (%s) runs its PCIe link at %g GT/s, it could run at %g%s: %.4g of "
					"%.4g GB/s%s. Look for link errors (AER) and at the firmware's speed setting", name, node->pci.bus_id, node->pci.speed, speed, like,
					tp_topo_pcie_bw(node->pci.speed, node->pci.width), tp_topo_pcie_bw(speed, node->pci.width), below));
		}
	}
	return ncclSuccess;
}

/* Cards of one model; without identities, as files of virtual machines have it, those of one class with links alike. */
static bool are_one_model(const struct tp_topo_pci *a, const struct tp_topo_pci *b)
{
	if (a->vendor || b->vendor) return a->vendor == b->vendor && a->device == b->device;
	return a->class_code && a->class_code == b->class_code && a->width == b->width && a->speed >= b->speed && a->speed <= b->speed;
}

/* A port that is slower than most of those on cards of its kind: a cable or a switch port that agreed on less. */
static ncclResult_t find_slow_ports(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	for (int32_t i = 0; i < topo->count[TP_TOPO_NET]; i++) {
		const struct tp_topo_node *port = tp_topo_node_of(topo, TP_TOPO_NET, i), *best = port;
		const struct tp_topo_pci *card = &topo->nodes[port->parent].pci;
		int alike = 0, faster = 0;
		for (int32_t j = 0; j < topo->count[TP_TOPO_NET]; j++) {
			const struct tp_topo_node *other = tp_topo_node_of(topo, TP_TOPO_NET, j);
			const struct tp_topo_pci *its = &topo->nodes[other->parent].pci;
			if (j == i || other->host != port->host || !are_one_model(card, its)) continue;
			alike++;
			faster += other->net.bw > port->net.bw;
			if (other->net.bw > best->net.bw) best = other;
		}
		/* A guess needs more to say so. */
		if (!faster || faster * 2 < alike || (!card->vendor && (alike < 3 || faster * 4 < alike * 3))) continue;
		TP_TRY(add(f, TP_FAULT_NIC_RATE, port->index, best->index, "%s runs at %.4g Gb/s, %s on a card of its kind at %.4g: look at the cable, the switch's port and "
			"its lanes (ibstat, ethtool)", port->name, port->net.bw * 8, best->name, best->net.bw * 8));
	}
	return ncclSuccess;
}

static ncclResult_t mark_bridges(const struct tp_topo *topo, const struct tp_topo_path *path, bool *marked)
{
	if (path->type != TP_PATH_PIX && path->type != TP_PATH_PXB) return ncclSuccess;
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_node *to = &topo->nodes[topo->links[path->links[i]].to];
		if (to->kind == TP_TOPO_PCI && to->pci.acs == 1) marked[to->index] = true;
	}
	return ncclSuccess;
}

/* Only bridges that peer traffic would pass; all of them are one fault. */
static ncclResult_t find_acs(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	bool *marked = tp_alloc((size_t)topo->nnodes, sizeof(*marked), "warnings about the machine");
	if (!marked) return ncclSystemError;
	for (int32_t a = 0; a < topo->count[TP_TOPO_GPU]; a++) {
		int32_t gpu = topo->of_kind[TP_TOPO_GPU][a];
		for (int32_t b = 0; b < topo->count[TP_TOPO_GPU]; b++) mark_bridges(topo, tp_topo_wire_path(topo, gpu, topo->of_kind[TP_TOPO_GPU][b]), marked);
		for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) mark_bridges(topo, tp_topo_wire_path(topo, gpu, topo->of_kind[TP_TOPO_NET][n]), marked);
	}
	int count = 0;
	int32_t first = -1;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		if (!marked[i]) continue;
		if (first < 0) first = i;
		count++;
	}
	free(marked);
	if (!count) return ncclSuccess;
	return add(f, TP_FAULT_ACS, first, -1, "ACS is on at %d bridge%s that peer traffic passes (%s%s): it goes up to the CPU and back instead of through the "
		"switch, at half the speed or less. Switch it off (setpci, or the firmware) unless a virtual machine needs it", count, count == 1 ? "" : "s",
		topo->nodes[first].pci.bus_id, count == 1 ? "" : " and others");
}

/* "GPU 1, GPU 2 and 3 others". */
struct names { char text[120]; int count; };

static void add_name(struct names *names, const char *name)
{
	size_t used = strlen(names->text);
	if (names->count++ < 4) snprintf(names->text + used, sizeof(names->text) - used, "%s%.24s", used ? ", " : "", name);
}

static const char *names_text(struct names *names)
{
	size_t used = strlen(names->text);
	if (names->count > 4) snprintf(names->text + used, sizeof(names->text) - used, " and %d others", names->count - 4);
	return names->text;
}

static bool share_a_switch(const struct tp_topo *topo, int32_t gpu, int32_t net)
{
	enum tp_topo_path_type type = tp_topo_wire_path(topo, gpu, net)->type;
	return type == TP_PATH_PIX || type == TP_PATH_PXB;
}

/* Its CPU's, to which C2C joins the GPU: as good as a switch. */
static bool is_joined_by_c2c(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net)
{
	int32_t cpu = topo->nodes[gpu].near_cpu;
	return policy->gdr_c2c && cpu >= 0 && topo->nodes[net].near_cpu == cpu && tp_topo_wire_path(topo, gpu, cpu)->type == TP_PATH_C2C;
}

/* A GPU and a NIC under one switch between which GPUDirect is off. */
static ncclResult_t find_no_gdr(struct faults *f, int32_t host)
{
	const struct tp_topo *topo = f->topo;
	struct { struct names gpus; int32_t gpu, net; struct tp_topo_why why; } by_reason[TP_WHY_COUNT];
	memset(by_reason, 0, sizeof(by_reason));
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g);
		for (int32_t n = 0; n < topo->count[TP_TOPO_NET] && gpu->host == host; n++) {
			int32_t net = topo->of_kind[TP_TOPO_NET][n];
			struct tp_topo_gdr gdr;
			if (!share_a_switch(topo, gpu->index, net) && !is_joined_by_c2c(topo, f->policy, gpu->index, net)) continue;
			TP_TRY(tp_topo_decide_gdr(topo, f->policy, gpu->index, net, false, &gdr));
			/* By C2C there are reasons of speed besides. */
			if (gdr.mode != TP_GDR_OFF || (!share_a_switch(topo, gpu->index, net) && gdr.why.reason != TP_WHY_GPU_UNABLE && gdr.why.reason != TP_WHY_NIC_UNABLE)) continue;
			/* Diverted for want of it: the distance is a result, not the reason. */
			if (!by_reason[gdr.why.reason].gpus.count) {
				by_reason[gdr.why.reason].why = gdr.why;
				by_reason[gdr.why.reason].net = net;
				by_reason[gdr.why.reason].gpu = gpu->index;
			}
			add_name(&by_reason[gdr.why.reason].gpus, gpu->name);
			break;
		}
	}
	for (int r = 0; r < TP_WHY_COUNT; r++)
		if (by_reason[r].gpus.count)
			TP_TRY(add(f, TP_FAULT_NO_GDR, by_reason[r].gpu, by_reason[r].net, "no GPUDirect RDMA for %s, although %s: %s", names_text(&by_reason[r].gpus),
				share_a_switch(topo, by_reason[r].gpu, by_reason[r].net) ? "a NIC shares the switch" : "C2C joins GPU and NIC", by_reason[r].why.text));
	return ncclSuccess;
}

static ncclResult_t find_no_p2p(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	int32_t first = -1, second = -1;
	struct tp_topo_p2p p2p, why = { 0 };
	int count = 0;
	for (int32_t a = 0; a < topo->count[TP_TOPO_GPU]; a++) {
		for (int32_t b = a + 1; b < topo->count[TP_TOPO_GPU]; b++) {
			int32_t x = topo->of_kind[TP_TOPO_GPU][a], y = topo->of_kind[TP_TOPO_GPU][b];
			TP_TRY(tp_topo_decide_p2p(topo, f->policy, x, y, &p2p));
			if (p2p.use || p2p.type > TP_PATH_NVB) continue;
			if (p2p.why.reason == TP_WHY_GPU_UNABLE && f->policy->expect_disabled_p2p) continue;
			if (count++) continue;
			first = x;
			second = y;
			why = p2p;
		}
	}
	if (!count) return ncclSuccess;
	return add(f, TP_FAULT_NO_P2P, first, second, "NVLink joins %s and %s%s, and direct access is off: %s", topo->nodes[first].name, topo->nodes[second].name,
		count > 1 ? " (and others)" : "", why.why.text);
}

/* Where a GPU meets its nearest port. */
static enum tp_topo_path_type nearest_net(const struct tp_topo *topo, int32_t gpu)
{
	enum tp_topo_path_type best = TP_PATH_DIS;
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) best = TP_MIN(best, tp_topo_wire_path(topo, gpu, topo->of_kind[TP_TOPO_NET][n])->type);
	return best;
}

/* Machines with NVSwitches are built for a rail a switch: of four or more on which as many GPUs hang, as many at each CPU should have
 * NICs. Of others nothing says that there were ever more NICs than one for all, as many have. */
static bool cpus_are_unlike(const struct faults *f, int32_t host)
{
	const struct tp_topo *topo = f->topo;
	int switches = 0, gpus = 0, each = -1, rails = -1;
	for (int32_t i = 0; i < topo->count[TP_TOPO_CPU]; i++) {
		const struct tp_topo_node *cpu = tp_topo_node_of(topo, TP_TOPO_CPU, i);
		int here = 0;
		for (int32_t s = 0; s < topo->count[TP_TOPO_PCI]; s++) {
			const struct tp_topo_node *top = tp_topo_node_of(topo, TP_TOPO_PCI, s);
			const struct load *load = &f->loads[top->index];
			if (cpu->host != host || top->near_cpu != cpu->index || !load->gpus || (top->parent >= 0 && topo->nodes[top->parent].kind == TP_TOPO_PCI)) continue;
			if (each >= 0 && load->gpus != each) return false;
			each = load->gpus;
			gpus += each;
			switches++;
			here += load->nics > 0;
		}
		if (f->loads[cpu->index].gpus && cpu->host == host) rails = rails < 0 || rails == here ? here : INT32_MAX;
	}
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) gpus -= tp_topo_node_of(topo, TP_TOPO_GPU, g)->host == host;
	return topo->count[TP_TOPO_NVS] && switches >= 4 && !gpus && rails == INT32_MAX;
}

/* CPUs of a host on which GPUs hang. */
static int count_cpus(const struct faults *f, int32_t host)
{
	int count = 0;
	for (int32_t i = 0; i < f->topo->count[TP_TOPO_CPU]; i++) {
		const struct tp_topo_node *cpu = tp_topo_node_of(f->topo, TP_TOPO_CPU, i);
		count += cpu->host == host && f->loads[cpu->index].gpus;
	}
	return count;
}

/* What can't reach GPU memory is as good anywhere. */
static bool has_gdr_port(const struct tp_topo *topo, int32_t host)
{
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) {
		const struct tp_topo_node *net = tp_topo_node_of(topo, TP_TOPO_NET, n);
		if (net->host == host && net->net.gdr) return true;
	}
	return false;
}

/* How near the best placed GPU of a host has a port. */
static enum tp_topo_path_type nearest_of_host(const struct tp_topo *topo, int32_t host)
{
	enum tp_topo_path_type nearest = TP_PATH_DIS;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++)
		if (tp_topo_node_of(topo, TP_TOPO_GPU, g)->host == host) nearest = TP_MIN(nearest, nearest_net(topo, topo->of_kind[TP_TOPO_GPU][g]));
	return nearest;
}

/* GPUs without a NIC at their switch, or where switches have none at their CPU, while others have one. */
static ncclResult_t find_no_nic(struct faults *f, int32_t host, bool *found)
{
	const struct tp_topo *topo = f->topo;
	struct names without = { .count = 0 };
	enum tp_topo_path_type nearest = nearest_of_host(topo, host);
	int with = 0;
	int32_t first = -1;
	enum tp_topo_path_type near = nearest <= TP_PATH_PXB ? TP_PATH_PXB : TP_PATH_PHB;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU] && nearest <= TP_PATH_PHB; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g);
		if (gpu->host != host) continue;
		if (nearest_net(topo, gpu->index) <= near) {
			with++;
			continue;
		}
		if (first < 0) first = gpu->index;
		add_name(&without, gpu->name);
	}
	bool most = with > without.count && (near == TP_PATH_PXB || count_cpus(f, host) > 2);
	*found = without.count && with && (most || (near == TP_PATH_PXB && has_gdr_port(topo, host) && cpus_are_unlike(f, host)));
	if (!*found) return ncclSuccess;
	int32_t net = tp_topo_local_net(topo, first, 0);
	return add(f, TP_FAULT_NO_NIC, first, net, "no NIC shares a %s with %s, while %d other GPU%s one: %s will use %s, which is another's. Is a NIC "
		"missing, down, or left out (NCCL_IB_HCA)?", near == TP_PATH_PXB ? "switch" : "CPU", names_text(&without), with, with == 1 ? " has" : "s have",
		topo->nodes[first].name, net >= 0 ? topo->nodes[net].name : "none");
}

/* Ports that share its nearest switch with this GPU. */
static int count_near(const struct tp_topo *topo, int32_t gpu)
{
	enum tp_topo_path_type best = TP_PATH_DIS;
	int count = 0;
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) {
		enum tp_topo_path_type type = tp_topo_wire_path(topo, gpu, topo->of_kind[TP_TOPO_NET][n])->type;
		if (type > TP_PATH_PXB || type > best) continue;
		count = type < best ? 1 : count + 1;
		best = type;
	}
	return count;
}

/* A GPU with fewer NICs at its switch than all the others of its host, which have several and each as many. */
static ncclResult_t find_fewer_nics(struct faults *f, int32_t host)
{
	const struct tp_topo *topo = f->topo;
	struct names poor = { .count = 0 };
	int most = 0, least = INT32_MAX, rich = 0;
	int32_t first = -1;
	for (int round = 0; round < 2; round++)
		for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
			const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g);
			if (gpu->host != host) continue;
			int near = count_near(topo, gpu->index);
			if (round == 0) {
				most = TP_MAX(most, near);
				least = TP_MIN(least, near);
			} else if (near == most) {
				rich++;
			} else {
				if (first < 0) first = gpu->index;
				add_name(&poor, gpu->name);
			}
		}
	if (most < 2 || !poor.count || !least || poor.count * 3 > rich) return ncclSuccess;
	return add(f, TP_FAULT_NO_NIC, first, -1, "%s %s %d NIC%s at %s switch, and %d other GPUs have %d: is a NIC missing, down, or left out (NCCL_IB_HCA)?", names_text(&poor),
		poor.count == 1 ? "has" : "have", least, least == 1 ? "" : "s", poor.count == 1 ? "its" : "their", rich, most);
}

/* How many GPUs a port has to serve, a part of those that have other ports as near. By wires alone: what is narrow, slow or refused GPUDirect is
 * chosen by fewer, and told already. */
static double count_served(const struct tp_topo *topo, const struct tp_topo_node *net, enum tp_topo_path_type near)
{
	double served = 0;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		int32_t gpu = topo->of_kind[TP_TOPO_GPU][g];
		int ports = 0;
		if (topo->nodes[gpu].host != net->host || tp_topo_wire_path(topo, gpu, net->index)->type != near) continue;
		for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) ports += tp_topo_wire_path(topo, gpu, topo->of_kind[TP_TOPO_NET][n])->type == near;
		served += 1.0 / ports;
	}
	return served;
}

/* A port's speed, or what it should be, where that is told already. */
static double due_speed(const struct faults *f, const struct tp_topo_node *net)
{
	for (int i = 0; i < f->count; i++)
		if (f->list[i].fault == TP_FAULT_NIC_RATE && f->list[i].node == net->index) return f->topo->nodes[f->list[i].peer].net.bw;
	return net->net.bw;
}

/* More GPUs for one NIC than for another of its speed; unless most have as many: then the others are there beside what there usually is. */
static ncclResult_t find_shared(struct faults *f, int32_t host)
{
	enum { SOME = 1000 };           /* (Sums of parts are equal but for rounding: in thousandths.) */
	const struct tp_topo *topo = f->topo;
	const struct tp_topo_node *most = NULL, *least = NULL;
	enum tp_topo_path_type near = nearest_of_host(topo, host);
	long most_served = 0, least_served = 0;
	int with_most = 0, with_least = 0;
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET] && near < TP_PATH_DIS; n++) {
		const struct tp_topo_node *net = tp_topo_node_of(topo, TP_TOPO_NET, n);
		long served = net->host == host ? (long)(count_served(topo, net, near) * SOME + 0.5) : 0;
		if (served <= 0) continue;
		if (!most || served > most_served) {
			most_served = served;
			most = net;
			with_most = 0;
		}
		if (!least || served < least_served) {
			least_served = served;
			least = net;
			with_least = 0;
		}
		with_most += served == most_served;
		with_least += served == least_served;
	}
	if (!most || most_served <= least_served + 1 || with_most > with_least || due_speed(f, most) != due_speed(f, least)) return ncclSuccess;
	return add(f, TP_FAULT_NIC_SHARED, most->index, least->index, "%s has %.3g GPUs to serve while %s has %.3g: its users get less of the network. Is a NIC missing or down?",
		most->name, (double)most_served / SOME, least->name, (double)least_served / SOME);
}

static bool hangs_on_switch(const struct tp_topo *topo, const struct tp_topo_node *gpu)
{
	for (int32_t l = gpu->first_link; l < gpu->first_link + gpu->nlinks; l++)
		if (topo->nodes[topo->links[l].to].kind == TP_TOPO_NVS) return true;
	return false;
}

static ncclResult_t find_nvlink_missing(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g), *best = gpu;
		int alike = 0, better = 0;
		for (int32_t p = 0; p < topo->count[TP_TOPO_GPU]; p++) {
			const struct tp_topo_node *peer = tp_topo_node_of(topo, TP_TOPO_GPU, p);
			if (peer == gpu || peer->host != gpu->host || peer->gpu.sm != gpu->gpu.sm) continue;
			alike++;
			better += peer->gpu.nvlinks > gpu->gpu.nvlinks;
			if (peer->gpu.nvlinks > best->gpu.nvlinks) best = peer;
		}
		/* Behind switches all have the same; meshes may give some GPUs more links than others, never only one fewer. */
		if (!better || (!hangs_on_switch(topo, best) && better * 4 <= alike * 3)) continue;
		TP_TRY(add(f, TP_FAULT_NVLINK_MISSING, gpu->index, best->index, "%s has %d NVLink%s, %s has %d: the others are down (nvidia-smi nvlink -s; then the "
			"fabric manager, then the hardware)", gpu->name, gpu->gpu.nvlinks, gpu->gpu.nvlinks == 1 ? "" : "s", best->name, best->gpu.nvlinks));
	}
	return ncclSuccess;
}

static bool is_told(const struct faults *f, enum tp_topo_fault fault, int32_t node)
{
	for (int i = 0; i < f->count; i++)
		if (f->list[i].fault == fault && f->list[i].node == node) return true;
	return false;
}

static ncclResult_t find_one_way(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	for (int32_t i = 0; i < topo->nlinks; i++) {
		const struct tp_topo_link *link = &topo->links[i];
		int back = link->reverse >= 0 ? topo->links[link->reverse].count : 0;
		/* That the end which says fewer lacks NVLinks is told already; and one such link of a device stands for all of it. */
		if (link->kind != TP_WIRE_NVL || back >= link->count || is_told(f, TP_FAULT_NVLINK_MISSING, link->to) || is_told(f, TP_FAULT_LINK_ONE_WAY, link->from)) continue;
		TP_TRY(add(f, TP_FAULT_LINK_ONE_WAY, link->from, link->to, "%s says %d NVLinks lead to %s, which says %d lead back: the description contradicts itself, or links "
			"are down at one end", topo->nodes[link->from].name, link->count, topo->nodes[link->to].name, back));
	}
	return ncclSuccess;
}

static bool lacks_nics(const struct faults *f, int32_t host)
{
	for (int i = 0; i < f->count; i++)
		if ((f->list[i].fault == TP_FAULT_NO_NIC || f->list[i].fault == TP_FAULT_NIC_SHARED) && f->topo->nodes[f->list[i].node].host == host) return true;
	return false;
}

static ncclResult_t find_uneven_hosts(struct faults *f)
{
	const struct tp_topo *topo = f->topo;
	int32_t first = -1, other = -1;
	int counts[2] = { 0, 0 };
	for (int32_t h = 0; h < topo->nhosts; h++) {
		int nets = 0, gpus = 0;
		for (int32_t i = 0; i < topo->nnodes; i++) {
			nets += topo->nodes[i].kind == TP_TOPO_NET && topo->nodes[i].host == h;
			gpus += topo->nodes[i].kind == TP_TOPO_GPU && topo->nodes[i].host == h;
		}
		if (!gpus) continue;
		if (first < 0) {
			first = h;
			counts[0] = nets;
		} else if (nets != counts[0] && other < 0) {
			other = h;
			counts[1] = nets;
		}
	}
	/* Why it is poorer may be told already. */
	if (other < 0 || lacks_nics(f, counts[0] < counts[1] ? first : other)) return ncclSuccess;
	return add(f, TP_FAULT_UNEVEN_NICS, -1, -1, "host %d has %d network ports, host %d has %d: channels are as many as the poorest host can serve", first, counts[0],
		other, counts[1]);
}

ncclResult_t tp_topo_find_faults(const struct tp_topo *topo, const struct tp_topo_policy *policy, struct tp_topo_warning **out, int *count)
{
	struct faults f = { .topo = topo, .policy = policy };
	ncclResult_t result = count_loads(&f);
	if (result == ncclSuccess) result = find_narrow(&f);
	if (result == ncclSuccess) result = find_slow_ports(&f);
	if (result == ncclSuccess) result = find_nvlink_missing(&f);
	if (result == ncclSuccess) result = find_one_way(&f);
	if (result == ncclSuccess) result = find_no_p2p(&f);
	if (result == ncclSuccess) result = find_acs(&f);
	for (int32_t h = 0; h < topo->nhosts && result == ncclSuccess; h++) {
		bool missing = false;
		result = find_no_gdr(&f, h);
		if (result == ncclSuccess) result = find_no_nic(&f, h, &missing);
		int before = f.count;
		if (result == ncclSuccess && !missing) result = find_fewer_nics(&f, h);
		if (result == ncclSuccess && !missing && f.count == before) result = find_shared(&f, h);
	}
	if (result == ncclSuccess) result = find_uneven_hosts(&f);
	free(f.loads);
	if (result != ncclSuccess) {
		free(f.list);
		return result;
	}
	*out = f.list;
	*count = f.count;
	return ncclSuccess;
}
