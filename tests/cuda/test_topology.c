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
	char *text = calloc(1, 1 << 20);
	assert_non_null(in);
	assert_true(fread(text, 1, (1 << 20) - 1, in) > 0);
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

/* Four GPUs in a square of NVLinks: 0-2-1-3; across, none. */
#define SQUARE(bus, one, other) "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\" link_speed=\"8.0 GT/s PCIe\" link_width=\"16\"><gpu sm=\"70\">" \
	"<nvlink target=\"0000:" one ":00.0\" count=\"2\" tclass=\"0x030200\"/><nvlink target=\"0000:" other ":00.0\" count=\"2\" tclass=\"0x030200\"/></gpu></pci>"

#define COUNT 40000
static void reduces_gathers_and_broadcasts(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	int n = r->nranks, each = COUNT / n;
	CUdeviceptr at = gpu_take(g, COUNT * sizeof(float), 0), part = gpu_take(g, COUNT * sizeof(float), 0);
	float *values = malloc(COUNT * sizeof(float));
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < COUNT; i++) values[i] = (float)(r->rank + i % 11);
		gpu_put(g, at, values, COUNT * sizeof(float));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(part), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
		gpu_sync(g, 0);
		gpu_get(g, values, part, COUNT * sizeof(float));
		for (int i = 0; i < COUNT; i++) REQUIRE(values[i] == (float)(n * (i % 11) + n * (n - 1) / 2));
		REQUIRE_OK(ncclReduceScatter(GPU_PTR(at), GPU_PTR(part), (size_t)each, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
		REQUIRE_OK(ncclAllGather(GPU_PTR(part), GPU_PTR(at), (size_t)each, ncclFloat32, g->comm, GPU_STREAM(g, 0)));
		gpu_sync(g, 0);
		gpu_get(g, values, at, COUNT * sizeof(float));
		for (int i = 0; i < each * n; i++) REQUIRE(values[i] == (float)(n * (i % 11) + n * (n - 1) / 2));
		for (int root = 0; root < n; root++) {
			for (int i = 0; i < COUNT; i++) values[i] = (float)(r->rank * 3 + i % 5);
			gpu_put(g, at, values, COUNT * sizeof(float));
			REQUIRE_OK(ncclBroadcast(GPU_PTR(at), GPU_PTR(part), COUNT, ncclFloat32, root, g->comm, GPU_STREAM(g, 0)));
			gpu_sync(g, 0);
			gpu_get(g, values, part, COUNT * sizeof(float));
			for (int i = 0; i < COUNT; i++) REQUIRE(values[i] == (float)(root * 3 + i % 5));
			REQUIRE_OK(ncclReduce(GPU_PTR(at), GPU_PTR(part), COUNT, ncclFloat32, ncclSum, root, g->comm, GPU_STREAM(g, 0)));
			gpu_sync(g, 0);
			gpu_get(g, values, part, COUNT * sizeof(float));
			for (int i = 0; i < COUNT && r->rank == root; i++) REQUIRE(values[i] == (float)(n * (i % 5) + 3 * n * (n - 1) / 2));
		}
	}
	free(values);
}

/* Rank 0's line of a channel, from the log. */
static bool has_channel(const char *ranks)
{
	char *text = read_file(dump);
	bool has = false;
	for (char *line = strtok(text, "\n"); line && !has; line = strtok(NULL, "\n")) {
		const char *at = strstr(line, "NCCL INFO Channel ");
		has = at && (at = strstr(at, " :")) && strcmp(at + 2, ranks) == 0;
	}
	free(text);
	return has;
}

static void rings_go_along_nvlinks(void **state)
{
	(void)state;
	FILE *out = fopen(machine, "w");
	assert_non_null(out);
	fputs("<system version=\"1\">" CPU SQUARE("10", "12", "13") SQUARE("11", "12", "13") SQUARE("12", "10", "11") SQUARE("13", "10", "11") "</cpu></system>", out);
	fclose(out);
	struct gpu_options options = { .nranks = 4, .ndevices = 4, .env = { setting("NCCL_TOPO_FILE", machine), "NCCL_ALGO=RING", "NCCL_DEBUG=INFO",
		setting("NCCL_DEBUG_FILE", dump), "NCCL_MAX_CTAS=4" } };
	assert_true(gpu_run(&options, reduces_gathers_and_broadcasts, NULL));
	assert_true(has_channel(" 0 2 1 3") || has_channel(" 2 1 3 0") || has_channel(" 1 3 0 2") || has_channel(" 3 0 2 1"));
	assert_true(has_channel(" 0 3 1 2") || has_channel(" 3 1 2 0") || has_channel(" 1 2 0 3") || has_channel(" 2 0 3 1"));
	assert_false(has_channel(" 0 1 2 3"));
}

