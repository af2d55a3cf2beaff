/* Yes or no, and why: direct access between GPUs, NICs at GPU memory, shared memory. The rules are NCCL's, so that a machine
 * behaves as its owner knows it; the sentences are for him to change what he doesn't like. */
#include <stdarg.h>
#include <string.h>

#include "topo/build.h"
#include "topo/paths.h"

__attribute__((format(printf, 3, 4)))
static void say(struct tp_topo_why *why, enum tp_topo_reason reason, const char *format, ...)
{
	va_list list;
	why->reason = reason;
	va_start(list, format);
	vsnprintf(why->text, sizeof(why->text), format, list);
	va_end(list);
}

/* A bridge on the path that sends peer traffic up to the CPU, although the path doesn't. */
static const struct tp_topo_node *redirected_by(const struct tp_topo *topo, const struct tp_topo_path *path)
{
	if (path->type != TP_PATH_PIX && path->type != TP_PATH_PXB) return NULL;
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_node *to = &topo->nodes[topo->links[path->links[i]].to];
		if (to->kind == TP_TOPO_PCI && to->pci.acs == 1) return to;
	}
	return NULL;
}

static const char *cpu_between(const struct tp_topo *topo, const struct tp_topo_path *path)
{
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_node *to = &topo->nodes[topo->links[path->links[i]].to];
		if (to->kind == TP_TOPO_CPU) return to->name;
	}
	return "a CPU";
}

/* No bridge between GPU and CPU: a virtual machine that hides them. */
static bool hangs_bare(const struct tp_topo *topo, int32_t node)
{
	return topo->nodes[node].parent >= 0 && topo->nodes[topo->nodes[node].parent].kind == TP_TOPO_CPU;
}

static bool is_forbidden(const struct tp_topo *topo, int32_t a, int32_t b)
{
	const struct tp_topo_internal *in = topo->internal;
	for (int32_t i = 0; i < in->nno_peer; i++)
		if ((in->no_peer[i][0] == a && in->no_peer[i][1] == b) || (in->no_peer[i][0] == b && in->no_peer[i][1] == a)) return true;
	return false;
}

/* Each GPU on the way has to reach the next. */
static bool is_forbidden_on(const struct tp_topo *topo, const struct tp_topo_path *path, int32_t a, int32_t b)
{
	int32_t from = a;
	for (int32_t i = 0; i < path->nhops; i++) {
		int32_t to = topo->links[path->links[i]].to;
		if (topo->nodes[to].kind != TP_TOPO_GPU) continue;
		if (is_forbidden(topo, from, to)) return true;
		from = to;
	}
	return is_forbidden(topo, a, b);
}

static void say_p2p_yes(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_topo_path *path, int level,
	int by_hardware, struct tp_topo_p2p *out)
{
	const struct tp_topo_node *bridge = redirected_by(topo, path);
	if (out->relay >= 0)
		say(&out->why, TP_WHY_RELAY, "no NVLink joins the two; %s passes data on from one of its links to the other", topo->nodes[out->relay].name);
	else if (path->type <= TP_PATH_C2C)
		say(&out->why, TP_WHY_BEST, "joined %s: %.4g GB/s", tp_topo_path_meaning(path->type), path->bw);
	else if (bridge)
		say(&out->why, TP_WHY_ACS, "joined %s, but ACS is on at %s: peer traffic goes up to the CPU and back; switch ACS off there (setpci, or the "
			"firmware) unless a virtual machine needs it", tp_topo_path_meaning(path->type), bridge->pci.bus_id);
	else if (level > by_hardware && (int)path->type > by_hardware)
		say(&out->why, TP_WHY_FORCED, "%s=%s allows what the hardware does badly: %s", policy->p2p_by ? policy->p2p_by : "NCCL_P2P_LEVEL", tp_topo_path_name((enum tp_topo_path_type)level),
			tp_topo_path_meaning(path->type));
	else
		say(&out->why, TP_WHY_BEST, "joined %s: %.4g GB/s; no NVLink joins the two", tp_topo_path_meaning(path->type), path->bw);
}

