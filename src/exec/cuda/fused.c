/* Which calls run as fused kernels, as which, with how many blocks, and where in the region their lines lie.
 *
 * Everything here is a function of what all ranks agree on, so that no two ranks can run different kernels for one call. The
 * measure of a message is what a rank has to send (all peers and phases together): LL sends each byte twice but needs nothing
 * else, LL128 sends 1/15 more, at the cost of a warp that waits for all its lines; what is larger still, the steps move. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/cuda/fused.h"
#include "exec/cuda/internal.h"

enum {
	SHARE_BYTES = 16 << 20,             /* of all blocks together, where that gives each slot its least */
	SHARE_MOST = 512 << 10,
	LL_UNIT = 32, LL_ROW = 1024, LL128_UNIT = 128,
	MOST_BYTES = 1 << 30,               /* of a launch, over all ranks: kernels count units and offsets in 32 bits */
	PIECE_UNIT = 1920,                  /* whole lines, elements, and 128 bytes */
};

/* ---- the region ---- */

void tp_fused_lay_out(int nlocal, int nchannels, struct tp_fused_layout *out)
{
	uint32_t peers = (uint32_t)nlocal - 1, slots = TP_FUSED_PHASES * TP_FUSED_PARITIES * peers;
	uint32_t budget = (uint32_t)TP_MIN(SHARE_BYTES / nchannels, SHARE_MOST) - 4096;
	uint32_t ll = TP_MAX(budget / 4 / slots / LL_ROW, 1) * LL_ROW;
	uint32_t ll128 = TP_MAX((budget - budget / 4) / slots / LL128_UNIT, 1) * LL128_UNIT;
	uint32_t at = 0;
	*out = (struct tp_fused_layout){ .slot = { ll, ll128 } };
	out->heads = at;
	at += (uint32_t)tp_align_up((size_t)nlocal * TP_FUSED_PARITIES * 16, 128);
	out->gates = at;
	at += (uint32_t)tp_align_up((size_t)nlocal * sizeof(uint64_t), 128);
	out->lines[0] = at;
	at += slots * ll;
	out->lines[1] = at;
	at += slots * ll128;
	out->share = at;
}

size_t tp_fused_region_bytes(int nlocal, int nchannels)
{
	if (nlocal < 2) return 0;
	struct tp_fused_layout layout;
	tp_fused_lay_out(nlocal, nchannels, &layout);
	return (size_t)layout.share * (size_t)nchannels;
}

/* ---- agreement ---- */

/* What each rank says; usable where all say so. Of tables, rank 0's counts: that for its machine, if all ranks are on such, else that for any. */
struct word {
	uint32_t version, usable, allows_128, pad;
	struct tp_fused_machine machine;
	struct tp_fused_table table, any;
};
enum { WORD_VERSION = 5 };

static bool see_regions(struct tp_boot *boot, struct tp_links *links, struct tp_fused *f)
{
	if (boot->nhosts != 1 || boot->nlocal != boot->nranks) {
		snprintf(f->why_not, sizeof(f->why_not), "the ranks are on %d hosts", boot->nhosts);
		return false;
	}
	if (boot->nranks < 2 || boot->nranks > TP_DEV_MAX_LOCAL) {
		snprintf(f->why_not, sizeof(f->why_not), "%d ranks: fused kernels are for 2 to %d", boot->nranks, TP_DEV_MAX_LOCAL);
		return false;
	}
	for (int r = 0; r < boot->nranks; r++) {
		f->region[r] = (uint64_t)(uintptr_t)tp_links_region(links, r);
		if (f->region[r]) continue;
		snprintf(f->why_not, sizeof(f->why_not), "rank %d's region isn't mapped here", r);
		return false;
	}
	return true;
}

enum { PARAM_LL128 };
static struct tp_param params[] = {
	[PARAM_LL128] = { .name = "TELPHER_LL128", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "auto|on|off",
		.doc = "GPUs: lines of 128 bytes with flags in them; auto: where all pairs of GPUs are joined by NVLink, over which they land whole" },
};
TP_PARAM_TABLE("exec", params)

