/* Rank from the launcher's variables; what kind of ranks a machine has; configurations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "comm/internal.h"

static const char *const names[] = { "TELPHER_RANK", "TELPHER_NRANKS", "TELPHER_LOCAL_RANK", "TELPHER_LOCAL_NRANKS", "OMPI_COMM_WORLD_RANK",
	"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
	"MPI_LOCALNRANKS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
	"SLURM_LOCALID", "JOB_COMPLETION_INDEX", "NCCL_COMM_ID", "TELPHER_JOB_SECRET", "MASTER_ADDR" };

static void set(const char *list)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++) unsetenv(names[i]);
	char *copy = strdup(list), *rest = copy, *word;
	while ((word = strsep(&rest, " "))) {
		char *value = strchr(word, '=');
		if (!value) continue;
		*value++ = '\0';
		setenv(word, value, 1);
	}
	free(copy);
	tp_param_reload();
}

static void expect(const char *list, const char *launcher, int rank, int nranks, int local_rank)
{
	struct tp_rank_env found;
	set(list);
	assert_int_equal(tp_rank_from_environment(&found), ncclSuccess);
	assert_string_equal(found.launcher, launcher);
	assert_int_equal(found.rank, rank);
	assert_int_equal(found.nranks, nranks);
	assert_int_equal(found.local_rank, local_rank);
}

static void launchers_are_recognised(void **state)
{
	(void)state;
	expect("TELPHER_RANK=3 TELPHER_NRANKS=8 TELPHER_LOCAL_RANK=1", "telpher run", 3, 8, 1);
	expect("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0", "Open MPI", 2, 4, 0);
	expect("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1", "MPICH", 1, 2, 1);
	expect("RANK=5 WORLD_SIZE=16 LOCAL_RANK=5 MASTER_ADDR=node0", "torchrun", 5, 16, 5);
	expect("SLURM_PROCID=7 SLURM_NTASKS=9 SLURM_LOCALID=3", "Slurm", 7, 9, 3);
	expect("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=9", "Slurm", 0, 1, -1);
	expect("JOB_COMPLETION_INDEX=4 TELPHER_NRANKS=5", "a Kubernetes indexed Job", 4, 5, -1);
	/* mpirun inside a Slurm allocation. */
	expect("SLURM_PROCID=0 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", "Open MPI", 3, 4, -1);
}