static void say_p2p_no(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t a, int32_t b, const struct tp_topo_path *path,
	int level, struct tp_topo_why *why)
{
	if (path->type == TP_PATH_DIS && topo->nodes[a].host != topo->nodes[b].host)
		say(why, TP_WHY_OTHER_HOST, "they are on different machines, and no NVLink joins the two");
	else if (path->type == TP_PATH_DIS)
		say(why, TP_WHY_NO_PATH, "no link of any kind joins the two");
	else if (policy->p2p_level == TP_PATH_LOC && policy->p2p_by && strcmp(policy->p2p_by, "NCCL_P2P_DISABLE") == 0)
		say(why, TP_WHY_DISABLED, "NCCL_P2P_DISABLE=1");
	else if (policy->p2p_level >= 0)
		say(why, TP_WHY_LEVEL, "they meet %s (%s), farther than %s=%s allows", tp_topo_path_meaning(path->type), tp_topo_path_name(path->type),
			policy->p2p_by ? policy->p2p_by : "NCCL_P2P_LEVEL", tp_topo_path_name((enum tp_topo_path_type)level));
	else if (topo->virtual_machine[0] && hangs_bare(topo, a) && hangs_bare(topo, b))
		say(why, TP_WHY_VIRTUAL, "this is a virtual machine (%.60s) and no PCIe bridge is seen above either: what lies between them is hidden. A topology file "
			"(NCCL_TOPO_FILE) would tell, NCCL_P2P_LEVEL=%s would try", topo->virtual_machine, tp_topo_path_name(path->type));
	else
		say(why, path->type == TP_PATH_PHB ? TP_WHY_CPU_BRIDGE : TP_WHY_DISTANCE, "they meet %s (%s, at %s), which passes peer traffic on slowly or not "
			"at all; NCCL_P2P_LEVEL=%s would use it", tp_topo_path_meaning(path->type), tp_topo_path_name(path->type), cpu_between(topo, path),
			tp_topo_path_name(path->type));
}

ncclResult_t tp_topo_decide_p2p(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu_a, int32_t gpu_b,
	struct tp_topo_p2p *out)
{
	const struct tp_topo_node *a = &topo->nodes[gpu_a], *b = &topo->nodes[gpu_b];
	const struct tp_topo_path *path = tp_topo_wire_path(topo, gpu_a, gpu_b);
	if (a->kind != TP_TOPO_GPU || b->kind != TP_TOPO_GPU)
		return TP_FAIL(ncclInvalidArgument, "peer access is between GPUs, not %s and %s", a->name, b->name);
	const struct tp_topo_node *cpu = topo->count[TP_TOPO_CPU] ? tp_topo_node_of(topo, TP_TOPO_CPU, 0) : NULL;
	bool amd_pair = cpu && cpu->cpu.arch == TP_ARCH_X86 && cpu->cpu.vendor == TP_VENDOR_AMD && topo->count[TP_TOPO_GPU] <= 2;
	int by_hardware = amd_pair ? TP_PATH_SYS : TP_PATH_PXB, level = policy->p2p_level >= 0 ? policy->p2p_level : by_hardware;
	memset(out, 0, sizeof(*out));
	out->relay = -1;
	out->type = path->type;
	out->bw = path->bw;
	out->use = (int)path->type <= level;
	out->read = path->type == TP_PATH_NVL && a->gpu.sm == 80 && b->gpu.sm == 80;
	if (path->type == TP_PATH_NVB && path->nhops == 2) out->relay = topo->links[path->links[0]].to;
	bool forbidden = out->use && !policy->ignore_disabled_p2p && is_forbidden_on(topo, path, gpu_a, gpu_b);
	if (forbidden) out->use = false;
	if (forbidden)
		say(&out->why, TP_WHY_GPU_UNABLE, "the driver says that peer access between the two is off (nvidia-smi topo -p2p r)%s", path->type == TP_PATH_NVL ?
			", although NVLink joins them: a fault of the hardware or the fabric manager" : "; IOMMU or virtualisation, mostly");
	else if (gpu_a == gpu_b) say(&out->why, TP_WHY_BEST, "the same GPU");
	else if (out->use) say_p2p_yes(topo, policy, path, level, by_hardware, out);
	else say_p2p_no(topo, policy, gpu_a, gpu_b, path, level, &out->why);
	return ncclSuccess;
}

static bool has_nvlink_peer(const struct tp_topo *topo, int32_t gpu)
{
	if (topo->count[TP_TOPO_GPU] == 1) return true;
	for (int32_t i = 0; i < topo->count[TP_TOPO_GPU]; i++) {
		int32_t peer = topo->of_kind[TP_TOPO_GPU][i];
		if (peer != gpu && tp_topo_path(topo, gpu, peer)->type == TP_PATH_NVL) return true;
	}
	return false;
}

