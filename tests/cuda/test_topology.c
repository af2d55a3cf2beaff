/* GPU ranks on a machine that a file describes: what they are to it, what is expected, and what is worse than it could be. The bus ids are the
 * fake driver's. */
#include "cuda/helper_gpu.h"

#define CPU "<cpu numaid=\"0\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\" affinity=\"ff\">"
#define BRIDGE "<pci busid=\"0000:0f:00.0\" class=\"0x060400\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">"
#define GPU(bus, peer, rank) "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"><gpu sm=\"90\" rank=\"" rank "\">" \
	"<nvlink target=\"0000:" peer ":00.0\" count=\"18\" tclass=\"0x030200\"/></gpu></pci>"

static char machine[64], dump[64], graphs[64];

static char *read_file(const char *path)
{
	FILE *in = fopen(path, "r");
	char *text = calloc(1, 65536);
	assert_non_null(in);
	assert_true(fread(text, 1, 65535, in) > 0);
	fclose(in);
	return text;
}

static int make_files(void **state)
{
	(void)state;
	char *const names[] = { machine, dump, graphs };
	for (int i = 0; i < 3; i++) {
		strcpy(names[i], "/tmp/telpher_gpus_XXXXXX");
		int fd = mkstemp(names[i]);
		if (fd < 0 || close(fd)) return -1;
	}
	FILE *out = fopen(machine, "w");
	if (!out) return -1;
	fputs("<system version=\"1\">" CPU BRIDGE GPU("10", "11", "1") GPU("11", "10", "7") GPU("12", "13", "0") "</pci></cpu></system>", out);
	return fclose(out);
}

static int remove_files(void **state)
{
	(void)state;
	return unlink(machine) | unlink(dump) | unlink(graphs);
}

static const char *setting(const char *name, const char *value)
{
	static char texts[8][160];
	static int next;
	char *text = texts[next++ % 8];
	snprintf(text, sizeof(texts[0]), "%s=%s", name, value);
	return text;
}

static void works(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	float value = 2;
	CUdeviceptr at = gpu_take(g, sizeof(value), 0);
	gpu_put(g, at, &value, sizeof(value));
	REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), 1, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_sync(g, 0);
	gpu_get(g, &value, at, sizeof(value));
	REQUIRE(value == 2.0f * (float)r->nranks);
}

static void the_files_have_the_ranks_of_the_job(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .env = { setting("NCCL_TOPO_FILE", machine), setting("NCCL_TOPO_DUMP_FILE", dump),
		setting("NCCL_GRAPH_DUMP_FILE", graphs), "TELPHER_EXPECT=gpus=2 p2p=nvlink local=P2P" } };
	for (int threads = 0; threads < 2; threads++) {
		options.threads = threads;
		assert_true(gpu_run(&options, works, NULL));
		char *text = read_file(dump);
		assert_non_null(strstr(text, "rank=\"0\""));
		assert_non_null(strstr(text, "rank=\"1\""));
		assert_null(strstr(text, "rank=\"7\""));
		assert_null(strstr(text, "0000:12:00.0"));
		assert_non_null(strstr(text, "count=\"18\""));
		free(text);
		text = read_file(graphs);
		assert_non_null(strstr(text, "pattern=\"4\""));
		assert_non_null(strstr(text, "typeintra=\"NVL\""));
		free(text);
	}
}

static void refused(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comm = NULL;
	REQUIRE_IS(ncclCommInitRank(&comm, r->nranks, r->id, r->rank), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("expected p2p=nvlink of rank");
	REQUIRE_ERROR_HAS("found none");
	ranks_barrier(r);
}

static void nvlink_that_is_not_used_is_not_as_expected(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .no_comm = true, .env = { setting("NCCL_TOPO_FILE", machine), "NCCL_P2P_DISABLE=1",
		"TELPHER_EXPECT=p2p=nvlink" } };
	assert_true(gpu_run(&options, refused, NULL));
}

static void told(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comm = NULL;
	REQUIRE_OK(ncclCommInitRank(&comm, r->nranks, r->id, r->rank));
	if (r->rank == 0) {
		REQUIRE_ERROR_HAS("NVLink joins");
		REQUIRE_ERROR_HAS("NCCL_P2P_DISABLE=1");
	}
	ranks_barrier(r);
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void nvlink_that_is_not_used_is_a_warning(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .no_comm = true, .env = { setting("NCCL_TOPO_FILE", machine), "NCCL_P2P_DISABLE=1" } };
	assert_true(gpu_run(&options, told, NULL));
}

static void several_ranks_on_a_gpu_have_its_place(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 3, .ndevices = 1, .env = { setting("NCCL_TOPO_FILE", machine), setting("NCCL_TOPO_DUMP_FILE", dump) } };
	assert_true(gpu_run(&options, works, NULL));
	char *text = read_file(dump);
	assert_non_null(strstr(text, "<gpu"));
	free(text);
}

static void a_machine_that_cannot_be_read_is_a_warning_and_the_job_runs(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .env = { "NCCL_TOPO_FILE=/nowhere/at/all.xml", setting("NCCL_GRAPH_FILE", machine) } };
	assert_true(gpu_run(&options, works, NULL));
	options.env[0] = setting("NCCL_TOPO_FILE", machine);
	assert_true(gpu_run(&options, works, NULL));
	options.nhosts = 2;
	assert_true(gpu_run(&options, works, NULL));
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(int argc, char **argv)
{
	if (!gpu_fake_here()) return 77;
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		WITH_FILES(the_files_have_the_ranks_of_the_job), WITH_FILES(nvlink_that_is_not_used_is_not_as_expected),
		WITH_FILES(nvlink_that_is_not_used_is_a_warning), WITH_FILES(several_ranks_on_a_gpu_have_its_place),
		WITH_FILES(a_machine_that_cannot_be_read_is_a_warning_and_the_job_runs),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
