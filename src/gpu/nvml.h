/* NVML, opened at run time at first use: what a device is, and how the machine's devices are joined. Without it nothing is known, and nothing
 * fails. A question to it takes a millisecond in a virtual machine, and a device has many links; so each device is asked once a process. */
#ifndef TP_GPU_NVML_H
#define TP_GPU_NVML_H

#include "gpu/gpu.h"

struct tp_nvml_link { int count; bool to_switch, to_cpu; char target[20]; };    /* target: a bus id, "" for switches */
struct tp_nvml_device {
	int index, sm;                      /* -1: NVML doesn't say */
	struct tp_nvml_link links[32];
	int nlinks;
	int c2c_count, c2c_mbps;
	char domain[48];                    /* NVLink domain across hosts; "" where there is none */
};
/* For good. NULL: NVML isn't there, or doesn't know the device. */
const struct tp_nvml_device *tp_nvml_find(const char *bus_id);

/* True only where NVML says that one of the devices can't read or write the other. */
bool tp_nvml_forbids_peer(const char *bus_id, const char *peer_bus_id);
enum tp_gpu_distance tp_nvml_distance(const char *bus_id, const char *peer_bus_id);
void tp_nvml_path(const char *bus_id, const char *peer_bus_id, char *text, size_t bytes);

#endif
