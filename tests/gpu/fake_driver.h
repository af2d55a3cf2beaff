/* Tests that need GPUs run on the driver of tests/cuda, or on the one that TELPHER_CUDA_LIBRARY names. */
#ifndef TESTS_GPU_FAKE_DRIVER_H
#define TESTS_GPU_FAKE_DRIVER_H

#include <stdlib.h>
#include "base/base.h"

/* Before the first use of CUDA. devices: how many the fake one has. */
static inline void use_fake_driver(int devices)
{
	char text[16];
	snprintf(text, sizeof(text), "%d", devices);
	setenv("TELPHER_CUDA_LIBRARY", FAKE_CUDA_LIBRARY, 0);
	setenv("FAKE_CUDA_DEVICES", text, 1);
	tp_param_reload();
}

#endif
