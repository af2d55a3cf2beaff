/* Up to which sizes each kind of kernel moves each collective: what was measured, by kind of machine, and what the user says instead. */
#include <stdlib.h>
#include <string.h>

#include "exec/cuda/internal.h"

enum { KB = 1 << 10, MB = 1 << 20, GB = 1 << 30 };
#define NEVER UINT64_MAX

void tp_fused_defaults(bool shared_gpu, int nranks, struct tp_fused_table *out)
{
	*out = (struct tp_fused_table){
		/* NVLink; without it lines of 128 bytes aren't allowed, and the first column alone counts. Two ranks send in one shot as much as
		 * in two; with more, two shots soon send less. Pipes where they were measured to be better: two ranks; all-reduce beyond what lines do. */
		.limits = {
			[TP_FUSED_ONE_SHOT] = { 96 * KB, nranks == 2 ? 8 * MB : 1 * MB, NEVER },
			[TP_FUSED_TWO_SHOT] = { 96 * KB, GB, nranks == 2 ? GB / 2 + 1 : NEVER },
			[TP_FUSED_GATHER] = { 96 * KB, GB, nranks == 2 ? 16 * MB : NEVER },
			[TP_FUSED_SCATTER] = { 96 * KB, GB, nranks == 2 ? 32 * MB : NEVER },
			[TP_FUSED_PAIRS] = { 96 * KB, GB, nranks == 2 ? 16 * MB : NEVER },
			[TP_FUSED_ROOTED] = { 96 * KB, 16 * MB, nranks == 2 ? 8 * MB : NEVER },
			[TP_FUSED_OWNERS] = { 0, GB, NEVER },
		},
		.threads = { 128, 256 },
		.max_blocks = TP_DEV_MAX_CHANNELS,
		.allows_128 = 1,
		.window = 1 * MB,
		/* Two ranks, measured: copies carry 320 GB/s, pipes 330, so copies are for what is so large that this hardly counts, and leave the
		 * multiprocessors free; a broadcast they carry at 300. With more, predicted: two kernels and the first copy take 12 us, and a further
		 * copy's start 2; then a link carries 392 GB/s, where lines were measured to need 7 us and 3.4 us a MB with four ranks. A broadcast to
		 * several sends its bytes twice less a slice, which the lines' two steps beat at all sizes. */
		.copies = nranks == 2 ? 256 * MB : 16 * MB,
		.copies_rooted = NEVER,
		.owners = 512 * KB,
		.stream = 16 * KB,
		/* Measured with two GPUs; with more it is the same link, one way and peer by peer. */
		.transfers = nranks <= TP_PIPE_RANKS ? 12 * MB : NEVER,
		.reduce = nranks == 2 ? 16 * MB : NEVER,
		.offer = 4 * MB,
		.pipes = 1,
	};
	if (!shared_gpu) return;
	out->pipes = 0;
	out->copies = out->copies_rooted = NEVER;
	/* On one GPU nothing crosses a wire: LL's second half costs memory bandwidth only, of which there is plenty. Measured with two and four
	 * ranks: beyond, lines of 128 bytes are as good as steps between two, twice as good between four, and worse where all is reduced. */
	for (int c = 0; c < TP_FUSED_CLASSES; c++) out->limits[c] = (struct tp_fused_limit){ 4 * MB, GB, NEVER };
	out->limits[TP_FUSED_ONE_SHOT] = (struct tp_fused_limit){ 4 * MB, 4 * MB, NEVER };
	out->limits[TP_FUSED_TWO_SHOT] = (struct tp_fused_limit){ 4 * MB, 8 * MB, NEVER };
	out->limits[TP_FUSED_ROOTED] = (struct tp_fused_limit){ 1 * MB, 16 * MB, NEVER };
	out->limits[TP_FUSED_OWNERS] = (struct tp_fused_limit){ 0, 16 * MB, NEVER };
	out->stream = 1 * MB;
}

enum tp_cuda_pipes tp_fused_table_pipes(const struct tp_fused_table *t)
{
	const struct tp_fused_limit *l = t->limits;
	if (!t->pipes) return TP_CUDA_PIPES_NONE;
	if (t->reduce != NEVER || l[TP_FUSED_TWO_SHOT].pipes != NEVER || l[TP_FUSED_SCATTER].pipes != NEVER || l[TP_FUSED_OWNERS].pipes != NEVER)
		return TP_CUDA_PIPES_ALL;
	if (l[TP_FUSED_GATHER].pipes != NEVER || l[TP_FUSED_PAIRS].pipes != NEVER || l[TP_FUSED_ROOTED].pipes != NEVER) return TP_CUDA_PIPES_MOVE;
	return t->transfers != NEVER ? TP_CUDA_PIPES_TRANSFER : TP_CUDA_PIPES_NONE;
}

