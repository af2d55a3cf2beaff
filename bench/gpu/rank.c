#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

struct rank *here[MOST_RANKS];

double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

void word_wait(_Atomic uint32_t *word, uint32_t while_it_is)
{
	while (atomic_load_explicit(word, memory_order_acquire) == while_it_is)     /* pairs with word_raise */
		syscall(SYS_futex, word, FUTEX_WAIT, while_it_is, NULL, NULL, 0);
}

void word_raise(_Atomic uint32_t *word)
{
	atomic_fetch_add_explicit(word, 1, memory_order_release);
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void meet(struct rank *k) { pthread_barrier_wait(&k->g->barrier); }

void must(const struct rank *k, ncclResult_t result, const char *what)
{
	if (result == ncclSuccess) return;
	const char *why = k->l->ncclGetLastError ? k->l->ncclGetLastError(NULL) : NULL;
	fprintf(stderr, "%s, rank %d of %d: %s: %s%s%s\n", k->l->name, k->rank, k->g->nranks, what, k->l->ncclGetErrorString(result), why && *why ? ": " : "",
		why ? why : "");
	look_close();
	_Exit(1);
}

static size_t free_bytes(void)
{
	size_t free_, total;
	CUDA(MemGetInfo(&free_, &total));
	return free_;
}

static void open_device(struct rank *k)
{
	struct group *g = k->g;
	double start = now_us();
	CUDA(DevicePrimaryCtxRetain(&k->context, k->rank % g->ndevices));
	CUDA(CtxSetCurrent(k->context));
	CUDA(StreamCreate(&k->stream, CU_STREAM_NON_BLOCKING));
	CUDA(EventCreate(&k->begin, CU_EVENT_DEFAULT));
	CUDA(EventCreate(&k->end, CU_EVENT_DEFAULT));
	CUDA(EventCreate(&k->fork, CU_EVENT_DISABLE_TIMING));
	g->lives[k->rank].cuda_ms = (now_us() - start) / 1e3;
	if (k->rank) return;
	CUDA(DeviceGetName(g->device_name, sizeof(g->device_name), 0));
	CUDA(DeviceGetAttribute(&g->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
}

/* Ranks of this one's device share what all of them took. */
static int64_t share_of(const struct rank *k, size_t before)
{
	int sharers = 0;
	for (int p = 0; p < k->g->nranks; p++) sharers += p % k->g->ndevices == k->rank % k->g->ndevices;
	return ((int64_t)before - (int64_t)free_bytes()) / sharers;
}

static void destroy(struct rank *k, int i)
{
	CUDA(StreamSynchronize(k->stream));
	meet(k);
	double start = now_us();
	MUST(k->l->ncclCommDestroy(k->comm));
	k->g->lives[k->rank].destroy_ms[i] = (now_us() - start) / 1e3;
	meet(k);
}

/* As the library tells kinds of machines apart (exec/cuda/table.c). */
static void find_join(struct rank *k)
{
	struct group *g = k->g;
	char *text = NULL;
	size_t bytes = 0;
	bool nvlink = false;
	if (k->l->telpher_comm_paths && k->l->telpher_comm_paths(k->comm, -1, NULL, &bytes) == ncclSuccess && (text = malloc(bytes)) &&
		k->l->telpher_comm_paths(k->comm, -1, text, &bytes) == ncclSuccess) {
		nvlink = strstr(text, "\"type\":\"NV");
		for (const char *at = text; (at = strstr(at, "\"type\":\"")); at += 8) nvlink = nvlink && strncmp(at + 8, "NV", 2) == 0;
	}
	g->net = text && strstr(text, "\"via\":\"NET");
	free(text);
	strcpy(g->join, g->ndevices < g->nranks ? "shared" : nvlink ? "nvlink" : "pcie");
}

static void open_comm(struct rank *k, int i)
{
	struct group *g = k->g;
	struct rank_lives *lives = &g->lives[k->rank];
	if (k->rank == 0) {
		MUST(k->l->ncclGetVersion(&g->version));
		MUST(k->l->ncclGetUniqueId(&g->id));
	}
	meet(k);
	size_t before = free_bytes();
	meet(k);
	double start = now_us();
	MUST(k->l->ncclCommInitRank(&k->comm, g->nranks, g->id, k->rank));
	lives->init_ms[i] = (now_us() - start) / 1e3;
	meet(k);
	lives->bytes = share_of(k, before);
	if (k->rank == 0) find_join(k);
	if (i == 0) lives->first_bytes = lives->bytes;
	meet(k);
}

static bool take(struct rank *k, int i, size_t bytes, CUdeviceptr *out)
{
	void *ptr = NULL;
	if (k->l->ncclMemAlloc(&ptr, bytes) != ncclSuccess) return false;
	*out = (CUdeviceptr)(uintptr_t)ptr;
	if (!k->g->buffers && k->l->ncclCommWindowRegister &&
		k->l->ncclCommWindowRegister(k->comm, ptr, bytes, &k->windows[i], NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess) return true;
	return k->l->ncclCommRegister(k->comm, ptr, bytes, &k->handles[i]) == ncclSuccess;
}

static void open_buffers(struct rank *k)
{
	struct group *g = k->g;
	k->room = g->most_bytes + (g->most_bytes < COLD_BYTES ? COLD_BYTES : 0);
	if (getenv("BENCH_GPU_TINY")) k->room = 2 * g->most_bytes;
	CUDA(MemAlloc(&k->plain.in, k->room));
	CUDA(MemAlloc(&k->plain.out, k->room));
	meet(k);
	if (g->registers && k->l->ncclMemAlloc && k->l->ncclCommRegister && take(k, 0, k->room, &k->registered.in) && take(k, 1, k->room, &k->registered.out)) return;
	k->registered = (struct buffers){ 0, 0 };
}

static void close_rank(struct rank *k)
{
	CUDA(StreamSynchronize(k->stream));
	meet(k);
	for (int i = 0; i < 2; i++) {
		if (k->windows[i]) k->l->ncclCommWindowDeregister(k->comm, k->windows[i]);
		if (k->handles[i]) k->l->ncclCommDeregister(k->comm, k->handles[i]);
	}
	destroy(k, k->g->inits - 1);
	CUDA(MemFree(k->plain.in));
	CUDA(MemFree(k->plain.out));
	if (k->registered.in) k->l->ncclMemFree((void *)(uintptr_t)k->registered.in);
	if (k->registered.out) k->l->ncclMemFree((void *)(uintptr_t)k->registered.out);
}

void rank_run(struct group *g, int rank)
{
	struct rank rank_ = { .g = g, .l = &g->library, .rank = rank }, *k = &rank_;
	here[rank] = k;
	open_device(k);
	for (int i = 0; i < g->inits; i++) {
		if (i) destroy(k, i - 1);
		open_comm(k, i);
	}
	open_buffers(k);
	meet(k);
	for (uint32_t order = 0;; order++) {
		word_raise(&g->ended);
		word_wait(&g->order, order);
		if (g->quit) break;
		measure(k);
	}
	close_rank(k);
	word_raise(&g->ended);
}
