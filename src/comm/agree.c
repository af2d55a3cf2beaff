/* What must be equal on all ranks, or is agreed by all: exchanged at init. A difference names two ranks and both values.
 * One small record goes round; only where records differ do the texts follow, to say how. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

#define SETTING_BYTES 256
#define RECORD_VERSION 1

static const char *const device_names[] = { [TP_DEVICE_HOST] = "host", [TP_DEVICE_CUDA] = "cuda" };

struct digest { uint32_t version, device; uint64_t settings; };

struct settings {
	char device[8], version[16];
	char algo[SETTING_BYTES], proto[SETTING_BYTES];
	struct tp_cost_record cost;
};

static void copy_text(char *out, size_t room, const char *text)
{
	size_t n = text ? strnlen(text, room - 1) : 0;
	if (n) memcpy(out, text, n);
	memset(out + n, 0, room - n);
}

static ncclResult_t differ(const struct ncclComm *comm, int other, const char *what, const char *first, const char *second)
{
	const struct tp_boot_peer *peers = comm->boot->peers;
	return TP_FAIL(ncclInvalidUsage, "%s must be equal on all ranks: rank 0 (%s) has \"%s\", rank %d (%s) has \"%s\"", what,
		peers[0].host_name, first, other, peers[other].host_name, second);
}

/* Which setting of which rank differs from rank 0's. */
static ncclResult_t explain(struct ncclComm *comm, const struct settings *own, const struct digest *digests)
{
	struct settings *all = tp_alloc((size_t)comm->nranks, sizeof(*all), "the ranks' settings");
	if (!all) return ncclSystemError;
	all[comm->rank] = *own;
	ncclResult_t result = tp_boot_all_gather(comm->boot, all, sizeof(*all));
	int other = 0;
	while (other < comm->nranks && !memcmp(&digests[other], &digests[0], sizeof(*digests))) other++;
	if (result == ncclSuccess && other < comm->nranks) {
		struct settings *a = &all[0], *b = &all[other];
		for (int r = 0; r <= other; r += other)        /* they come from outside */
			all[r].device[7] = all[r].version[15] = all[r].algo[SETTING_BYTES - 1] = all[r].proto[SETTING_BYTES - 1] = '\0';
		if (strcmp(a->version, b->version)) result = differ(comm, other, "the library's version", a->version, b->version);
		else if (strcmp(a->device, b->device)) result = differ(comm, other, "TELPHER_DEVICE", a->device, b->device);
		else if (strcmp(a->algo, b->algo)) result = differ(comm, other, "NCCL_ALGO", a->algo, b->algo);
		else if (strcmp(a->proto, b->proto)) result = differ(comm, other, "NCCL_PROTO", a->proto, b->proto);
		else {
			int v = 0;
			while (v < TP_COST_VALUES - 1 && a->cost.values[v] == b->cost.values[v]) v++;
			char x[64], y[64];
			snprintf(x, sizeof(x), "%.17g (value %d)", a->cost.values[v], v);
			snprintf(y, sizeof(y), "%.17g", b->cost.values[v]);
			result = differ(comm, other, "the cost model's table (TELPHER_TUNE_FILE)", x, y);
		}
	}
	free(all);
	return result;
}

ncclResult_t tp_agree_settings(struct ncclComm *comm, enum tp_device_kind kind)
{
	struct settings own;
	memset(&own, 0, sizeof(own));
	const char *algo = tp_choose_algo_text(), *proto = tp_choose_proto_text();
	copy_text(own.device, sizeof(own.device), device_names[kind]);
	copy_text(own.version, sizeof(own.version), "2.28.9");
	copy_text(own.algo, sizeof(own.algo), algo);
	copy_text(own.proto, sizeof(own.proto), proto);
	TP_TRY(kind == TP_DEVICE_CUDA ? tp_cost_load_gpu(&comm->model) : tp_cost_load(&comm->model));
	tp_cost_pack(&comm->model, &own.cost);
	struct digest *digests = tp_alloc((size_t)comm->nranks, sizeof(*digests), "the ranks' settings");
	if (!digests) return ncclSystemError;
	uint64_t hash = tp_hash64(&own, sizeof(own), 0);
	if (algo) hash = tp_hash64(algo, strlen(algo), hash);
	digests[comm->rank] = (struct digest){ RECORD_VERSION, kind, hash };
	ncclResult_t result = tp_boot_all_gather(comm->boot, digests, sizeof(*digests));
	bool equal = true;
	for (int r = 1; r < comm->nranks; r++) equal &= !memcmp(&digests[r], &digests[0], sizeof(*digests));
	if (result == ncclSuccess && !equal) result = explain(comm, &own, digests);
	free(digests);
	if (result != ncclSuccess) return result;
	copy_text(comm->algo_filter, sizeof(comm->algo_filter), algo);
	if (algo && strlen(algo) >= sizeof(comm->algo_filter))
		return TP_FAIL(ncclInvalidUsage, "NCCL_ALGO is longer than %zu characters", sizeof(comm->algo_filter) - 1);
	TP_TRY(tp_choose_check_algo(comm->algo_filter));
	return tp_choose_check_proto(proto);
}

/* What the links and the machines are makes the model; the least of all ranks counts. Last step of init: who gets through
 * knows that all ranks have their links. */
ncclResult_t tp_agree_model(struct ncclComm *comm)
{
	struct found { uint64_t inside, across; int32_t by_ref, watch; struct tp_cores_place place; } *all = tp_alloc((size_t)comm->nranks, sizeof(*all), "the model");
	if (!all) return ncclSystemError;
	all[comm->rank] = (struct found){ tp_links_inline_capacity(comm->links, false), tp_links_inline_capacity(comm->links, true),
		tp_links_by_ref(comm->links), comm->gpu ? tp_gpu_pace_wanted(comm) : tp_comm_pace_open(comm), { 0 } };
	tp_cores_fill(&all[comm->rank].place);
	ncclResult_t result = tp_boot_all_gather(comm->boot, all, sizeof(*all));
	if (result == ncclSuccess) {
		struct found least = all[0];
		for (int r = 1; r < comm->nranks; r++) {
			least.inside = TP_MIN(least.inside, all[r].inside);
			least.across = TP_MIN(least.across, all[r].across);
			least.by_ref = TP_MIN(least.by_ref, all[r].by_ref);
			least.watch = TP_MIN(least.watch, all[r].watch);
		}
		if (least.inside) comm->model.slot_bytes_inside = least.inside;
		if (least.across) comm->model.slot_bytes_across = least.across;
		comm->model.by_ref_inside = least.by_ref;
		/* GPUs don't share processors; several ranks of one GPU are the budget's affair. */
		if (!comm->gpu) result = tp_cores_judge(comm, &all[0].place, sizeof(*all));
		else if (comm->model.slot_bytes_inside) comm->model.slot_bytes_inside *= (size_t)comm->nchannels;
		if (comm->gpu) tp_gpu_pace_agree(comm, least.watch);
		else tp_comm_pace_agree(comm, least.watch);
	}
	free(all);
	return result;
}
