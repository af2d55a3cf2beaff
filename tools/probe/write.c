/* `telpher probe write`, also installed as `rdma_write`: its options. */
#include "probe/write.h"

#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(struct probe_write_options *o, const char *size, const char *op)
{
	if (size && (!tool_parse_size(size, &o->bytes) || o->bytes < 1 || o->bytes > PROBE_MAX_BYTES))
		return probe_usage("-s %s: no size; say 8, 64K, 256M or 4G, up to 64T", size);
	for (o->op = PROBE_WRITE; op && strcmp(op, probe_op_name((int)o->op)); o->op++)
		if (o->op + 1 == PROBE_OPS) return probe_usage("--op %s: there are write, read and send", op);
	if (o->gid < -1 || o->gid > 255) return probe_usage("-g %d: a GID's index is from 0 to 255", o->gid);
	if (o->port < 1 || o->port > 65535) return probe_usage("--port %d: from 1 to 65535", o->port);
	if (o->nqps < 1 || o->nqps > PROBE_MAX_QPS) return probe_usage("--qps %d: from 1 to %d", o->nqps, PROBE_MAX_QPS);
	if (o->iterations != PROBE_UNSET && (o->iterations < 1 || o->iterations > 1000000)) return probe_usage("--iterations %d: from 1 to 1000000", o->iterations);
	if (o->gpu < 0 && o->gpu != PROBE_UNSET) return probe_usage("--gpu %d: GPUs are numbered from 0", o->gpu);
	if (o->dma_buf && o->gpu < 0) return probe_usage("--dmabuf is for GPU memory: --gpu N says which");
	if (o->svg && !o->sweep) return probe_usage("--svg draws a sweep: --sweep makes one");
	if (o->sweep && o->bytes < 2 * PROBE_SWEEP_FIRST) return probe_usage("--sweep goes from %d bytes to -s: it must be larger", PROBE_SWEEP_FIRST);
	if (o->server) return 0;
	/* What the client decides for both. */
	if (o->sweep || op || o->both_ways || o->nqps > 1 || o->iterations != PROBE_UNSET)
		return probe_usage("--sweep, --op, --bidirectional, --qps and --iterations are the client's to say: name the SERVER");
	return 0;
}

int probe_write(int argc, char **argv)
{
	char *device = NULL, *size = NULL, *op = NULL, *svg = NULL;
	int both = 0, dma_buf = 0, sweep = 0, json = 0, status;
	struct probe_write_options o = { .gid = -1, .port = PROBE_PORT, .nqps = 1, .gpu = PROBE_UNSET, .iterations = PROBE_UNSET, .bytes = PROBE_DEFAULT_BYTES };
	struct poptOption options[] = {
		{ "device", 'd', POPT_ARG_STRING, &device, 0, "RDMA device, mlx5_0 or mlx5_0:2 with its port; telpher0: the software card (the first that can be used)", "DEV" },
		{ "gid", 'g', POPT_ARG_INT, &o.gid, 0, "index of the port's GID (chosen: RoCE v2, an address that leads beyond the link)", "GID" },
		{ "size", 's', POPT_ARG_STRING, &size, 0, "bytes to move; the server's: most that it has room for (256M)", "BYTES" },
		{ "op", 0, POPT_ARG_STRING, &op, 0, "write, read or send (write)", "OP" },
		{ "qps", 'q', POPT_ARG_INT, &o.nqps, 0, "queue pairs that share the bytes (1)", "N" },
		{ "bidirectional", 'b', POPT_ARG_NONE, &both, 0, "both ways at once", NULL },
		{ "gpu", 0, POPT_ARG_INT, &o.gpu, 0, "memory of this GPU, on this side", "N" },
		{ "dmabuf", 0, POPT_ARG_NONE, &dma_buf, 0, "register it as DMA-BUF, not through nvidia-peermem", NULL },
		{ "sweep", 0, POPT_ARG_NONE, &sweep, 0, "every size from 8 bytes to -s: latency, bandwidth, alpha, beta and S*", NULL },
		{ "iterations", 'n', POPT_ARG_INT, &o.iterations, 0, "of a sweep: messages a size (by size)", "N" },
		{ "svg", 0, POPT_ARG_STRING, &svg, 0, "draw the sweep", "FILE" },
		{ "json", 0, POPT_ARG_NONE, &json, 0, "print JSON", NULL },
		{ "port", 'p', POPT_ARG_INT, &o.port, 0, "TCP port of the exchange (18515)", "PORT" },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	poptSetOtherOptionHelp(context, "[OPTIONS] [SERVER]\n\nWithout SERVER: waits for a client.");
	int code = tool_next_option(context, options);
	o.server = poptGetArg(context);
	o.device = device;
	o.svg = svg;
	o.both_ways = both;
	o.dma_buf = dma_buf;
	o.sweep = sweep;
	o.json = json;
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("one SERVER, not \"%s\" too", poptPeekArg(context));
	else status = check(&o, size, op);
	if (!status) status = o.server ? probe_client(&o) : probe_server(&o);
	free(device);
	free(size);
	free(op);
	free(svg);
	poptFreeContext(context);
	return status;
}
