/* The port that a probe uses: found, opened and judged by the transport's own code (net/ib), so that the probe refuses what the
 * transport would refuse, in the same words. */
#ifndef TELPHER_PROBE_PORT_H
#define TELPHER_PROBE_PORT_H

#include "net/ib/ib.h"
#include "probe/probe.h"
#include "probe/wire.h"

struct probe_port {
	struct tp_ib_port *ib;                  /* stays open for the life of the process */
	const struct tp_verbs *verbs;
	struct tp_ib_gid_choice gid;
	struct tp_ib_params params;             /* NCCL_IB_TC, _SL, _PKEY, … mean the same here */
	bool ethernet;
};

/* device: "mlx5_0", "mlx5_0:2", or NULL: the first that is usable; gid_index -1: chosen as the transport does. */
int probe_open_port(const char *device, int gid_index, struct probe_port *out);
/* Another port of those that are open; index below tp_ib_port_count(). */
int probe_use_port(int index, struct probe_port *out);
/* "mlx5_0:1 (RoCE, GID 3 ::ffff:192.0.2.6 RoCE v2, 100 Gb/s)" */
const char *probe_port_text(const struct probe_port *port, char *text, size_t bytes);
/* May a packet get from here to what the peer describes? Fails with the reason. */
int probe_check_reach(const struct probe_port *port, const struct probe_hello *peer);
cJSON *probe_port_json(const struct probe_port *port);

#endif
