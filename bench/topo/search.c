/* What it takes to make the graph of a machine, its paths and its channels, in processor time of this thread: the rest of the machine may be as busy as it
 * likes. For each file and model, of one host and of several, the median of the rounds; last a cluster of hosts like the largest model, each rank's places in
 * all its channels. Exit status 1 where more was spent than is promised. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "topo/search.h"

#define ROUNDS 5
#define SMALL_MS 50             /* up to 8 GPUs and 16 ports */
#define LARGE_MS 1000           /* up to 72 GPUs */
#define HOSTS 1024

struct times { double build, paths, rings, trees; };

static double now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

static double median(const struct times *all, size_t at)
{
	double values[ROUNDS];
	for (int r = 0; r < ROUNDS; r++) memcpy(&values[r], (const char *)&all[r] + at, sizeof(values[r]));
	qsort(values, ROUNDS, sizeof(*values), by_value);
	return values[ROUNDS / 2];
}

static ncclResult_t open_doc(const char *name, struct tp_topo_doc **out)
{
	for (int i = 0; tp_topo_model_name(i, NULL); i++)
		if (strcmp(tp_topo_model_name(i, NULL), name) == 0) return tp_topo_model(name, out);
	TP_TRY(tp_topo_doc_read(name, out));
	return tp_topo_doc_complete(*out, NULL);
}

struct found { struct tp_topo *topo; struct tp_channels *rings, *trees; };

static void forget(struct found *f)
{
	tp_channels_free(f->rings);
	tp_channels_free(f->trees);
	tp_topo_free(f->topo);
	memset(f, 0, sizeof(*f));
}

static ncclResult_t once(const struct tp_topo_doc *doc, bool multi_host, struct found *f, struct times *t)
{
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.multi_host = multi_host;
	double begun = now_ms();
	TP_TRY(tp_topo_build(doc, &f->topo));
	t->build = now_ms() - begun;
	begun = now_ms();
	TP_TRY(tp_topo_compute_paths(f->topo, &policy));
	t->paths = now_ms() - begun;
	if (!f->topo->count[TP_TOPO_GPU]) return ncclSuccess;
	begun = now_ms();
	TP_TRY(tp_channels_search(f->topo, &policy, TP_PATTERN_RING, &f->rings));
	t->rings = now_ms() - begun;
	begun = now_ms();
	TP_TRY(tp_channels_search(f->topo, &policy, TP_PATTERN_TREE, &f->trees));
	t->trees = now_ms() - begun;
	return ncclSuccess;
}

/* Every rank's neighbours in all channels. */
static ncclResult_t plan_cluster(const struct found *f)
{
	struct tp_cluster *cluster;
	double begun = now_ms();
	int64_t sum = 0;
	TP_TRY(tp_cluster_create(f->topo, f->rings, f->trees, HOSTS, &cluster));
	int ranks = HOSTS * cluster->ngpus;
	for (int rank = 0; rank < ranks; rank++) {
		struct tp_ring_place ring;
		struct tp_tree_place tree;
		for (int c = 0; c < f->rings->nchannels; c++) {
			tp_cluster_ring(cluster, c, rank, &ring);
			sum += ring.next;
		}
		for (int c = 0; c < 2 * f->trees->nchannels; c++) {
			tp_cluster_tree(cluster, c, rank, &tree);
			sum += tree.up;
		}
	}
	printf("%d hosts of %d GPUs, %d ranks, %d rings and %d trees: %.0f ms for the places of all (%lld)\n", HOSTS, cluster->ngpus, ranks, f->rings->nchannels,
		2 * f->trees->nchannels, now_ms() - begun, (long long)sum);
	tp_cluster_free(cluster);
	return ncclSuccess;
}

static const char *base_of(const char *name)
{
	const char *slash = strrchr(name, '/');
	return slash ? slash + 1 : name;
}

static int measure(const char *name, bool cluster)
{
	struct tp_topo_doc *doc;
	int slow = 0;
	if (open_doc(name, &doc) != ncclSuccess) return printf("%-44s refused: %s\n", base_of(name), tp_log_last_error()), 0;
	for (int multi_host = 0; multi_host < 2; multi_host++) {
		struct times all[ROUNDS] = { { 0 } };
		struct found f = { NULL };
		ncclResult_t result = ncclSuccess;
		for (int r = 0; r < ROUNDS && result == ncclSuccess; r++) {
			forget(&f);
			result = once(doc, multi_host, &f, &all[r]);
		}
		if (result != ncclSuccess) {
			printf("%-44s refused: %s\n", base_of(name), tp_log_last_error());
			forget(&f);
			break;
		}
		struct times m = { median(all, offsetof(struct times, build)), median(all, offsetof(struct times, paths)), median(all, offsetof(struct times, rings)),
			median(all, offsetof(struct times, trees)) };
		int gpus = f.topo->count[TP_TOPO_GPU], nets = f.topo->count[TP_TOPO_NET];
		double sum = m.build + m.paths + m.rings + m.trees, limit = gpus <= 8 && nets <= 16 ? SMALL_MS : LARGE_MS;
		printf("%-44s %-5s %3d GPUs %3d ports  graph %6.2f  paths %7.2f  rings %7.2f  trees %7.2f  sum %8.2f ms%s\n", base_of(name), multi_host ? "inter" : "intra", gpus, nets,
			m.build, m.paths, m.rings, m.trees, sum, sum > limit ? "  TOO SLOW" : "");
		slow += sum > limit;
		if (cluster && multi_host && f.rings && plan_cluster(&f) != ncclSuccess) slow++;
		forget(&f);
	}
	tp_topo_doc_free(doc);
	return slow;
}

int main(int argc, char **argv)
{
	int slow = 0;
	for (int i = 1; i < argc; i++) slow += measure(argv[i], false);
	for (int i = 0; tp_topo_model_name(i, NULL); i++) slow += measure(tp_topo_model_name(i, NULL), strcmp(tp_topo_model_name(i, NULL), "gb200-nvl72") == 0);
	return slow > 0;
}
