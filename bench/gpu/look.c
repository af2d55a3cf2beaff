/* What ran. A captured graph shows the kernels, whose they are, and their blocks; the driver says how many blocks a multiprocessor holds. What the
 * library calls it (which algorithm, which lines) it says itself, on lines that are wanted (NCCL_DEBUG_SUBSYS=TUNING) during the call that is checked,
 * and not while anything is measured. It says it of a call that it hasn't made before, so the last word on a kind of call is kept. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"

/* Changed in place: the environment itself stays, while threads of the library may look at it. */
static char debug[] = "NCCL_DEBUG=WARN", file[64];
static int said = -1;
static off_t heard;

void look_open(void)
{
	if (getenv("NCCL_DEBUG") || getenv("NCCL_DEBUG_FILE") || (said = memfd_create("tuning", MFD_CLOEXEC)) < 0) return;
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=/proc/self/fd/%d", said);
	putenv(debug);
	putenv(file);
	setenv("NCCL_DEBUG_SUBSYS", "TUNING", 1);
}

static bool can_say(const struct rank *k) { return said >= 0 && k->l->telpher_version && k->l->ncclResetDebugInit; }
/* One rank of the process does what concerns all. */
static bool is_first(const struct rank *k) { return !k->g->threads || k->rank == 0; }

static void want(const struct rank *k, const char *level)
{
	if (!is_first(k)) return;
	memcpy(debug + sizeof("NCCL_DEBUG=") - 1, level, 4);
	k->l->ncclResetDebugInit();
}

void look_begin(struct rank *k)
{
	if (!can_say(k)) return;
	meet(k);
	if (is_first(k)) heard = lseek(said, 0, SEEK_END);
	want(k, "INFO");
	meet(k);
}

/* "… rank 1: AllReduce of 8 bytes a block as ONE_SHOT/LL, 1 thread blocks" */
static void read_line(const char *line, int rank, char *how)
{
	const char *at = strstr(line, " rank "), *as = strstr(line, " a block as ");
	if (!at || !as || atoi(at + 6) != rank) return;
	as += sizeof(" a block as ") - 1;
	snprintf(how, HOW_NAME, "%.*s", (int)strcspn(as, ","), as);
}

void look_end(struct rank *k, const struct cell *c)
{
	char text[8192], *keep;
	if (!can_say(k)) return;
	meet(k);
	ssize_t n = pread(said, text, sizeof(text) - 1, heard);
	text[n < 0 ? 0 : n] = 0;
	for (char *line = strtok_r(text, "\n", &keep); line; line = strtok_r(NULL, "\n", &keep)) read_line(line, k->rank, k->how[c->coll]);
	meet(k);
	want(k, "WARN");
	meet(k);
}

static void look_at_kernel(const struct rank *k, const CUDA_KERNEL_NODE_PARAMS *p, struct ran *out)
{
	int blocks = (int)(p->gridDimX * p->gridDimY * p->gridDimZ), threads = (int)(p->blockDimX * p->blockDimY * p->blockDimZ), each = 0;
	const char *name = NULL;
	CUfunction function = p->func;
	if (!function && p->kern && cuda.KernelGetFunction) cuda.KernelGetFunction(&function, p->kern);
	if (p->sharedMemBytes > out->shared) out->shared = p->sharedMemBytes;
	out->kernels++;
	if (blocks <= out->blocks) return;
	out->blocks = blocks;
	out->threads = threads;
	out->sms = 0;
	if (function && cuda.FuncGetName) cuda.FuncGetName(&name, function);
	else if (p->kern && cuda_kernel_name) cuda_kernel_name(&name, p->kern);
	snprintf(out->kernel, sizeof(out->kernel), "%s", name ? name : "");
	if (function && cuda.OccupancyMaxActiveBlocksPerMultiprocessor(&each, function, threads, p->sharedMemBytes) == CUDA_SUCCESS && each > 0)
		out->sms = (blocks + each - 1) / each;
	if (out->sms > k->g->sms) out->sms = k->g->sms;
}

void look_at_graph(struct rank *k, CUgraph graph, int calls, struct ran *out)
{
	size_t count = 0;
	memset(out, 0, sizeof(*out));
	if (!cuda_kernel_node) return;
	CUDA(GraphGetNodes(graph, NULL, &count));
	CUgraphNode *nodes = calloc(count + 1, sizeof(*nodes));
	if (!nodes) abort();
	CUDA(GraphGetNodes(graph, nodes, &count));
	for (size_t i = 0; i < count; i++) {
		CUgraphNodeType type;
		CUDA_KERNEL_NODE_PARAMS parameters;
		CUDA(GraphNodeGetType(nodes[i], &type));
		if (type == CU_GRAPH_NODE_TYPE_MEMCPY) out->copies++;
		if (type == CU_GRAPH_NODE_TYPE_KERNEL && cuda_kernel_node(nodes[i], &parameters) == CUDA_SUCCESS) look_at_kernel(k, &parameters, out);
	}
	free(nodes);
	out->kernels /= calls;
	out->copies /= calls;
}

bool look_at_launch(CUgraph graph, CUDA_KERNEL_NODE_PARAMS *out)
{
	CUgraphNode nodes[16];
	size_t count = sizeof(nodes) / sizeof(nodes[0]), all = 0;
	int kernels = 0;
	CUDA(GraphGetNodes(graph, NULL, &all));
	if (!cuda_kernel_node || all > count) return false;
	CUDA(GraphGetNodes(graph, nodes, &all));
	for (size_t i = 0; i < all; i++) {
		CUgraphNodeType type;
		CUDA(GraphNodeGetType(nodes[i], &type));
		if (type == CU_GRAPH_NODE_TYPE_MEMCPY || (type == CU_GRAPH_NODE_TYPE_KERNEL && (kernels++ || cuda_kernel_node(nodes[i], out) != CUDA_SUCCESS))) return false;
	}
	return kernels == 1 && out->kernelParams;
}

/* Warnings, which went where nobody sees them. */
void look_close(void)
{
	static atomic_flag told = ATOMIC_FLAG_INIT;
	char text[4096];
	FILE *lines = said >= 0 && !atomic_flag_test_and_set(&told) ? fdopen(dup(said), "r") : NULL;
	if (!lines) return;
	rewind(lines);
	while (fgets(text, sizeof(text), lines))
		if (strstr(text, "WARN")) fputs(text, stderr);
	fclose(lines);
}
