/* The kernels for any processor: 16-byte vectors of the baseline (SSE2, NEON), or whatever the compiler makes of them. */
#define TP_WIDE 16
#define TP_HALF_W 0
#define TP_TABLE tp_reduce_kernels_scalar
#include "exec/host/reduce_kernels.h"