/* ---- what the user says ---- */

static struct tp_param params[] = {
	{ .name = "TELPHER_CUDA_TABLE", .kind = TP_PARAM_STRING,
		.doc = "GPUs: up to which sizes which kernels move what, over what is built in: NAME=LL:LL128 or NAME=LL:LL128:PIPES (bytes that a rank sends, up to "
			"which these lines and from which on pipes are used; one_shot, two_shot, gather, scatter, pairs, rooted, two_step), NAME=BYTES (from which on: "
			"window, two_step_from, stream, copies, copies_rooted: by copy engines, reduce, transfers: through pipes, offer: registered buffers), pipes=0, 1 or 2 (never, over NVLink from compute capability 9.0 on, always), "
			"threads=LL:LL128 (of a block), with commas between; rank 0's counts" },
};
TP_PARAM_TABLE("exec", params)

static const char *const class_names[TP_FUSED_CLASSES] = { [TP_FUSED_ONE_SHOT] = "one_shot", [TP_FUSED_TWO_SHOT] = "two_shot",
	[TP_FUSED_GATHER] = "gather", [TP_FUSED_SCATTER] = "scatter", [TP_FUSED_PAIRS] = "pairs", [TP_FUSED_ROOTED] = "rooted", [TP_FUSED_OWNERS] = "two_step" };

/* Digits, then K, M or G. */
static bool read_bytes(const char **at, uint64_t *out)
{
	char *end;
	if (**at < '0' || **at > '9') return false;
	uint64_t v = strtoull(*at, &end, 10), unit = *end == 'K' ? KB : *end == 'M' ? MB : *end == 'G' ? GB : 1;
	if (v > UINT64_MAX / unit) return false;
	*at = end + (unit > 1);
	*out = v * unit;
	return true;
}

static bool read_entry(const char **at, struct tp_fused_table *table)
{
	struct { const char *name; uint64_t *first, *second, *third; } entries[TP_FUSED_CLASSES + 9] = { { .name = "window", .first = &table->window },
		{ .name = "two_step_from", .first = &table->owners }, { .name = "stream", .first = &table->stream },
		{ .name = "reduce", .first = &table->reduce }, { .name = "offer", .first = &table->offer }, { .name = "pipes", .first = &table->pipes },
		{ .name = "copies", .first = &table->copies }, { .name = "copies_rooted", .first = &table->copies_rooted },
		{ .name = "transfers", .first = &table->transfers } };
	for (int c = 0; c < TP_FUSED_CLASSES; c++) {
		entries[9 + c].name = class_names[c];
		entries[9 + c].first = &table->limits[c].ll;
		entries[9 + c].second = &table->limits[c].ll128;
		entries[9 + c].third = &table->limits[c].pipes;
	}
	if (strncmp(*at, "threads=", 8) == 0) {
		uint64_t threads[2];
		*at += 8;
		if (!read_bytes(at, &threads[0]) || *(*at)++ != ':' || !read_bytes(at, &threads[1])) return false;
		for (int p = 0; p < 2; p++) {
			if (threads[p] < 32 || threads[p] > TP_DEV_THREADS) return false;
			table->threads[p] = (uint32_t)threads[p] / 32 * 32;
		}
		return true;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(entries); i++) {
		size_t n = strlen(entries[i].name);
		if (strncmp(*at, entries[i].name, n) != 0 || (*at)[n] != '=') continue;
		*at += n + 1;
		if (!read_bytes(at, entries[i].first)) return false;
		if (!entries[i].second) return true;
		if (*(*at)++ != ':' || !read_bytes(at, entries[i].second)) return false;
		if (**at != ':') return true;
		++*at;
		return read_bytes(at, entries[i].third);
	}
	return false;
}

ncclResult_t tp_fused_read_table(struct tp_fused_table *table)
{
	const char *text = tp_param_string(&params[0]), *at = text;
	struct tp_fused_table t = *table;
	if (!text || !*text) return ncclSuccess;
	for (;;) {
		const char *entry = at;
		if (!read_entry(&at, &t) || (*at && *at != ','))
			return TP_FAIL(ncclInvalidUsage, "TELPHER_CUDA_TABLE: '%s' can't be read at '%s': wanted is NAME=LL:LL128 or NAME=LL:LL128:PIPES (one_shot, two_shot, "
				"gather, scatter, pairs, rooted, two_step), NAME=BYTES (window, two_step_from, stream, copies, copies_rooted, reduce, transfers, offer), pipes=0, 1 or 2, or threads=LL:LL128, with commas "
				"between", text, entry);
		if (!*at) break;
		at++;
	}
	*table = t;
	return ncclSuccess;
}
