/* The plain reference of the reduction: one element at a time, doubles and integers, nothing shared with the kernels. */
#ifndef TP_TESTS_EXEC_HELPER_REDUCE_H
#define TP_TESTS_EXEC_HELPER_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include "exec/host/reduce.h"

/* A small generator with a seed, so that each run is the same. */
uint64_t reduce_draw(uint64_t *state);
size_t reduce_type_bytes(ncclDataType_t type);
/* The value behind the bits of a small float (or float, double). */
double reduce_decode(ncclDataType_t type, const void *element);
/* Rounded once, to nearest even; fp8 saturates; NaN is the type's canonical one. */
void reduce_encode(ncclDataType_t type, double value, void *element);
/* What tp_reduce_run promises, by the slow way. */
void reduce_reference(const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc, uint64_t raw_mask,
	size_t bytes);
/* Fills with values worth testing: special ones among random bits, or small ones that add up without surprise. */
void reduce_fill(ncclDataType_t type, void *to, size_t bytes, bool wild, uint64_t *state);

#endif
