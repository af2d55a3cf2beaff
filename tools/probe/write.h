/* `telpher probe write`: what its options, its client and its server share. */
#ifndef TELPHER_PROBE_WRITE_H
#define TELPHER_PROBE_WRITE_H

#include "probe/job.h"
#include "probe/sweep.h"

#define PROBE_DEFAULT_BYTES ((size_t)256 << 20)

struct probe_write_options {
	const char *device, *server, *svg;      /* server NULL: this is it */
	int gid, port, nqps, gpu, iterations;
	enum probe_op op;
	size_t bytes;
	bool both_ways, dma_buf, sweep, json;
};

/* One end of a transfer, from its memory to its result. */
struct probe_end {
	const struct probe_write_options *options;
	const char *side;                       /* "client", "server" */
	struct probe_port port;
	const struct tp_gpu *gpu;               /* NULL: host memory */
	struct probe_memory memory;
	struct probe_link link;
	struct probe_peer peer;
	struct probe_hello mine;
	enum probe_op op;
	bool both_ways;
	struct probe_job job;
	struct probe_sweep sweep;
	bool ok;                                /* what came in was right */
	char verdict[160];                      /* "verify OK" */
};

/* What both do in the same way. */
int probe_end_open(struct probe_end *end, const struct probe_write_options *options, const char *side);
/* Memory, filled, and queue pairs in INIT, for this transfer. */
int probe_end_prepare(struct probe_end *end, enum probe_op op, bool both_ways, uint64_t bytes, int nqps, bool active);
int probe_end_connect(struct probe_end *end, const struct probe_hello *remote);
/* Old content away, receives posted: the block may come. */
int probe_end_expect(struct probe_end *end);
int probe_end_check(struct probe_end *end);     /* what came in */
int probe_end_tell_done(struct probe_end *end);
int probe_end_report(const struct probe_end *end, const struct probe_done *theirs);
void probe_end_close(struct probe_end *end);

int probe_client(const struct probe_write_options *options);
int probe_server(const struct probe_write_options *options);

#endif