static void nonsense_is_an_error(void **state)
{
	(void)state;
	struct tp_rank_env found;
	static const char *const bad[] = { "TELPHER_RANK=8 TELPHER_NRANKS=8", "TELPHER_RANK=-1 TELPHER_NRANKS=8", "RANK=one WORLD_SIZE=2",
		"RANK=0 WORLD_SIZE=0", "PMI_RANK=0 PMI_SIZE=99999999999999999999" };
	for (size_t i = 0; i < TP_ARRAY_LEN(bad); i++) {
		set(bad[i]);
		assert_int_equal(tp_rank_from_environment(&found), ncclInvalidArgument);
	}
	set("JOB_COMPLETION_INDEX=1");
	assert_int_equal(tp_rank_from_environment(&found), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_NRANKS"));
	assert_int_equal(tp_rank_from_environment(NULL), ncclInvalidArgument);
}

static void without_a_launcher_this_is_the_only_rank(void **state)
{
	(void)state;
	expect("", "none", 0, 1, 0);
}

static void a_job_without_a_place_to_meet_is_told_what_is_missing(void **state)
{
	(void)state;
	struct tp_rank_env found;
	ncclUniqueId id, other;
	set("RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0");
	assert_int_equal(tp_rank_unique_id(&found, &id), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_COMM_ID=node0:"));
	set("RANK=1 WORLD_SIZE=2 NCCL_COMM_ID=127.0.0.1:23456 TELPHER_JOB_SECRET=correct-horse");
	assert_int_equal(tp_rank_unique_id(&found, &id), ncclSuccess);
	assert_int_equal(found.rank, 1);
	set("RANK=0 WORLD_SIZE=2 NCCL_COMM_ID=127.0.0.1:23456 TELPHER_JOB_SECRET=correct-horse");
	assert_int_equal(tp_rank_unique_id(&found, &other), ncclSuccess);
	assert_memory_equal(&id, &other, sizeof(id));
	set("");
}

static ncclResult_t kind_with(const char *device, const char *library, enum tp_device_kind *kind)
{
	setenv("TELPHER_DEVICE", device, 1);
	setenv("TELPHER_CUDA_LIBRARY", library, 1);
	tp_param_reload();
	ncclResult_t result = tp_device_kind(kind);
	unsetenv("TELPHER_DEVICE");
	unsetenv("TELPHER_CUDA_LIBRARY");
	tp_param_reload();
	return result;
}

static void a_driver_that_is_broken_is_an_error(void **state)
{
	(void)state;
	enum tp_device_kind kind = TP_DEVICE_CUDA;
	/* Demanded, and not there, or no driver at all: never host ranks in silence. */
	assert_int_equal(kind_with("auto", "libtelpher-no-such-library.so", &kind), ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_DEVICE=host"));
	assert_int_equal(kind_with("cuda", "libm.so.6", &kind), ncclSystemError);
	assert_int_equal(kind, TP_DEVICE_CUDA);
	assert_int_equal(kind_with("host", "libtelpher-no-such-library.so", &kind), ncclSuccess);
	assert_int_equal(kind, TP_DEVICE_HOST);
}

static void a_configuration_inherits_from_its_parent(void **state)
{
	(void)state;
	struct tp_config parent, child;
	ncclConfig_t given = NCCL_CONFIG_INITIALIZER;
	given.blocking = 0;
	given.commName = "first";
	given.splitShare = 1;
	assert_int_equal(tp_config_read(&given, NULL, &parent), ncclSuccess);
	assert_false(parent.blocking);
	assert_string_equal(parent.comm_name, "first");
	assert_int_equal(parent.max_ctas, 64);
	assert_int_equal(tp_config_read(NULL, &parent, &child), ncclSuccess);
	assert_memory_equal(&parent, &child, sizeof(parent));
	assert_int_equal(tp_config_read(NULL, NULL, &child), ncclSuccess);
	assert_true(child.blocking);
	setenv("NCCL_COMM_BLOCKING", "1", 1);
	tp_param_reload();
	assert_int_equal(tp_config_read(&given, NULL, &child), ncclSuccess);
	assert_true(child.blocking);
	unsetenv("NCCL_COMM_BLOCKING");
	tp_param_reload();
	char long_name[200];
	memset(long_name, 'x', sizeof(long_name));
	long_name[199] = '\0';
	given.commName = long_name;
	assert_int_equal(tp_config_read(&given, NULL, &child), ncclInvalidArgument);
}

static void calls_that_differ_have_different_hashes(void **state)
{
	(void)state;
	uint32_t base = tp_call_hash(TP_ALL_REDUCE, 100, ncclFloat, ncclSum, -1);
	assert_int_equal(base, tp_call_hash(TP_ALL_REDUCE, 100, ncclFloat, ncclSum, -1));
	assert_int_not_equal(base, tp_call_hash(TP_ALL_GATHER, 100, ncclFloat, ncclSum, -1));
	assert_int_not_equal(base, tp_call_hash(TP_ALL_REDUCE, 101, ncclFloat, ncclSum, -1));
	assert_int_not_equal(base, tp_call_hash(TP_ALL_REDUCE, 100, ncclInt, ncclSum, -1));
	assert_int_not_equal(base, tp_call_hash(TP_ALL_REDUCE, 100, ncclFloat, ncclMax, -1));
	assert_int_not_equal(tp_call_hash(TP_BROADCAST, 1, 1, 0, 0), tp_call_hash(TP_BROADCAST, 1, 1, 0, 1));
	for (size_t count = 0; count < 10000; count++) assert_int_not_equal(tp_call_hash(TP_ALL_REDUCE, count, ncclFloat, ncclSum, -1), 0);
}

static void scalars_of_every_type_are_read(void **state)
{
	(void)state;
	static const struct { ncclDataType_t type; uint64_t bits; double value; } cases[] = {
		{ ncclFloat16, 0xc100, -2.5 }, { ncclFloat16, 0x0001, 0x1p-24 }, { ncclBfloat16, 0x4049, 3.140625 }, { ncclFloat8e4m3, 0x7e, 448 },
		{ ncclFloat8e4m3, 0x01, 0x1p-9 }, { ncclFloat8e5m2, 0xbc, -1 }, { ncclFloat32, 0x3f800000, 1 }, { ncclFloat64, 0x4000000000000000, 2 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct tp_reduce reduce = { .type = cases[i].type };
		tp_redop_read_scalar(&cases[i].bits, &reduce);
		assert_true(reduce.pre_scale == cases[i].value);
	}
	static const struct { ncclDataType_t type; uint64_t bits; int64_t value; } integers[] = {
		{ ncclInt8, 0xff, -1 }, { ncclUint8, 0xff, 255 }, { ncclInt32, 0xfffffffe, -2 }, { ncclUint32, 0xfffffffe, 4294967294 },
		{ ncclInt64, UINT64_MAX, -1 }, { ncclUint64, UINT64_MAX, -1 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(integers); i++) {
		struct tp_reduce reduce = { .type = integers[i].type };
		tp_redop_read_scalar(&integers[i].bits, &reduce);
		assert_int_equal(reduce.pre_integer, integers[i].value);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(launchers_are_recognised), cmocka_unit_test(nonsense_is_an_error), cmocka_unit_test(without_a_launcher_this_is_the_only_rank),
		cmocka_unit_test(a_job_without_a_place_to_meet_is_told_what_is_missing), cmocka_unit_test(a_driver_that_is_broken_is_an_error),
		cmocka_unit_test(a_configuration_inherits_from_its_parent), cmocka_unit_test(calls_that_differ_have_different_hashes),
		cmocka_unit_test(scalars_of_every_type_are_read),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
