/* Values: a block of rank r for rank s is full of one small number; its first and last elements differ from place to place, so that
 * what is shifted, cut or swapped shows. Sums of them stay exact in every type that is measured. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

const char *const coll_names[NCOLLS] = { "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter",
	"send_recv" };

enum { EDGE = 1024, ROOT = 0 };

static size_t element_bytes(ncclDataType_t type) { return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1; }
static bool many_in(enum coll c) { return c == REDUCE_SCATTER || c == ALL_TO_ALL || c == SCATTER; }
static bool many_out(enum coll c) { return c == ALL_GATHER || c == ALL_TO_ALL || c == GATHER; }

size_t coll_count(enum coll c, size_t bytes, int nranks, size_t element)
{
	size_t count = bytes / element;
	if (many_in(c) || many_out(c)) count /= (size_t)nranks;
	return count ? count : 1;
}

size_t coll_in_bytes(enum coll c, size_t block, int nranks) { return block * (many_in(c) ? (size_t)nranks : 1); }
size_t coll_out_bytes(enum coll c, size_t block, int nranks) { return block * (many_out(c) ? (size_t)nranks : 1); }

double coll_bus_factor(enum coll c, int nranks)
{
	double n = nranks;
	if (c == ALL_REDUCE) return 2 * (n - 1) / n;
	return many_in(c) || many_out(c) ? (n - 1) / n : 1;
}

bool coll_exists(const struct library *l, enum coll c)
{
	return (c != ALL_TO_ALL || l->ncclAlltoAll) && (c != GATHER || l->ncclGather) && (c != SCATTER || l->ncclScatter);
}

static ncclResult_t send_recv(const struct library *l, const void *in, void *out, size_t count, ncclDataType_t type, int nranks, int rank,
	ncclComm_t comm, cudaStream_t stream)
{
	ncclResult_t result = l->ncclGroupStart();
	if (result == ncclSuccess) result = l->ncclSend(in, count, type, (rank + 1) % nranks, comm, stream);
	if (result == ncclSuccess) result = l->ncclRecv(out, count, type, (rank + nranks - 1) % nranks, comm, stream);
	ncclResult_t ended = l->ncclGroupEnd();
	return result == ncclSuccess ? ended : result;
}

ncclResult_t coll_call(const struct library *l, enum coll c, const struct buffers *b, size_t count, ncclDataType_t type, int nranks, int rank,
	ncclComm_t comm, CUstream cu_stream)
{
	const void *in = (const void *)(uintptr_t)b->in;
	void *out = (void *)(uintptr_t)b->out;
	cudaStream_t stream = (cudaStream_t)cu_stream;
	switch (c) {
	case ALL_REDUCE: return l->ncclAllReduce(in, out, count, type, ncclSum, comm, stream);
	case ALL_GATHER: return l->ncclAllGather(in, out, count, type, comm, stream);
	case REDUCE_SCATTER: return l->ncclReduceScatter(in, out, count, type, ncclSum, comm, stream);
	case BROADCAST: return l->ncclBroadcast(in, out, count, type, ROOT, comm, stream);
	case REDUCE: return l->ncclReduce(in, out, count, type, ncclSum, ROOT, comm, stream);
	case ALL_TO_ALL: return l->ncclAlltoAll(in, out, count, type, comm, stream);
	case GATHER: return l->ncclGather(in, out, count, type, ROOT, comm, stream);
	case SCATTER: return l->ncclScatter(in, out, count, type, ROOT, comm, stream);
	default: return send_recv(l, in, out, count, type, nranks, rank, comm, stream);
	}
}

/* ---- values ---- */

static void encode(ncclDataType_t type, int value, unsigned char *to)
{
	float f = (float)value;
	uint32_t bits;
	memcpy(&bits, &f, 4);
	if (type == ncclFloat32) memcpy(to, &bits, 4);
	else if (type == ncclBfloat16) memcpy(to, &(uint16_t){ (uint16_t)(bits >> 16) }, 2);
	else *to = (unsigned char)value;
}

