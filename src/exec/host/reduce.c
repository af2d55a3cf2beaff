/* The arithmetic of the host executor: picks the kernel for a type, an operator and the processor, and scales.
 *
 * What an average is: float, double and bfloat16 are summed and then multiplied by 1/n. half and fp8 have too little
 * range for the sum, so every rank's contribution is multiplied by 1/n first (in float). Integers are summed and divided. */
#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#include "exec/host/reduce.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* A block that stays in the nearest cache between the sum and the division. */
enum { TP_DIVIDE_BLOCK_BYTES = 8192 };

#if defined(__x86_64__)
static bool has_f16c(void)
{
	unsigned a, b, c, d;
	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

enum tp_isa tp_reduce_usable_isa(enum tp_isa isa)
{
#if defined(__x86_64__)
	if (isa >= TP_ISA_AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
		__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
		return TP_ISA_AVX512;
	if (isa >= TP_ISA_AVX2 && __builtin_cpu_supports("avx2") && has_f16c())
		return TP_ISA_AVX2;
#else
	(void)isa;
#endif
	return TP_ISA_SCALAR;
}

static const struct tp_reduce_kernels *kernels_of(enum tp_isa isa)
{
#if defined(__x86_64__)
	switch (isa) {
	case TP_ISA_AVX512:
		return &tp_reduce_kernels_avx512;
	case TP_ISA_AVX2:
		return &tp_reduce_kernels_avx2;
	default:
		break;
	}
#else
	(void)isa;
#endif
	return &tp_reduce_kernels_scalar;
}

static bool is_integer(ncclDataType_t type)
{
	return type <= ncclUint64;
}

/* Sum and division block by block, while the sum is still in the cache. */
static void run_divided(tp_reduce_kernel *kernel, tp_reduce_divider *divide, const struct tp_reduce *r, char *dst, const void *const *src, int nsrc,
	size_t bytes, const struct tp_reduce_scale *scale)
{
	const void *from[64];
	if (nsrc > (int)TP_ARRAY_LEN(from)) {
		kernel(dst, src, nsrc, bytes, scale);
		divide(dst, bytes, r->post_divisor);
		return;
	}
	for (size_t at = 0, block; at < bytes; at += block) {
		/* what is too small for a kernel goes with the last block */
		block = bytes - at < TP_DIVIDE_BLOCK_BYTES + TP_REDUCE_WIDE_LEAST ? bytes - at : TP_DIVIDE_BLOCK_BYTES;
		for (int s = 0; s < nsrc; s++)
			from[s] = (const char *)src[s] + at;
		kernel(dst + at, from, nsrc, block, scale);
		divide(dst + at, block, r->post_divisor);
	}
}

void tp_reduce_run_isa(enum tp_isa isa, const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc,
	uint64_t raw_mask, size_t bytes)
{
	assert(nsrc >= 1 && (unsigned)r->type < ncclNumTypes && (unsigned)r->op <= ncclMin);
	if (bytes == 0)
		return;
	const bool pre = r->pre && raw_mask != 0, post = r->post && final;
	if (nsrc == 1 && !pre && !post) {
		if (dst != src[0])
			memcpy(dst, src[0], bytes);
		return;
	}
	const struct tp_reduce_kernels *kernels = kernels_of(bytes < TP_REDUCE_WIDE_LEAST ? TP_ISA_SCALAR : isa);
	if (!pre && !post) {
		kernels->plain[r->type][r->op](dst, src, nsrc, bytes, NULL);
		return;
	}
	assert(r->op == ncclSum);
	const bool divided = post && is_integer(r->type) && r->post_divisor > 1;
	const struct tp_reduce_scale scale = {
		.raw_mask = pre ? raw_mask : 0, .pre = r->pre_scale, .pre_integer = (uint64_t)r->pre_integer,
		.post = post && !is_integer(r->type) ? r->post_scale : 1,
	};
	if (divided)
		run_divided(pre ? kernels->scaled[r->type] : kernels->plain[r->type][ncclSum], kernels->divide[r->type], r, dst, src, nsrc,
			bytes, &scale);
	else
		kernels->scaled[r->type](dst, src, nsrc, bytes, &scale);
}

void tp_reduce_run(const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc, uint64_t raw_mask,
	size_t bytes)
{
	static _Atomic int chosen = -1;
	/* Relaxed: whoever comes first, all compute the same answer. */
	int isa = atomic_load_explicit(&chosen, memory_order_relaxed);
	if (isa < 0) {
		isa = (int)tp_reduce_usable_isa(tp_cpu_isa());
		atomic_store_explicit(&chosen, isa, memory_order_relaxed);
	}
	tp_reduce_run_isa((enum tp_isa)isa, r, final, dst, src, nsrc, raw_mask, bytes);
}

void tp_reduce_fill_avg(struct tp_reduce *r, int nranks)
{
	assert(nranks >= 1);
	r->op = ncclSum;
	r->pre = r->post = false;
	r->pre_scale = r->post_scale = 1;
	r->pre_integer = r->post_divisor = 1;
	if (nranks == 1)
		return;
	if (is_integer(r->type)) {
		r->post = true;
		r->post_divisor = nranks;
	} else if (r->type == ncclFloat16 || r->type == ncclFloat8e4m3 || r->type == ncclFloat8e5m2) {
		r->pre = true;
		r->pre_scale = 1.0 / nranks;
	} else {
		r->post = true;
		r->post_scale = 1.0 / nranks;
	}
}