static void what_was_measured_is_what_is_expected(void **state)
{
	(void)state;
	FILE *out = fopen(machine, "w");
	assert_non_null(out);
	fputs("<system version=\"1\">" CPU BRIDGE GPU("10", "11", "1") GPU("11", "10", "7") "</pci></cpu>"
		"<measured from=\"GPU 5\" to=\"GPU 6\" alpha_us=\"7.5\" gbps=\"123\" from_bus=\"0000:10:00.0\" to_bus=\"0000:11:00.0\"/>"
		"<measured from=\"GPU 0\" to=\"GPU 9\" gbps=\"1\"/></system>", out);
	fclose(out);
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .env = { setting("NCCL_TOPO_FILE", machine), setting("TELPHER_PATHS_FILE", dump), "NCCL_DEBUG=WARN",
		setting("NCCL_DEBUG_FILE", graphs) } };
	assert_true(gpu_run(&options, works, NULL));
	char *text = read_file(dump);
	assert_non_null(strstr(text, "\"bandwidth_gbs\":123,\"latency_us\":7.5"));
	assert_non_null(strstr(text, "measured"));
	free(text);
	text = read_file(graphs);
	char *told = strstr(text, "measured from GPU 0 to GPU 9: nothing is called GPU 9 any more; left out");
	assert_non_null(told);
	assert_null(strstr(told + 1, "measured from GPU 0 to GPU 9"));
	free(text);
}

static bool log_has(const char *text)
{
	char *log = read_file(dump);
	bool has = strstr(log, text);
	free(log);
	return has;
}

/* All reach all others' memory there, so that fused kernels would run it in two shots: over PCIe, between those that no link joins. */
static void on_a_square_of_nvlinks_large_messages_go_along_them(void **state)
{
	(void)state;
	FILE *out = fopen(machine, "w");
	assert_non_null(out);
	fputs("<system version=\"1\">" CPU SQUARE("10", "12", "13") SQUARE("11", "12", "13") SQUARE("12", "10", "11") SQUARE("13", "10", "11") "</cpu></system>", out);
	fclose(out);
	struct gpu_options options = { .nranks = 4, .ndevices = 4, .env = { setting("NCCL_TOPO_FILE", machine), "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,TUNING",
		setting("NCCL_DEBUG_FILE", dump), "NCCL_MAX_CTAS=4" } };
	assert_true(gpu_run(&options, reduces_gathers_and_broadcasts, NULL));
	assert_true(log_has("algorithms are chosen by the topology"));
	assert_true(log_has("the GPUs are not joined alike"));
	assert_true(log_has("AllReduce: 160000 bytes a block, root -1 -> RING"));
	assert_false(log_has("AllReduce: 160000 bytes a block, root -1 -> TWO_SHOT"));
}

static void where_all_gpus_are_joined_alike_rings_go_by_rank(void **state)
{
	(void)state;
	struct gpu_options options = { .nranks = 3, .ndevices = 3, .env = { "NCCL_ALGO=RING", "NCCL_DEBUG=INFO", setting("NCCL_DEBUG_FILE", dump) } };
	assert_true(gpu_run(&options, reduces_gathers_and_broadcasts, NULL));
	assert_true(has_channel(" 0 1 2"));
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(int argc, char **argv)
{
	if (!gpu_fake_here()) return 77;
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		WITH_FILES(the_files_have_the_ranks_of_the_job), WITH_FILES(nvlink_that_is_not_used_is_not_as_expected),
		WITH_FILES(nvlink_that_is_not_used_is_a_warning), WITH_FILES(several_ranks_on_a_gpu_have_its_place),
		WITH_FILES(a_machine_that_cannot_be_read_is_a_warning_and_the_job_runs), WITH_FILES(rings_go_along_nvlinks),
		WITH_FILES(where_all_gpus_are_joined_alike_rings_go_by_rank), WITH_FILES(what_was_measured_is_what_is_expected), WITH_FILES(on_a_square_of_nvlinks_large_messages_go_along_them),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
