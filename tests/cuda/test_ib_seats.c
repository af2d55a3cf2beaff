/* Which network devices GPU ranks use: those nearest to their GPUs on a machine that a file describes. The bus ids are the fake driver's, the ports the
 * software card's. */
#include "cuda/helper_gpu.h"

#ifndef CARD_LIBRARY
#define CARD_LIBRARY ""
#endif
#define PCIE " link_speed=\"32.0 GT/s PCIe\" link_width=\"16\""
#define BRIDGE(bus) "<pci busid=\"0000:" bus ":00.0\" class=\"0x060400\"" PCIE ">"
#define GPU(bus) "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\"" PCIE "><gpu sm=\"90\"/></pci>"
#define NIC(bus, name) "<pci busid=\"0000:" bus ":00.0\" class=\"0x020000\"" PCIE "><nic><net name=\"" name "\" port=\"1\"/></nic></pci>"
#define MACHINE(devices) "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\" affinity=\"ff\">" devices "</cpu></system>"

static char machine[64];

static void write_machine(const char *text)
{
	FILE *out = fopen(machine, "w");
	assert_non_null(out);
	fputs(text, out);
	fclose(out);
}

static int make_file(void **state)
{
	(void)state;
	strcpy(machine, "/tmp/telpher_seats_XXXXXX");
	int fd = mkstemp(machine);
	return fd < 0 || close(fd) ? -1 : 0;
}

static int remove_file(void **state)
{
	(void)state;
	return unlink(machine);
}

static struct gpu_options on_card(int nranks, int ndevices)
{
	static char file[96];
	snprintf(file, sizeof(file), "NCCL_TOPO_FILE=%s", machine);
	return (struct gpu_options){ .nranks = nranks, .nhosts = 2, .ndevices = ndevices, .env = { file, "NCCL_NET=IB", "NCCL_IB_HCA=telpher", "TELPHER_VERBS_DEVICES=2",
		"TELPHER_VERBS_HIDE_REAL=1" } };
}

#define COUNT 100000
static void all_reduce(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr at = gpu_take(g, COUNT * sizeof(float), 0);
	float *values = malloc(COUNT * sizeof(float));
	for (int i = 0; i < COUNT; i++) values[i] = (float)(r->rank + i % 7);
	gpu_put(g, at, values, COUNT * sizeof(float));
	REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_sync(g, 0);
	gpu_get(g, values, at, COUNT * sizeof(float));
	for (int i = 0; i < COUNT; i++) REQUIRE(values[i] == (float)(r->nranks * (i % 7) + r->nranks * (r->nranks - 1) / 2));
	free(values);
}

/* Words of a pair's path in order. */
static void path_has(struct gpu_rank *g, int from, int to, const char *first, const char *second)
{
	struct ranks *r = g->r;
	char text[512];
	REQUIRE_OK(telpher_comm_path(g->comm, from, to, text, sizeof(text)));
	const char *at = strstr(text, first);
	REQUIRE(at && strstr(at, second));
}

static void goes_by_its_own_switch(struct gpu_rank *g)
{
	path_has(g, 0, 2, "; telpher1,", "-> telpher1,");
	path_has(g, 1, 3, "; telpher0,", "-> telpher0,");
	path_has(g, 0, 3, "; telpher1,", "-> telpher0,");
	all_reduce(g);
}

static void each_gpu_uses_the_port_behind_its_own_switch(void **state)
{
	(void)state;
	write_machine(MACHINE(BRIDGE("0e") GPU("10") NIC("20", "telpher1") "</pci>" BRIDGE("0f") GPU("11") NIC("21", "telpher0") "</pci>"));
	struct gpu_options options = on_card(4, 2);
	assert_true(gpu_run(&options, goes_by_its_own_switch, NULL));
	/* Rings, in the orders that the rails make. */
	setenv("NCCL_ALGO", "RING", 1);
	assert_true(gpu_run(&options, goes_by_its_own_switch, NULL));
	unsetenv("NCCL_ALGO");
}

static void takes_turns(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char text[16384];
	size_t bytes = sizeof(text);
	REQUIRE_OK(telpher_comm_paths(g->comm, r->rank, text, &bytes));
	const char *channels = strstr(text, "\"channels\"");
	REQUIRE(channels);
	const char *first = strstr(channels, "telpher0"), *second = strstr(channels, "telpher1");
	REQUIRE(first && second && first < second);
	REQUIRE(strstr(second, "telpher0"));
	all_reduce(g);
}

