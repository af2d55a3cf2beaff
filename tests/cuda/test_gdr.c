/* Network cards at GPU memory: GPU ranks on two virtual hosts over the software card, which takes device memory by its address and as DMA-BUF. Where slots
 * lie, why, what is flushed, and that results are right in any case. */
#include "cuda/helper_ops.h"
#include "telpher.h"

struct way {
	const char *name;
	const char *env[4];
	int nranks;
	const char *send, *receive;     /* of the lines that say which way a channel goes */
	int gdr;                        /* as the path report has it */
	const char *code;               /* of the refusal there; NULL: there is none */
	const char *said[2];            /* in the log */
	const char *never;              /* not in the log */
};
static const struct way ways[] = {
	{ "by DMA-BUF", { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_DMABUF=1" }, 4, "/GDRDMA", "/GDRDMA", 1, NULL, { "GPU Direct RDMA (DMABUF, Telpher's software card) enabled",
		"read 1, flush 0" }, "NCCL WARN" },
	{ "by address", { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_DMABUF=1", "NCCL_DMABUF_ENABLE=0" }, 2, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "GPU Direct RDMA (nvidia-peermem, Telpher's software card) enabled" }, "NCCL WARN" },
	{ "flushed by force", { "NCCL_NET_GDR_LEVEL=SYS", "NCCL_NET_FORCE_FLUSH=1" }, 4, "/GDRDMA", "/GDRDMA", 1, NULL, { "flush 1, NCCL_NET_FORCE_FLUSH=1" }, "NCCL WARN" },
	{ "flushed by capability", { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_CAPABILITY=80", "FAKE_CUDA_DMABUF=1" }, 2, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "flush 1, before compute capability 9.0" }, "NCCL WARN" },
	{ "several devices, flushed", { "NCCL_NET_GDR_LEVEL=SYS", "TELPHER_VERBS_DEVICES=2", "NCCL_NET_FORCE_FLUSH=1" }, 2, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "via NET/IB/1/GDRDMA" }, "NCCL WARN" },
	{ "merged ports, flushed", { "NCCL_NET_GDR_LEVEL=SYS", "TELPHER_VERBS_PORTS=2", "NCCL_NET_FORCE_FLUSH=1" }, 2, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "telpher0:1+telpher0:2" }, "NCCL WARN" },
	{ "written, not read", { "NCCL_NET_GDR_LEVEL=SYS", "NCCL_NET_GDR_READ=0" }, 2, "", "/GDRDMA", 0, "disabled", { "no GDR at rank 0: NCCL_NET_GDR_READ=0" }, "NCCL WARN" },
	{ "too far", { NULL }, 2, "", "", 0, "distance", { "NCCL_NET_GDR_LEVEL=PHB would do so" }, "GDRDMA" },
	{ "a card that can't", { "NCCL_NET_GDR_LEVEL=SYS", "TELPHER_VERBS_GPU=0" }, 2, "", "", 0, "nic-unable", { "the software card takes no GPU memory" }, "GDRDMA" },
	{ "DMA-BUF fails, the address works", { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_DMABUF=1", "FAKE_CUDA_FAIL=cuMemGetHandleForAddressRange:1:801" }, 2, "/GDRDMA", "/GDRDMA", 1,
		NULL, { "GPU Direct RDMA (nvidia-peermem, Telpher's software card) enabled" }, NULL },
	{ "registration fails later", { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_DMABUF=1", "FAKE_CUDA_FAIL=cuMemGetHandleForAddressRange:2:801" }, 2, "", "", 1, NULL,
		{ "NCCL WARN rank 0: 8388608 bytes of device memory for network links can't be had or registered" }, NULL },
	{ "flags by GDRCopy", { "NCCL_NET_GDR_LEVEL=SYS", "NCCL_GDRCOPY_ENABLE=1", "NCCL_NET_FORCE_FLUSH=1" }, 4, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "kernels poll GPU memory for network links, 65536 bytes by GDRCopy" }, "NCCL WARN" },
	{ "sockets, flags by GDRCopy", { "NCCL_NET=Socket", "NCCL_GDRCOPY_ENABLE=1" }, 2, "", "", 0, "nic-unable", { "kernels poll GPU memory for network links" }, "NCCL WARN" },
	{ "GDRCopy without its module", { "NCCL_NET_GDR_LEVEL=SYS", "NCCL_GDRCOPY_ENABLE=1", "GDRAPI_FAKE=0" }, 2, "/GDRDMA", "/GDRDMA", 1, NULL,
		{ "NCCL WARN NCCL_GDRCOPY_ENABLE=1, but gdr_open fails" }, "kernels poll GPU memory" },
	{ "sockets", { "NCCL_NET_GDR_LEVEL=SYS", "NCCL_NET=Socket" }, 2, "", "", 0, "nic-unable", { "the transport takes host memory", "65536 bytes a chunk, 3 channels" }, "GDRDMA" },
};
#define NWAYS (sizeof(ways) / sizeof(ways[0]))

static char folder[64];

static char *read_log(void)
{
	char path[128];
	snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
	FILE *in = fopen(path, "r");
	char *text = calloc(1, 1 << 20);
	CHECK(in && text && fread(text, 1, (1 << 20) - 1, in) > 0);
	fclose(in);
	return text;
}

/* Every line "[send] via NET/…" ends as it should. */
static void check_lines(const char *log, const char *direction, const char *end)
{
	int lines = 0;
	char what[32];
	snprintf(what, sizeof(what), "[%s] via NET/", direction);
	for (const char *at = strstr(log, what); at; at = strstr(at + 1, what), lines++) {
		size_t name = strcspn(at + strlen(what), "/\n"), all = strcspn(at, "\n"), number = strspn(at + strlen(what) + name + 1, "0123456789");
		const char *rest = at + strlen(what) + name + 1 + number;
		CHECK((size_t)(at + all - rest) == strlen(end) && strncmp(rest, end, strlen(end)) == 0);
	}
	CHECK(lines > 0);
}

/* But for a word of the card: a process that gets no processor for a second looks like one that has been stopped. */
static bool is_said(const char *log, const char *what)
{
	for (const char *at = strstr(log, what); at; at = strstr(at + 1, what)) {
		const char *busy = strstr(at, "has served nothing for");
		if (!busy || (size_t)(busy - at) > strcspn(at, "\n")) return true;
	}
	return false;
}

static void check_report(struct gpu_rank *g, const struct way *w)
{
	static char text[65536];
	size_t bytes = sizeof(text);
	char code[64];
	CHECK(telpher_comm_paths(g->comm, 0, text, &bytes) == ncclSuccess);
	const char *far = strstr(text, "\"same_host\":false");
	CHECK(far && strstr(far, w->gdr ? "\"gdr\":true" : "\"gdr\":false"));
	const char *refused = strstr(far, "\"GDR\"");
	if (!w->code) {
		CHECK(!refused);
		return;
	}
	snprintf(code, sizeof(code), "\"%s\"", w->code);
	CHECK(refused && strstr(refused, code));
}

static void every_collective(struct gpu_rank *g)
{
	static const size_t counts[] = { 1, 4099, 60011 };
	const struct way *w = g->arg;
	struct random random = { 7 };
	for (int kind = 0; kind < NKINDS; kind++)
		for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
			struct gpu_op o = { .kind = (enum op_kind)kind, .rank = g->r->rank, .nranks = g->r->nranks, .root = (int)below(&random, (size_t)g->r->nranks), .count = counts[c],
				.type = c % 2 ? ncclFloat16 : ncclFloat32, .op = ncclSum, .seed = (uint64_t)kind + 1 };
			op_run(g, &o, g->comm, 1);
		}
	char *log = read_log();
	check_lines(log, "send", w->send);
	check_lines(log, "receive", w->receive);
	for (size_t i = 0; i < 2 && w->said[i] && g->r->rank == 0; i++)
		if (!strstr(log, w->said[i])) {
			fprintf(stderr, "not in the log: %s\n", w->said[i]);
			_exit(9);
		}
	CHECK(!w->never || !is_said(log, w->never));
	free(log);
	check_report(g, w);
}

static void results_are_right_and_the_way_is_told(void **state)
{
	const struct way *w = *state;
	struct gpu_options o = { .nranks = w->nranks, .nhosts = 2, .ndevices = w->nranks > 2 ? 2 : 1, .pool_bytes = (size_t)6 << 20, .env = { w->env[0], w->env[1], w->env[2] } };
	assert_true(gpu_run(&o, every_collective, (void *)(uintptr_t)w));
}

static void clean(void)
{
	char command[96];
	snprintf(command, sizeof(command), "rm -rf %s", folder);
	if (system(command)) return;
}

int main(int argc, char **argv)
{
	struct CMUnitTest tests[NWAYS];
	int ntests = 0;
	char file[80];
	if (!gpu_fake_here()) return 77;
	strcpy(folder, "/tmp/telpher_gdr_XXXXXX");
	if (!mkdtemp(folder)) return 1;
	snprintf(file, sizeof(file), "%s/%%p", folder);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_GDRCOPY_LIBRARY", FAKE_GDRAPI_LIBRARY, 1);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH,TUNING", 1);
	setenv("NCCL_DEBUG_FILE", file, 1);
	for (size_t w = 0; w < NWAYS; w++)
		if (argc < 2 || strstr(ways[w].name, argv[1]))
			tests[ntests++] = (struct CMUnitTest){ ways[w].name, results_are_right_and_the_way_is_told, NULL, NULL, (void *)(uintptr_t)&ways[w] };
	int failed = _cmocka_run_group_tests("cuda_gdr", tests, (size_t)ntests, NULL, NULL);
	clean();
	return failed;
}
