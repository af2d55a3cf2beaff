#ifndef TESTS_CUDA_KERNELS_TEST_H
#define TESTS_CUDA_KERNELS_TEST_H

#include <stdint.h>

struct test_args { uint64_t memory; uint32_t count, value; };

#endif
