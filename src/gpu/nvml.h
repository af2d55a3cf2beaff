/* NVML, opened at run time at first use: how the machine's devices are joined. Without it nothing is known, and nothing fails. */
#ifndef TP_GPU_NVML_H
#define TP_GPU_NVML_H

#include "gpu/gpu.h"

/* True only where NVML says that one of the devices can't read or write the other. */
bool tp_nvml_forbids_peer(const char *bus_id, const char *peer_bus_id);
enum tp_gpu_distance tp_nvml_distance(const char *bus_id, const char *peer_bus_id);
void tp_nvml_path(const char *bus_id, const char *peer_bus_id, char *text, size_t bytes);

#endif