/* Does all that this rank exchanges go over NVLink? Ranks of one GPU are left out: on an H200 lines land whole there too, of others nobody knows. */
static bool is_nvlink(struct tp_boot *boot, struct tp_links *links)
{
	for (int r = 0; r < boot->nranks; r++) {
		struct tp_link_path path;
		if (r == boot->rank) continue;
		if (tp_links_path(links, boot->rank, r, &path) != ncclSuccess || strncmp(path.text, "NV", 2) != 0) return false;
	}
	return true;
}

static bool allows_128(bool nvlink)
{
	int64_t asked = tp_param_int(&params[PARAM_LL128]);
	return asked == 1 || (asked == 0 && nvlink);
}

static bool alike(const struct tp_fused_machine *a, const struct tp_fused_machine *b)
{ return strcmp(a->gpu, b->gpu) == 0 && a->major == b->major && a->minor == b->minor && a->nranks == b->nranks && a->join == b->join; }

static ncclResult_t make_table(const struct tp_fused_options *options, const struct tp_fused_machine *machine, struct tp_fused_table *out)
{
	tp_fused_defaults(machine, out);
	if (options->no_ctas) out->copies = out->copies_rooted = 0;
	TP_TRY(tp_fused_read_table(machine, out));
	out->max_blocks = (uint32_t)TP_MIN((uint32_t)options->nchannels, out->max_blocks);
	return ncclSuccess;
}

ncclResult_t tp_fused_init(struct tp_boot *boot, struct tp_links *links, const struct tp_fused_options *options, struct tp_fused *out)
{
	struct tp_fused f = { .shared_gpu = options->shared_gpu, .rank = boot->rank, .nranks = boot->nranks, .comm = options->comm,
		.counts = options->counts, .no_ctas = options->no_ctas };
	struct word mine = { .version = WORD_VERSION };
	mine.usable = see_regions(boot, links, &f);
	const bool nvlink = is_nvlink(boot, links);
	mine.machine = (struct tp_fused_machine){ .major = options->gpu->major, .minor = options->gpu->minor, .nranks = boot->nranks,
		.join = options->shared_gpu ? TP_FUSED_SHARED : nvlink ? TP_FUSED_NVLINK : TP_FUSED_PCIE };
	snprintf(mine.machine.gpu, sizeof(mine.machine.gpu), "%s", options->gpu->name);
	const struct tp_fused_machine any = { .nranks = boot->nranks, .join = options->shared_gpu ? TP_FUSED_SHARED : TP_FUSED_PCIE };
	TP_TRY(make_table(options, &mine.machine, &mine.table));
	TP_TRY(make_table(options, &any, &mine.any));
	mine.allows_128 = allows_128(nvlink);
	for (int i = 0; i < 2; i++) {
		struct tp_fused_table *t = i ? &mine.any : &mine.table;
		/* Over anything but NVLink nobody has measured them. */
		if (options->pipes == TP_CUDA_PIPES_NONE || (t->pipes == 1 && !mine.allows_128)) t->pipes = 0;
	}
	struct word *words = tp_alloc((size_t)boot->nranks, sizeof(*words), "what ranks say of fused kernels");
	if (!words) return ncclSystemError;
	words[boot->rank] = mine;
	ncclResult_t result = tp_boot_all_gather(boot, words, sizeof(*words));
	bool all_alike = true;
	for (int r = 1; r < boot->nranks; r++) all_alike = all_alike && alike(&words[r].machine, &words[0].machine);
	f.usable = true;
	f.table = all_alike ? words[0].table : words[0].any;
	for (int r = 0; r < boot->nranks && result == ncclSuccess; r++) {
		if (words[r].version != WORD_VERSION)
			result = TP_FAIL(ncclInvalidUsage, "rank %d's fused kernels speak version %u, rank %d's %u: all ranks need the same library", r,
				words[r].version, boot->rank, WORD_VERSION);
		if (!words[r].usable) {
			f.usable = false;
			if (!f.why_not[0]) snprintf(f.why_not, sizeof(f.why_not), "rank %d doesn't reach all others' memory", r);
		}
		f.table.allows_128 = f.table.allows_128 && words[r].allows_128;
		const struct tp_fused_table *its = all_alike ? &words[r].table : &words[r].any;
		f.table.pipes = f.table.pipes && its->pipes;
		f.table.max_blocks = TP_MIN(f.table.max_blocks, its->max_blocks);
	}
	free(words);
	if (result != ncclSuccess) return result;
	if (boot->rank == 0)
		TP_INFO(TP_TUNING, "kernels are chosen by the table of %s, %d ranks, %s", all_alike ? mine.machine.gpu : "any GPU, for they differ", boot->nranks,
			tp_fused_join_name((enum tp_fused_join)(all_alike ? mine.machine.join : any.join)));
	if (f.usable) tp_fused_lay_out(boot->nranks, options->nchannels, &f.layout);
	else TP_INFO(TP_TUNING, "rank %d: no fused kernels: %s", boot->rank, f.why_not);
	*out = f;
	return ncclSuccess;
}