int32_t tp_topo_pxn_relay(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net, struct tp_topo_why *why)
{
	const struct tp_topo_path *path = tp_topo_path(topo, gpu, net);
	struct tp_topo_why unused;
	if (!why) why = &unused;
	if (path->type == TP_PATH_PXN) {
		for (int32_t i = 0; i < path->nhops; i++) {
			int32_t to = topo->links[path->links[i]].to;
			if (topo->nodes[to].kind != TP_TOPO_GPU) continue;
			say(why, TP_WHY_RELAY, "%s is nearer to %s and is joined to %s by NVLink: data goes through it", topo->nodes[to].name,
				topo->nodes[net].name, topo->nodes[gpu].name);
			return to;
		}
	}
	if (!policy->pxn) say(why, TP_WHY_DISABLED, "NCCL_PXN_DISABLE=1");
	else if (path->type < TP_PATH_PXN) say(why, TP_WHY_BEST, "%s is near %s itself (%s)", topo->nodes[gpu].name, topo->nodes[net].name, tp_topo_path_name(path->type));
	else say(why, TP_WHY_NO_PATH, "no GPU that NVLink joins to %s is nearer to %s", topo->nodes[gpu].name, topo->nodes[net].name);
	return -1;
}

/* How far apart they are; that the path was diverted through a CPU is what came of a decision, not a reason for it. C2C brings nearer. */
static enum tp_topo_path_type distance(const struct tp_topo *topo, int32_t gpu, int32_t net)
{
	enum tp_topo_path_type wire = tp_topo_wire_path(topo, gpu, net)->type, used = tp_topo_path(topo, gpu, net)->type;
	return TP_MIN(wire, used);
}

/* What forbids it whatever the distance; false: nothing does. */
static bool gdr_impossible(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_topo_node *gpu, const struct tp_topo_node *net,
	bool read, struct tp_topo_why *why)
{
	if (!net->net.gdr) {
		say(why, TP_WHY_NIC_UNABLE, "%s can't reach GPU memory (gdr=0): no RDMA, or its driver registers neither DMA-BUF nor peer memory", net->name);
		return true;
	}
	if (!gpu->gpu.gdr) {
		say(why, TP_WHY_GPU_UNABLE, gpu->gpu.maker == TP_MAKER_AMD ? "NICs can't reach the memory of %s (gdr=0): its driver offers neither peer memory nor "
			"DMA-BUF" : "NICs can't reach the memory of %s (gdr=0): neither DMA-BUF nor nvidia_peermem is there (modprobe nvidia_peermem)", gpu->name);
		return true;
	}
	if (!read) return false;
	if (policy->gdr_read == TP_OFF) {
		say(why, TP_WHY_DISABLED, "NCCL_NET_GDR_READ=0");
		return true;
	}
	if (policy->gdr_read == TP_AUTO && gpu->gpu.maker == TP_MAKER_NVIDIA && gpu->gpu.sm < 80 && !has_nvlink_peer(topo, gpu->index)) {
		say(why, TP_WHY_OLD_GPU, "%s (compute capability %d.%d) has no NVLink: what NICs read would share its PCIe link with peer traffic; "
			"NCCL_NET_GDR_READ=1 would", gpu->name, gpu->gpu.sm / 10, gpu->gpu.sm % 10);
		return true;
	}
	return false;
}

static void decide_distance(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_topo_node *gpu,
	const struct tp_topo_node *net, struct tp_topo_gdr *out)
{
	int by_hardware = policy->gdr_c2c ? TP_PATH_P2C : TP_PATH_PXB, level = policy->gdr_level >= 0 ? policy->gdr_level : by_hardware;
	const char *type = tp_topo_path_name(out->type), *meaning = tp_topo_path_meaning(out->type);
	int32_t cpu = tp_paths_near_cpu(topo, gpu->index);
	if (out->type == TP_PATH_DIS) {
		say(&out->why, TP_WHY_NO_PATH, "no path joins %s and %s", gpu->name, net->name);
	} else if ((int)out->type > level && policy->gdr_level >= 0) {
		say(&out->why, TP_WHY_LEVEL, "they meet %s (%s), farther than NCCL_NET_GDR_LEVEL=%s allows", meaning, type,
			tp_topo_path_name((enum tp_topo_path_type)level));
	} else if ((int)out->type > level) {
		say(&out->why, TP_WHY_DISTANCE, "they meet %s (%s), where a NIC reads and writes GPU memory slowly or not at all; NCCL_NET_GDR_LEVEL=%s would do "
			"so (try ib_write_bw --use_cuda first)", meaning, type, type);
	} else {
		bool c2c = cpu >= 0 && tp_topo_path(topo, gpu->index, cpu)->type == TP_PATH_C2C;
		out->mode = c2c && out->type != TP_PATH_P2C ? TP_GDR_PCI : TP_GDR_ON;
		if ((int)out->type > by_hardware)
			say(&out->why, TP_WHY_FORCED, "NCCL_NET_GDR_LEVEL=%s allows what the hardware does badly: %s", tp_topo_path_name((enum tp_topo_path_type)level), meaning);
		else
			say(&out->why, TP_WHY_BEST, "they meet %s (%s)%s", meaning, type, out->mode == TP_GDR_PCI ? ", which is used although C2C is there" : "");
	}
}

