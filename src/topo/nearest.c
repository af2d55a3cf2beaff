/* Which CPU, ports and GPUs are nearest: the widest path first, and of those the best type. */
#include <stdlib.h>

#include "topo/build.h"
#include "topo/paths.h"

#define MAX_CHANNELS 64

int tp_paths_nearest(const struct tp_topo *topo, int32_t from, enum tp_topo_kind kind, int32_t *nodes, int max)
{
	double best_bw = 0;
	int best_type = TP_PATH_DIS, count = 0;
	for (int32_t i = 0; i < topo->count[kind]; i++) {
		int32_t to = topo->of_kind[kind][i];
		const struct tp_topo_path *path = tp_topo_path(topo, from, to);
		if (path->type == TP_PATH_DIS) continue;
		if (path->bw > best_bw || (path->bw == best_bw && (int)path->type < best_type)) {
			best_bw = path->bw;
			best_type = path->type;
			count = 0;
		}
		if (path->bw != best_bw || (int)path->type != best_type) continue;
		if (nodes && count < max) nodes[count] = to;
		count++;
	}
	return nodes ? TP_MIN(count, max) : count;
}

int32_t tp_paths_near_cpu(const struct tp_topo *topo, int32_t gpu)
{
	int32_t cpus[64], best = -1;
	int count = tp_paths_nearest(topo, gpu, TP_TOPO_CPU, cpus, (int)TP_ARRAY_LEN(cpus));
	for (int i = 0; i < count; i++)
		if (best < 0 || tp_topo_path(topo, gpu, cpus[i])->nhops < tp_topo_path(topo, gpu, best)->nhops) best = cpus[i];
	return best;
}

int tp_topo_local_nets(const struct tp_topo *topo, int32_t gpu, int32_t *nets, int max, double *bw)
{
	int32_t first = -1;
	int count = tp_paths_nearest(topo, gpu, TP_TOPO_NET, &first, 1);
	if (count && bw) *bw = tp_topo_path(topo, gpu, first)->bw;
	return tp_paths_nearest(topo, gpu, TP_TOPO_NET, nets, max);
}

/* The bits of value, turned round, in a field of `count` (a power of two): 0, 4, 2, 6, … so that neighbours start far apart. */
static int turned_round(int value, int count)
{
	int turned = 0;
	for (int bit = 1, other = count >> 1; bit < count; bit <<= 1, other >>= 1)
		if (value & bit) turned |= other;
	return turned;
}

#define MAX_NEAREST 256

/* The ports that a GPU takes in turn: out[0 .. count - 1], channel c takes out[c % count]. */
static int ports_in_turn(const struct tp_topo *topo, int32_t gpu, int32_t out[MAX_NEAREST])
{
	int32_t nets[MAX_NEAREST];
	int nnets = tp_paths_nearest(topo, gpu, TP_TOPO_NET, nets, MAX_NEAREST);
	if (!nnets) return 0;
	int ngpus = TP_MAX(tp_paths_nearest(topo, nets[0], TP_TOPO_GPU, NULL, 0), 1);
	int limit = topo->internal->nets_per_gpu;
	int per_gpu = limit ? TP_MIN(limit, nnets) : (nnets + ngpus - 1) / ngpus;
	/* Where a GPU starts depends on its number among those that share the ports. */
	int start = TP_MAX(topo->nodes[gpu].gpu.dev, 0) % ngpus;
	if ((nnets & (nnets - 1)) == 0) start = turned_round(start, nnets);
	for (int i = 0; i < per_gpu; i++) out[i] = nets[(start + i) % nnets];
	return per_gpu;
}

int32_t tp_topo_local_net(const struct tp_topo *topo, int32_t gpu, int channel)
{
	int32_t ports[MAX_NEAREST];
	int count = ports_in_turn(topo, gpu, ports);
	return count ? ports[channel % count] : -1;
}

/* The first channel on which gpu uses net; -1: none. */
static int first_channel(const struct tp_topo *topo, int32_t gpu, int32_t net)
{
	int32_t ports[MAX_NEAREST];
	int count = ports_in_turn(topo, gpu, ports);
	for (int c = 0; c < TP_MIN(count, MAX_CHANNELS); c++)
		if (ports[c] == net) return c;
	return -1;
}

int32_t tp_topo_local_gpu(const struct tp_topo *topo, int32_t net)
{
	int32_t gpus[MAX_NEAREST], best = -1;
	int ngpus = tp_paths_nearest(topo, net, TP_TOPO_GPU, gpus, MAX_NEAREST), least = MAX_CHANNELS;
	for (int i = 0; i < ngpus; i++) {
		int channel = first_channel(topo, gpus[i], net);
		if (channel < 0 || channel >= least) continue;
		least = channel;
		best = gpus[i];
	}
	return best;
}
