/* Inside the host executor: the reduction's kernels, one table per instruction set, and the way in that names the set. */
#ifndef TP_EXEC_HOST_REDUCE_H
#define TP_EXEC_HOST_REDUCE_H

#include "exec/exec.h"

/* How a sum is scaled. raw_mask: sources to multiply by pre; every result is multiplied by post (1 where there is none).
 * Integers use pre_integer; their division comes after the kernel. */
struct tp_reduce_scale {
	uint64_t raw_mask, pre_integer;
	double pre, post;
};

/* The sets that are wider than the scalar one are given no buffer smaller than this. */
#define TP_REDUCE_WIDE_LEAST 64

/* bytes is a multiple of the element, not 0; nsrc >= 1. scale is read by `scaled` kernels only. */
typedef void tp_reduce_kernel(char *dst, const void *const *src, int nsrc, size_t bytes, const struct tp_reduce_scale *scale);

/* Divides integers in place, towards zero; divisor > 0. */
typedef void tp_reduce_divider(char *at, size_t bytes, int64_t divisor);

/* plain[type][op] for Sum, Prod, Max, Min; scaled[type] is a sum; divide[type] for integers. */
struct tp_reduce_kernels {
	tp_reduce_kernel *plain[ncclNumTypes][4];
	tp_reduce_kernel *scaled[ncclNumTypes];
	tp_reduce_divider *divide[ncclNumTypes];
};

extern const struct tp_reduce_kernels tp_reduce_kernels_scalar;
#if defined(__x86_64__)
extern const struct tp_reduce_kernels tp_reduce_kernels_avx2, tp_reduce_kernels_avx512;
#endif

/* The best set that the processor has, at most isa. */
enum tp_isa tp_reduce_usable_isa(enum tp_isa isa);
/* tp_reduce_run with the kernels of a usable set. */
void tp_reduce_run_isa(enum tp_isa isa, const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc,
	uint64_t raw_mask, size_t bytes);

#endif