static void decide_flush(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_topo_node *gpu, int32_t net, struct tp_topo_gdr *out)
{
	int32_t cpu = tp_paths_near_cpu(topo, gpu->index);
	bool two_ways = cpu >= 0 && distance(topo, gpu->index, net) <= TP_PATH_PXB && tp_topo_path(topo, gpu->index, cpu)->type == TP_PATH_C2C;
	out->flush = true;
	if (policy->flush == TP_ON) {
		say(&out->flush_why, TP_WHY_FORCED, "NCCL_NET_FORCE_FLUSH=1");
	} else if (policy->flush == TP_OFF) {
		out->flush = false;
		say(&out->flush_why, TP_WHY_DISABLED, "NCCL_GDR_FLUSH_DISABLE=1");
	} else if (gpu->gpu.maker == TP_MAKER_AMD) {
		say(&out->flush_why, TP_WHY_ORDERING, "what a NIC wrote may still wait in the host data path when the flag is seen");
	} else if (gpu->gpu.sm < 90) {
		say(&out->flush_why, TP_WHY_OLD_GPU, "before compute capability 9.0 the flag may be seen before the data that was written ahead of it");
	} else if (two_ways) {
		say(&out->flush_why, TP_WHY_ORDERING, "data arrives over PCIe, its flag over C2C: nothing keeps them in order");
	} else {
		out->flush = false;
		say(&out->flush_why, TP_WHY_ORDERING, "the GPU keeps what arrives in order");
	}
}

ncclResult_t tp_topo_decide_gdr(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net, bool read,
	struct tp_topo_gdr *out)
{
	const struct tp_topo_node *g = &topo->nodes[gpu], *n = &topo->nodes[net];
	if (g->kind != TP_TOPO_GPU || n->kind != TP_TOPO_NET)
		return TP_FAIL(ncclInvalidArgument, "a NIC at GPU memory: between a GPU and a network port, not %s and %s", g->name, n->name);
	memset(out, 0, sizeof(*out));
	bool relayed = tp_topo_path(topo, gpu, net)->type == TP_PATH_PXN;
	out->type = relayed ? TP_PATH_PXN : distance(topo, gpu, net);
	out->relay = relayed ? tp_topo_pxn_relay(topo, policy, gpu, net, NULL) : -1;
	decide_flush(topo, policy, g, net, out);
	if (gdr_impossible(topo, policy, g, n, read, &out->why)) {
		out->flush = false;
		return ncclSuccess;
	}
	/* The relay's memory is what the NIC touches. */
	if (out->relay >= 0) {
		g = &topo->nodes[out->relay];
		out->type = distance(topo, out->relay, net);
	}
	decide_distance(topo, policy, g, n, out);
	if (out->mode == TP_GDR_OFF) out->flush = false;
	return ncclSuccess;
}

bool tp_topo_decide_shm(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t a, int32_t b, struct tp_topo_why *why)
{
	struct tp_topo_why unused;
	if (!why) why = &unused;
	if (topo->nodes[a].host != topo->nodes[b].host) {
		say(why, TP_WHY_OTHER_HOST, "%s and %s are on different machines", topo->nodes[a].name, topo->nodes[b].name);
		return false;
	}
	if (!policy->shm) {
		say(why, TP_WHY_DISABLED, "NCCL_SHM_DISABLE=1");
		return false;
	}
	say(why, TP_WHY_BEST, "both are on one machine");
	return true;
}

enum tp_topo_path_type tp_topo_host_path(const struct tp_topo *topo, const struct tp_topo_host_rank *a, const struct tp_topo_host_rank *b)
{
	if (a->host != b->host) return TP_PATH_NET;
	if (a->cpu != b->cpu) return TP_PATH_SYS;
	if (a->node >= 0 && a->node == b->node && topo->nodes[a->node].kind == TP_TOPO_CORE) return TP_PATH_LOC;
	int32_t caches[2] = { a->node, b->node };
	for (int i = 0; i < 2; i++)
		while (caches[i] >= 0 && topo->nodes[caches[i]].kind == TP_TOPO_CORE) caches[i] = topo->nodes[caches[i]].parent;
	return caches[0] >= 0 && caches[0] == caches[1] && topo->nodes[caches[0]].kind == TP_TOPO_CACHE ? TP_PATH_PIX : TP_PATH_PHB;
}