static void channels_of_a_gpu_take_turns_with_ports_that_are_as_near(void **state)
{
	(void)state;
	write_machine(MACHINE(BRIDGE("0e") GPU("10") NIC("20", "telpher0") NIC("21", "telpher1") "</pci>"));
	struct gpu_options options = on_card(2, 1);
	assert_true(gpu_run(&options, takes_turns, NULL));
}

static void uses_the_near_one_only(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char text[16384];
	size_t bytes = sizeof(text);
	path_has(g, 0, 1, "; telpher1,", "-> telpher1,");
	REQUIRE_OK(telpher_comm_paths(g->comm, r->rank, text, &bytes));
	REQUIRE(!strstr(text, "\"channels\""));
	all_reduce(g);
}

static void a_port_that_is_farther_is_left_alone(void **state)
{
	(void)state;
	write_machine(MACHINE(BRIDGE("0e") GPU("10") NIC("21", "telpher1") "</pci>" NIC("20", "telpher0")));
	struct gpu_options options = on_card(2, 1);
	assert_true(gpu_run(&options, uses_the_near_one_only, NULL));
}

/* The rings come in and leave by one port each; without them either GPU would use its own only. */
#define RING(dev) "<channel><net dev=\"" dev "\"/><gpu dev=\"0\"/><gpu dev=\"1\"/><net dev=\"" dev "\"/></channel>"
static const char rings[] = "<graphs version=\"1\"><graph id=\"0\" pattern=\"4\" crossnic=\"0\" nchannels=\"2\" speedintra=\"1\" speedinter=\"1\" latencyinter=\"0\" "
	"typeintra=\"PIX\" typeinter=\"PIX\" samechannels=\"0\">" RING("1") RING("0") "</graph></graphs>";

static void goes_by_the_ports_of_the_rings(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char text[16384];
	size_t bytes = sizeof(text);
	path_has(g, 1, 2, "; telpher1,", "-> telpher1,");
	path_has(g, 3, 0, "; telpher1,", "-> telpher1,");
	if (r->rank == 1 || r->rank == 3) {
		REQUIRE_OK(telpher_comm_paths(g->comm, r->rank, text, &bytes));
		const char *channels = strstr(text, r->rank == 1 ? "\"to\":2" : "\"to\":0");
		REQUIRE(channels && (channels = strstr(channels, "\"channels\"")));
		const char *first = strstr(channels, "telpher1"), *second = strstr(channels, "telpher0");
		REQUIRE(first && second && first < second);
	}
	all_reduce(g);
}

static void channels_leave_and_enter_by_the_ports_of_their_rings(void **state)
{
	(void)state;
	char graphs[] = "/tmp/telpher_rings_XXXXXX";
	int fd = mkstemp(graphs);
	assert_true(fd >= 0 && write(fd, rings, strlen(rings)) == (ssize_t)strlen(rings) && close(fd) == 0);
	write_machine(MACHINE(BRIDGE("0e") GPU("10") GPU("11") NIC("20", "telpher0") NIC("21", "telpher1") "</pci>"));
	struct gpu_options options = on_card(4, 2);
	setenv("NCCL_GRAPH_FILE", graphs, 1);
	setenv("NCCL_ALGO", "RING", 1);
	assert_true(gpu_run(&options, goes_by_the_ports_of_the_rings, NULL));
	unsetenv("NCCL_ALGO");
	unsetenv("NCCL_GRAPH_FILE");
	unlink(graphs);
}

#define WITH_FILE(test) cmocka_unit_test_setup_teardown(test, make_file, remove_file)

int main(int argc, char **argv)
{
	if (!gpu_fake_here() || access(CARD_LIBRARY, R_OK) != 0) return 77;
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		WITH_FILE(each_gpu_uses_the_port_behind_its_own_switch), WITH_FILE(channels_of_a_gpu_take_turns_with_ports_that_are_as_near),
		WITH_FILE(a_port_that_is_farther_is_left_alone), WITH_FILE(channels_leave_and_enter_by_the_ports_of_their_rings),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
