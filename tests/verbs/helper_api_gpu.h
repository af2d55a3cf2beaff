/* Device memory for tests of the card: of the driver without a GPU (tests/cuda), whose device memory kills who touches it, or of the
 * one that TELPHER_CUDA_LIBRARY names. */
#ifndef TP_TESTS_VERBS_HELPER_API_GPU_H
#define TP_TESTS_VERBS_HELPER_API_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "gpu/driver.h"

#define GPU_MEMBER(name, symbol, parameters) CUresult (*name) parameters;
struct gpu_table { TP_CUDA_FUNCTIONS(GPU_MEMBER, GPU_MEMBER) };
extern struct gpu_table gpu;

bool gpu_is_fake(void);
void gpu_start(void);                           /* loads and starts the driver, device 0's primary context current; ends the program where that fails */
int gpu_devices(void);
CUcontext gpu_primary(int device);
uint8_t *gpu_alloc(int device, size_t bytes);
void gpu_free(uint8_t *ptr);
/* Two blocks of GPU_BLOCK bytes, of two devices if other isn't the first one, mapped side by side. */
#define GPU_BLOCK ((size_t)2 << 20)
uint8_t *gpu_map_two(int device, int other);
void gpu_unmap_two(uint8_t *ptr);
void gpu_put(uint8_t *to, const void *from, size_t bytes);
void gpu_get(void *to, const uint8_t *from, size_t bytes);
void gpu_set(uint8_t *to, uint8_t value, size_t bytes);

#endif
