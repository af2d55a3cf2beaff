/* TCP over loopback, between two processes: what the stack and its copies take of a core. */
#ifndef TELPHER_PROBE_TCP_H
#define TELPHER_PROBE_TCP_H

#include <stddef.h>

#include "gpu/gpu.h"

struct probe_tcp {
	double gbs, latency_us;                 /* one way */
	double cpu_ns_per_byte;                 /* of both ends together */
	double core_gbs;                        /* what a core that did nothing else would drive: by the CPU time of the busier end */
};
/* Data that lies in `from` (gpu's memory, or the host's) goes by a stage to the socket, and by another stage to where it shall be. */
int probe_tcp_run(const struct tp_gpu *gpu, const void *from, size_t bytes, int rounds, struct probe_tcp *out);
/* CPU time of this process so far, of all its threads. */
double probe_cpu_ns(void);

#endif