/* ---- calls ---- */

static bool shape_of(const struct tp_fused *f, enum tp_coll coll, enum tp_shape shape, size_t bytes, struct tp_fused_shape *out)
{
	size_t n = (size_t)f->nranks, peers = n - 1;
	struct tp_fused_shape s = { .slice = bytes, .total = bytes, .sends = bytes * peers, .name[TP_FUSED_BY_PIPES] = "DIRECT/PIPE" };
	if (shape == TP_SHAPE_ONE_SHOT) {
		s.class = TP_FUSED_ONE_SHOT;
		s.name[0] = "ONE_SHOT/LL", s.name[1] = "ONE_SHOT/LL128";
		s.reduces = true;
	} else if (shape == TP_SHAPE_TWO_SHOT) {
		s.class = TP_FUSED_TWO_SHOT;
		s.name[0] = "TWO_SHOT/LL", s.name[1] = "TWO_SHOT/LL128", s.name[2] = "TWO_SHOT/PIPE";
		s.reduces = s.gathers = true;
		s.sends = bytes / n * peers * 2;
	} else if (shape == TP_SHAPE_DIRECT) {
		s.name[0] = "DIRECT/LL", s.name[1] = "DIRECT/LL128";
		s.class = TP_FUSED_ROOTED;
		switch (coll) {
		case TP_ALL_GATHER:
			s.class = TP_FUSED_GATHER;
			s.out_stride = bytes;
			break;
		case TP_REDUCE_SCATTER:
			s.class = TP_FUSED_SCATTER;
			s.reduces = true;
			s.in_stride = bytes;
			s.total = bytes * n;
			break;
		case TP_ALL_TO_ALL:
			s.class = TP_FUSED_PAIRS;
			s.in_stride = s.out_stride = bytes;
			s.total = bytes * n;
			break;
		case TP_BROADCAST:
			s.pattern = TP_FUSED_FROM_ROOT;
			break;
		case TP_SCATTER:
			s.pattern = TP_FUSED_FROM_ROOT;
			s.in_stride = bytes;
			s.total = bytes * n;
			break;
		case TP_GATHER:
			s.pattern = TP_FUSED_TO_ROOT;
			s.out_stride = bytes;
			break;
		case TP_REDUCE:
			s.pattern = TP_FUSED_TO_ROOT;
			s.reduces = true;
			break;
		default:
			return false;
		}
	} else {
		return false;
	}
	if ((coll == TP_BROADCAST || coll == TP_REDUCE) && n > 2 && f->table.allows_128 && bytes >= f->table.owners) {
		s.class = TP_FUSED_OWNERS;
		s.name[1] = "TWO_STEP/LL128", s.name[2] = "TWO_STEP/PIPE";
		s.owners = s.gathers = true;
		s.sends = bytes;
		if (coll == TP_REDUCE) s.pattern = TP_FUSED_ALL;
	}
	*out = s;
	return bytes > 0;
}

/* Kernels count what a call's blocks span in 32 bits. */
static bool is_counted(const struct tp_fused *f, const struct tp_fused_shape *s) { return (s->in_stride | s->out_stride) <= UINT32_MAX / (size_t)f->nranks; }

static int protocol_of(const struct tp_fused *f, const struct tp_fused_shape *s)
{
	const struct tp_fused_limit *limit = &f->table.limits[s->class];
	const bool counted = is_counted(f, s), moves = !s->reduces && !s->owners;
	const uint64_t pipes = s->reduces && s->class == TP_FUSED_ROOTED ? f->table.reduce : limit->pipes;
	if (f->pipes.level >= (moves ? TP_CUDA_PIPES_MOVE : TP_CUDA_PIPES_ALL) && s->class != TP_FUSED_ONE_SHOT && s->sends >= pipes)
		return TP_FUSED_BY_PIPES;
	if (counted && s->sends <= limit->ll && !s->owners) return 0;
	return counted && f->table.allows_128 && s->sends <= limit->ll128 ? 1 : -1;
}

