/* Who this process is, by what its launcher put into the environment. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/internal.h"

struct launcher {
	const char *name;
	const char *rank, *nranks[2];       /* the first that is set */
	const char *local_rank, *local_nranks;
};
static const struct launcher launchers[] = {
	{ "telpher run", "TELPHER_RANK", { "TELPHER_NRANKS" }, "TELPHER_LOCAL_RANK", "TELPHER_LOCAL_NRANKS" },
	{ "Open MPI", "OMPI_COMM_WORLD_RANK", { "OMPI_COMM_WORLD_SIZE" }, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE" },
	{ "MPICH", "PMI_RANK", { "PMI_SIZE" }, "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
	{ "torchrun", "RANK", { "WORLD_SIZE" }, "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
	{ "Slurm", "SLURM_PROCID", { "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS" }, "SLURM_LOCALID", NULL },
	{ "a Kubernetes indexed Job", "JOB_COMPLETION_INDEX", { "TELPHER_NRANKS" }, "TELPHER_LOCAL_RANK", "TELPHER_LOCAL_NRANKS" },
};

static const char *get(const char *name)
{
	const char *value = name ? getenv(name) : NULL;
	return value && *value ? value : NULL;
}

static ncclResult_t read_number(const char *name, int64_t min, int64_t max, int *out)
{
	const char *text = get(name);
	char *end;
	errno = 0;
	long value = strtol(text, &end, 10);
	while (isspace((unsigned char)*end)) end++;
	if (end == text || *end || errno || value < min || value > max)
		return TP_FAIL(ncclInvalidArgument, "%s is \"%s\"; it must be a number in [%lld, %lld]", name, text, (long long)min, (long long)max);
	*out = (int)value;
	return ncclSuccess;
}

ncclResult_t tp_rank_from_environment(struct tp_rank_env *out)
{
	if (!out) return TP_FAIL(ncclInvalidArgument, "telpher_rank_from_environment: out is NULL");
	const char *half = NULL;
	for (size_t i = 0; i < TP_ARRAY_LEN(launchers); i++) {
		const struct launcher *l = &launchers[i];
		const char *nranks = get(l->nranks[0]) ? l->nranks[0] : l->nranks[1];
		if (!get(l->rank) || !get(nranks)) {
			if (get(l->rank) && !half) half = l->rank;
			continue;
		}
		struct tp_rank_env found = { .local_rank = -1, .local_nranks = -1, .launcher = l->name };
		TP_TRY(read_number(nranks, 1, INT32_MAX, &found.nranks));
		TP_TRY(read_number(l->rank, 0, found.nranks - 1, &found.rank));
		if (get(l->local_rank)) TP_TRY(read_number(l->local_rank, 0, found.nranks - 1, &found.local_rank));
		if (get(l->local_nranks)) TP_TRY(read_number(l->local_nranks, 1, found.nranks, &found.local_nranks));
		*out = found;
		return ncclSuccess;
	}
	if (half)
		return TP_FAIL(ncclInvalidUsage, "%s is set, but not how many ranks there are (TELPHER_NRANKS would say it)", half);
	TP_INFO(TP_INIT, "No launcher (telpher run, mpirun, srun, torchrun, an indexed Job) is recognised in the environment: this process is the only rank");
	*out = (struct tp_rank_env){ .nranks = 1, .local_nranks = 1, .launcher = "none" };
	return ncclSuccess;
}

/* By the environment or a configuration file. */
static bool has_comm_id(void)
{
	struct tp_param *param = tp_param_find("NCCL_COMM_ID");
	const char *value = param ? tp_param_string(param) : NULL;
	return value && *value;
}

/* `telpher run` says so by TELPHER_JOB; others by their counts. */
static bool is_on_this_machine(const struct tp_rank_env *found)
{
	const char *nodes = get("SLURM_STEP_NUM_NODES");
	return get("TELPHER_JOB") || found->local_nranks == found->nranks || (found->local_nranks < 0 && nodes && !strcmp(nodes, "1"));
}

/* What all ranks of this job have in common, and no other job has: what the launcher calls the job, else the launcher itself. */
static void job_name(char *name, size_t size)
{
	static const char *const names[] = { "TELPHER_JOB", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID" };
	const char *step = get("SLURM_STEP_ID"), *restart = get("TORCHELASTIC_RESTART_COUNT"), *port = get("MASTER_PORT");
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++) {
		if (!get(names[i])) continue;
		snprintf(name, size, "%s=%.100s/%.16s/%.16s/%.8s", names[i], get(names[i]), step ? step : "", restart ? restart : "", port ? port : "");
		return;
	}
	snprintf(name, size, "launcher %ld", (long)getppid());
}

ncclResult_t tp_rank_unique_id(struct tp_rank_env *rank, ncclUniqueId *id)
{
	if (!rank || !id) return TP_FAIL(ncclInvalidArgument, "telpher_unique_id_from_environment: %s is NULL", rank ? "id" : "rank");
	struct tp_rank_env found;
	char job[160];
	TP_TRY(tp_rank_from_environment(&found));
	if (found.nranks == 1 || has_comm_id()) {
		TP_TRY(tp_boot_unique_id(id));
	} else if (is_on_this_machine(&found)) {
		struct tp_param *timeout = tp_param_find("TELPHER_INIT_TIMEOUT");
		job_name(job, sizeof(job));
		TP_TRY(tp_meet_on_this_machine(job, found.rank, found.nranks, timeout ? (int)TP_MIN(tp_param_int(timeout) * 1000, 86400000) : 60000, id));
	} else {
		const char *master = get("MASTER_ADDR");
		return TP_FAIL(ncclInvalidUsage, "%s gives the ranks no place to meet: set NCCL_COMM_ID=%s:PORT, an address of rank 0's machine "
			"with a free port, and TELPHER_JOB_SECRET, alike for all %d ranks", found.launcher, master ? master : "HOST", found.nranks);
	}
	*rank = found;
	return ncclSuccess;
}