static int plain(int from, int to) { return 1 + (from + to) % 2; }
/* Element i of what `from` has for `to`. */
static int given(int from, int to, size_t i, size_t count)
{
	if (i < EDGE && i < count) return plain(from, to) + (int)(i % 2);
	if (count > EDGE && i >= count - EDGE) return plain(from, to) + (int)((count - i) % 3 == 0);
	return plain(from, to);
}

static int wanted(enum coll c, int block, size_t i, size_t count, int nranks, int rank)
{
	int sum = 0;
	switch (c) {
	case ALL_GATHER: case GATHER: return given(block, 0, i, count);
	case BROADCAST: return given(ROOT, 0, i, count);
	case ALL_TO_ALL: return given(block, rank, i, count);
	case SCATTER: return given(ROOT, rank, i, count);
	case SEND_RECV: return given((rank + nranks - 1) % nranks, 0, i, count);
	default:
		for (int p = 0; p < nranks; p++) sum += given(p, c == REDUCE_SCATTER ? rank : 0, i, count);
		return sum;
	}
}

static void fill_block(CUdeviceptr at, size_t count, ncclDataType_t type, int from, int to)
{
	static _Thread_local _Alignas(4) unsigned char edge[EDGE * 4];
	size_t each = element_bytes(type), part = count < EDGE ? count : EDGE;
	unsigned char one[4] = { 0 };
	encode(type, plain(from, to), one);
	for (size_t i = 0; i < part; i++) memcpy(edge + i * each, one, each);
	if (at % 4 == 0) CUDA(MemsetD32Async(at, *(const uint32_t *)edge, count * each / 4, NULL));
	else
		for (size_t i = 0; i < count; i += EDGE) CUDA(MemcpyHtoD(at + i * each, edge, (count - i < EDGE ? count - i : EDGE) * each));
	CUDA(CtxSynchronize());
	for (size_t i = 0; i < part; i++) encode(type, given(from, to, i, count), edge + i * each);
	CUDA(MemcpyHtoD(at, edge, part * each));
	if (count <= EDGE) return;
	size_t first = count - EDGE < EDGE ? EDGE : count - EDGE;
	for (size_t i = first; i < count; i++) encode(type, given(from, to, i, count), edge + (i - first) * each);
	CUDA(MemcpyHtoD(at + first * each, edge, (count - first) * each));
}

void coll_fill(enum coll c, const struct buffers *b, size_t count, ncclDataType_t type, int nranks, int rank)
{
	size_t block = count * element_bytes(type);
	for (int k = 0; k < (many_in(c) ? nranks : 1); k++) fill_block(b->in + (size_t)k * block, count, type, rank, many_in(c) ? k : 0);
	CUDA(MemsetD8(b->out, 0xee, coll_out_bytes(c, block, nranks)));
	CUDA(CtxSynchronize());
}

static bool check_part(enum coll c, CUdeviceptr at, int block, size_t first, size_t part, size_t count, ncclDataType_t type, int nranks, int rank)
{
	static _Thread_local unsigned char got[EDGE * 4];
	size_t each = element_bytes(type);
	unsigned char want[4];
	CUDA(MemcpyDtoH(got, at + first * each, part * each));
	for (size_t i = 0; i < part; i++) {
		encode(type, wanted(c, block, first + i, count, nranks, rank), want);
		if (!memcmp(want, got + i * each, each)) continue;
		fprintf(stderr, "rank %d of %d: %s of %zu elements: element %zu of block %d is wrong\n", rank, nranks, coll_names[c], count, first + i, block);
		return false;
	}
	return true;
}

bool coll_check(enum coll c, const struct buffers *b, size_t count, ncclDataType_t type, int nranks, int rank)
{
	if ((c == REDUCE || c == GATHER) && rank != ROOT) return true;
	size_t block = count * element_bytes(type), part = count < EDGE ? count : EDGE;
	for (int k = 0; k < (many_out(c) ? nranks : 1); k++) {
		CUdeviceptr at = b->out + (size_t)k * block;
		/* Both ends, and places in between. */
		for (int i = 0; i <= 16; i++)
			if (!check_part(c, at, k, (count - part) / 16 * (size_t)i + (i == 16 ? (count - part) % 16 : 0), part, count, type, nranks, rank)) return false;
	}
	return true;
}