bool tp_fused_copies(const struct tp_fused *f, enum tp_coll coll, size_t block_bytes)
{
	if (!f->usable || !block_bytes) return false;
	if (coll == TP_BROADCAST) return block_bytes >= f->table.copies_rooted;
	return (coll == TP_ALL_GATHER || coll == TP_ALL_TO_ALL) && block_bytes * (size_t)(f->nranks - 1) >= f->table.copies;
}

/* A call from byte `from` on: shape and call become those of what one launch takes, which is returned. */
static size_t cut_piece(const struct tp_fused *f, size_t from, struct tp_fused_shape *s, struct tp_exec_call *call)
{
	const size_t most = TP_MAX(TP_MIN(f->table.cut, MOST_BYTES) / (size_t)f->nranks / PIECE_UNIT, 1) * PIECE_UNIT, npieces = tp_div_up(s->slice, most);
	const size_t piece = TP_MIN(tp_align_up(tp_div_up(s->slice, npieces), PIECE_UNIT), s->slice - from);
	s->total = s->in_stride ? s->total - from : piece;
	s->slice = piece;
	if (call->input) call->input = (const char *)call->input + from;
	if (call->output) call->output = (char *)call->output + from;
	return piece;
}

static void fill_args(const struct tp_fused *f, const struct tp_exec_call *call, const struct tp_fused_shape *s, struct tp_fused_args *args)
{
	*args = (struct tp_fused_args){ .comm = f->comm, .input = (uint64_t)(uintptr_t)call->input,
		.output = (uint64_t)(uintptr_t)call->output, .slice_bytes = (uint32_t)s->slice, .total_bytes = (uint32_t)s->total,
		.in_stride = (uint32_t)s->in_stride, .out_stride = (uint32_t)s->out_stride, .layout = f->layout, .tag = call->tag, .rank = (int16_t)f->rank, .nranks = (int16_t)f->nranks,
		.root = (int16_t)call->plan->spec.root, .pattern = (uint8_t)s->pattern, .gathers = s->gathers, .owners = s->owners, .gives_way = f->shared_gpu, .counts = f->counts };
	memcpy(args->region, f->region, sizeof(args->region));
	if (s->reduces) tp_cuda_fill_reduce(call, &args->reduce);
}

/* Blocks for so many units of `lanes` threads each: as few as keep every thread busy once and need one round (another one costs as
 * much as the first), as many as there are. */
static void spread(const struct tp_fused *f, int protocol, uint32_t units, uint32_t lanes, struct tp_fused_launch *out)
{
	uint32_t fit = TP_MIN(f->table.threads[protocol] / lanes, out->args.units_a_round);
	uint32_t blocks = (uint32_t)TP_MIN(tp_div_up(units, fit), f->table.max_blocks);
	uint32_t each = TP_MIN((uint32_t)tp_div_up(units, blocks), out->args.units_a_round);
	out->args.units_each = units / blocks;
	out->args.units_more = units % blocks;
	out->args.rounds[0] = (uint32_t)tp_div_up(units / blocks + 1, out->args.units_a_round);
	out->args.rounds[1] = (uint32_t)tp_div_up(units / blocks, out->args.units_a_round);
	/* A warp more than the units need: it looks after the heads. */
	out->blocks = blocks;
	out->threads = (unsigned)TP_MIN(tp_align_up((size_t)each * lanes, 32) + 32, TP_DEV_THREADS);
}

/* Of a shape and a protocol; slices are units that ranks share where it gathers. */
static void fit_lines(const struct tp_fused *f, const struct tp_exec_call *call, struct tp_fused_shape *s, int protocol, struct tp_fused_launch *out)
{
	const uint32_t data = protocol ? 120 : 16, lanes = protocol ? 8 : 1;
	uint32_t units = (uint32_t)tp_div_up(s->slice, data);
	if (s->gathers) {
		units = (uint32_t)tp_div_up(units, (size_t)f->nranks - s->owners);
		s->slice = s->in_stride = s->out_stride = (size_t)units * data;
	}
	out->kind = s->owners ? TP_FUSED_TWO_STEP : protocol ? TP_FUSED_LL128 : TP_FUSED_LL;
	out->reduces = s->reduces;
	out->name = s->name[protocol];
	fill_args(f, call, s, &out->args);
	tp_fused_set_buffers(out, call->input, call->output);
	out->args.units_a_round = f->layout.slot[protocol] / (protocol ? LL128_UNIT : LL_UNIT);
	spread(f, protocol, units, lanes, out);
}

bool tp_fused_find(const struct tp_fused *f, const struct tp_exec_call *call, struct tp_fused_shape *shape, int *protocol)
{
	if (!f->usable || !call->plan || !shape_of(f, call->plan->spec.coll, call->plan->shape, call->block_bytes, shape)) return false;
	*protocol = protocol_of(f, shape);
	return *protocol >= 0;
}

bool tp_fused_fit(const struct tp_fused *f, const struct tp_exec_call *call, size_t from, struct tp_fused_launch *out)
{
	struct tp_exec_call piece = *call;
	struct tp_fused_shape s;
	int protocol;
	if (!tp_fused_find(f, call, &s, &protocol) || protocol == TP_FUSED_BY_PIPES) return false;
	out->bytes = cut_piece(f, from, &s, &piece);
	fit_lines(f, &piece, &s, protocol, out);
	return true;
}

bool tp_fused_fit_windows(const struct tp_fused *f, const struct tp_exec_call *call, const struct tp_fused_windows *windows, size_t from,
	struct tp_fused_launch *out)
{
	struct tp_exec_call piece = *call;
	struct tp_fused_shape s;
	if (!f->usable || !call->plan || !shape_of(f, call->plan->spec.coll, call->plan->shape, call->block_bytes, &s)) return false;
	if (s.class != TP_FUSED_TWO_SHOT && s.class != TP_FUSED_SCATTER) return false;
	if (s.sends < f->table.window || !is_counted(f, &s)) return false;
	out->bytes = cut_piece(f, from, &s, &piece);
	if (s.gathers) s.slice = s.in_stride = s.out_stride = tp_align_up(tp_div_up(s.slice, (size_t)f->nranks), 128);
	/* Windows begin at pages, and the offsets are the same on all ranks. An output that is no window is each rank's own affair, so nothing is
	 * asked of it: the kernel stores to any place. */
	if ((windows->in_offset | s.in_stride | (s.gathers ? windows->out_offset : 0)) % 16) return false;
	out->kind = TP_FUSED_WINDOW;
	out->reduces = true;
	out->name = s.gathers ? "TWO_SHOT/WINDOW" : "DIRECT/WINDOW";
	fill_args(f, &piece, &s, &out->args);
	out->args.aligned = s.gathers || out->args.output % 16 == 0;
	out->args.in_bases = windows->in_bases;
	out->args.in_offset = windows->in_offset + from;
	out->args.out_bases = windows->out_bases;
	out->args.out_offset = windows->out_offset + from;
	out->args.place = windows->place;
	out->args.call = (uint16_t)(call->tag ^ call->tag >> 16);
	out->threads = TP_DEV_THREADS;
	out->blocks = (unsigned)TP_MAX(TP_MIN(tp_div_up(s.slice / 16, TP_DEV_THREADS), f->table.max_blocks), 1);
	return true;
}

bool tp_fused_has_windows(const struct tp_fused *f, enum tp_coll coll, size_t block_bytes)
{
	struct tp_fused_shape s;
	if (!f->usable || (coll != TP_ALL_REDUCE && coll != TP_REDUCE_SCATTER) || block_bytes < f->table.window) return false;
	return shape_of(f, coll, coll == TP_ALL_REDUCE ? TP_SHAPE_TWO_SHOT : TP_SHAPE_DIRECT, block_bytes, &s) && is_counted(f, &s);
}

bool tp_fused_suggest(const struct tp_fused *f, enum tp_coll coll, size_t block_bytes, enum tp_algo *out)
{
	struct tp_fused_shape s;
	if (!f->usable) return false;
	static const enum tp_shape shapes[] = { TP_SHAPE_ONE_SHOT, TP_SHAPE_TWO_SHOT };
	static const enum tp_algo algos[] = { TP_ALGO_ONE_SHOT, TP_ALGO_TWO_SHOT };
	if (coll != TP_ALL_REDUCE) {
		if (!shape_of(f, coll, TP_SHAPE_DIRECT, block_bytes, &s) || protocol_of(f, &s) < 0) return false;
		*out = TP_ALGO_DIRECT;
		return true;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(shapes); i++) {
		if (!shape_of(f, coll, shapes[i], block_bytes, &s) || protocol_of(f, &s) < 0) continue;
		*out = algos[i];
		return true;
	}
	return false;
}

/* ---- ranks that there are not ---- */

static ncclResult_t foresee(const struct tp_cuda_foreseen *ranks, struct tp_fused *out)
{
	struct tp_fused f = { .usable = ranks->nranks >= 2 && ranks->nranks <= TP_DEV_MAX_LOCAL, .nranks = ranks->nranks };
	const struct tp_fused_machine machine = { .major = ranks->sm / 10, .minor = ranks->sm % 10, .nranks = f.nranks,
		.join = ranks->nvlink ? TP_FUSED_NVLINK : TP_FUSED_PCIE };
	tp_fused_defaults(&machine, &f.table);
	TP_TRY(tp_fused_read_table(&machine, &f.table));
	f.table.allows_128 = allows_128(ranks->nvlink);
	bool pipes = f.nranks <= TP_PIPE_RANKS && (f.table.pipes != 1 || (ranks->sm >= 90 && f.table.allows_128));
	f.pipes.level = pipes ? tp_fused_table_pipes(&f.table) : TP_CUDA_PIPES_NONE;
	*out = f;
	return ncclSuccess;
}

ncclResult_t tp_cuda_suggest_for(const struct tp_cuda_foreseen *ranks, enum tp_coll coll, size_t block_bytes, bool *wants, enum tp_algo *out)
{
	struct tp_fused f;
	TP_TRY(foresee(ranks, &f));
	*wants = tp_fused_suggest(&f, coll, block_bytes, out);
	return ncclSuccess;
}

/* As launch.c looks for it: pipes, sends and receives, lines, and the steps last. */
static const char *kernel_of(const struct tp_fused *f, enum tp_coll coll, enum tp_algo algo, size_t block_bytes)
{
	enum tp_shape shape = algo == TP_ALGO_ONE_SHOT ? TP_SHAPE_ONE_SHOT : algo == TP_ALGO_TWO_SHOT ? TP_SHAPE_TWO_SHOT : algo == TP_ALGO_DIRECT ? TP_SHAPE_DIRECT
		: TP_SHAPE_STEPS;
	struct tp_fused_shape s;
	if (!f->usable || !shape_of(f, coll, shape, block_bytes, &s)) return "STEPS";
	int protocol = protocol_of(f, &s);
	if (protocol != TP_FUSED_BY_PIPES && (coll == TP_GATHER || coll == TP_SCATTER) && f->table.allows_128 && f->nranks <= TP_DEV_STREAM_RANKS
		&& block_bytes >= f->table.stream)
		return block_bytes >= tp_cuda_streams_pipes_from(f) ? "DIRECT/PIPE" : "DIRECT/STREAM";
	return protocol < 0 ? "STEPS" : s.name[protocol];
}

static const char *kernel_in_windows(const struct tp_fused *f, enum tp_coll coll, size_t block_bytes)
{
	if (!f->usable) return NULL;
	if (coll == TP_ALL_REDUCE || coll == TP_REDUCE_SCATTER)
		return !tp_fused_has_windows(f, coll, block_bytes) ? NULL : coll == TP_ALL_REDUCE ? "TWO_SHOT/WINDOW" : "DIRECT/WINDOW";
	if (!tp_fused_copies(f, coll, block_bytes)) return NULL;
	return coll == TP_BROADCAST && f->nranks > 2 && block_bytes >= f->table.owners ? "TWO_STEP/COPY" : "DIRECT/COPY";
}

ncclResult_t tp_cuda_kernel_for(const struct tp_cuda_foreseen *ranks, enum tp_coll coll, enum tp_algo algo, size_t block_bytes, const char **kernel,
	const char **in_windows)
{
	struct tp_fused f;
	TP_TRY(foresee(ranks, &f));
	*kernel = kernel_of(&f, coll, algo, block_bytes);
	*in_windows = kernel_in_windows(&f, coll, block_bytes);
	return ncclSuccess;
}
