/* A ring that a peer writes, and what both its ends do: where chunks, flags and heads lie, waits, and how chunks are copied by threads. Who moves what through
 * them: pipes_move.h (collectives), streams_pipes.h (sends and receives).
 *
 * Each (peer, block) has two pipes here, one a phase: a ring of chunks that the peer writes, a flag for each, and, in the sender's memory, how far
 * the receiver has read. A chunk's number counts on for ever, kernel after kernel, so that no kernel has to meet another; it is the chunk's flag, beside the
 * call's tag. A flag is stored once the chunk's bulk copy has arrived. 31 bits are enough, as each flag is compared with the one number that
 * is due, and the reader is never a ring ahead. How far chunks have been read is said by TP_PIPE_DEPTH heads, which have numbers in turn, so that warps
 * that read chunks in turn don't wait for each other.
 *
 * Kernels divide the same memory in chunks of their own size, so a block writes to a ring only once all of it, of kernels before, has been read. */
#ifndef TP_EXEC_CUDA_PIPES_RING_H
#define TP_EXEC_CUDA_PIPES_RING_H

#include "exec/cuda/lines_move.h"
#include "exec/cuda/offers.h"
#include "exec/cuda/pipes.h"

/* What a block moves to or from a peer: from where or to where, bytes, chunks (empty ones too), the call's tag, what is offered for it. */
struct tp_pipe_part { uint64_t at, bytes; uint32_t chunks, tag; tp_dev_offer offer; };
/* This block's part of each slice. */
struct tp_pipe { uint64_t begin, bytes; uint32_t chunks; };

TP_DEVICE int tp_pipe_lane() { return tp_thread() % TP_WARP; }
TP_DEVICE tp_dev_comm *tp_pipe_comm(const tp_pipe_args &a) { return (tp_dev_comm *)a.comm; }
/* Two pipes: heads (TP_PIPE_DEPTH a phase) and an offer, then flags of each phase, each in a line, then chunks of each. */
TP_DEVICE char *tp_pipe_place(const tp_pipe_args &a, int at, int from)
{ return (char *)a.rings[at] + ((uint64_t)(uint32_t)(from - (from > at)) * a.nchannels + (uint32_t)tp_block()) * a.pipe_bytes; }
TP_DEVICE uint32_t *tp_pipe_head(const tp_pipe_args &a, int sender, int receiver, int phase, uint32_t number)
{ return (uint32_t *)tp_pipe_place(a, sender, receiver) + phase * TP_PIPE_DEPTH + number % TP_PIPE_DEPTH; }
TP_DEVICE char *tp_pipe_offer(const tp_pipe_args &a, int sender, int receiver) { return tp_pipe_place(a, sender, receiver) + 2 * TP_PIPE_DEPTH * 4; }
TP_DEVICE uint64_t *tp_pipe_flag(const tp_pipe_args &a, int receiver, int sender, int phase, uint32_t number)
{ return (uint64_t *)(tp_pipe_place(a, receiver, sender) + 128 + phase * 128) + (number & (a.slots - 1u)); }
TP_DEVICE char *tp_pipe_slot(const tp_pipe_args &a, int receiver, int sender, int phase, uint32_t number)
{ return tp_pipe_place(a, receiver, sender) + 384 + ((uint32_t)phase * a.slots + (number & (a.slots - 1u))) * a.chunk; }
/* Chunks of this block to and from a peer, as kernels before left them: {sent, received}. */
TP_DEVICE uint32_t *tp_pipe_counter(const tp_pipe_args &a, int phase, int peer)
{ return (uint32_t *)a.counters + ((uint32_t)tp_block() * 2 + (uint32_t)phase) * 2 * TP_PIPE_RANKS + (uint32_t)peer * 2; }

/* This block's share: of so many lines, each block has `each`, the first `more` one more. */
TP_DEVICE tp_pipe tp_pipe_share(uint64_t each, uint64_t more, uint32_t chunk)
{
	const uint64_t b = (uint64_t)(uint32_t)tp_block();
	tp_pipe k;
	k.begin = (each * b + (b < more ? b : more)) * 128;
	k.bytes = (each + (b < more)) * 128;
	k.chunks = (uint32_t)((k.bytes + chunk - 1) / chunk);
	return k;
}
/* Bytes of a chunk, and its place. */
TP_DEVICE uint32_t tp_pipe_bytes(const tp_pipe_args &a, const tp_pipe_part &part, uint32_t c)
{
	const uint64_t in = (uint64_t)c * a.chunk, left = part.bytes > in ? part.bytes - in : 0;
	return left < a.chunk ? (uint32_t)left : a.chunk;
}
TP_DEVICE const char *tp_pipe_at(const tp_pipe_args &a, const tp_pipe_part &part, uint32_t c) { return (const char *)part.at + (uint64_t)c * a.chunk; }

/* ---- waits ---- */

/* A turn in vain. stopped: the block's word. False: stop. */
TP_DEVICE bool tp_pipe_wait(uint32_t *stopped, const tp_pipe_args &a, unsigned turn)
{
	tp_lines_delay();
	if (tp_block_load(stopped)) return false;
	if (tp_block_stopped(tp_pipe_comm(a), turn)) {
		tp_block_set(stopped, 1);
		return false;
	}
	tp_nap(turn, a.gives_way);
	return true;
}

/* Has a peer read the chunk of that number? */
TP_DEVICE bool tp_pipe_is_read(const tp_pipe_args &a, int phase, int peer, uint32_t number)
{ return (int32_t)(number - tp_load_read(tp_pipe_head(a, a.rank, peer, phase, number))) <= 0; }       /* stored by tp_pipe_consumed */

/* A chunk has arrived in the ring, or straight in the peer's buffer. A release, though the bulk copy has been waited for: flags were seen to come before the
 * last bytes of their chunks. Pairs with tp_pipe_await. */
TP_DEVICE void tp_pipe_tell(const tp_pipe_args &a, int phase, int peer, uint32_t number, uint32_t tag, bool straight)
{ tp_store_release64(tp_pipe_flag(a, peer, a.rank, phase, number), (number << 1 | (uint32_t)straight) | (uint64_t)tag << 32); }

/* A thread's, until that chunk has come from a peer, to the ring or straight to its place. fault: where it has another tag. TP_PIPE_STOP: it won't come. */
enum { TP_PIPE_STOP, TP_PIPE_CAME, TP_PIPE_CAME_STRAIGHT };
TP_DEVICE uint32_t tp_pipe_await(uint32_t *stopped, const tp_pipe_args &a, int phase, int peer, uint32_t number, uint32_t tag, uint32_t fault)
{
	const uint64_t *flag = tp_pipe_flag(a, a.rank, peer, phase, number);
	tp_lines_delay();
	for (unsigned turn = 0;; turn++) {
		const uint64_t found = tp_load_acquire64(flag);
		if ((uint32_t)found >> 1 == (number & 0x7fffffffu)) {
			if (found >> 32 == tag) return found & 1 ? TP_PIPE_CAME_STRAIGHT : TP_PIPE_CAME;
			tp_block_fault(tp_pipe_comm(a), fault, peer, tp_block(), (uint32_t)(found >> 32), tag);
			tp_block_set(stopped, 1);
			return TP_PIPE_STOP;
		}
		if (!tp_pipe_wait(stopped, a, turn)) return TP_PIPE_STOP;
	}
}
/* A peer's chunk has been read. What was read is in registers or in shared memory: no order is needed but that of the barrier before this. */
TP_DEVICE void tp_pipe_consumed(const tp_pipe_args &a, int phase, int peer, uint32_t number)
{ tp_store_read(tp_pipe_head(a, peer, a.rank, phase, number), number); }

/* ---- copies by threads ---- */

/* Whole vectors, all aligned: apart from what may call functions, or loads would wait for each other. near: from a slot. */
template <int U, bool NEAR>
TP_DEVICE void tp_pipe_copy_vectors(const char *from, char *to, uint64_t bytes, int thread, int threads)
{
	const uint32_t step = (uint32_t)threads * 16;
	uint64_t i = (uint64_t)thread * 16;
	TP_NO_UNROLL
	for (; i + (U - 1) * step < bytes; i += U * step) {
		tp_four v[U];
		TP_UNROLL
		for (int u = 0; u < U; u++) v[u] = NEAR ? tp_load16(from + i + (uint32_t)u * step) : tp_load_user16(from + i + (uint32_t)u * step);
		TP_UNROLL
		for (int u = 0; u < U; u++) tp_store_user16(to + i + (uint32_t)u * step, v[u]);
	}
	if (i >= bytes) return;
	/* Fewer than U are left: those beyond the end are loaded from the last place there is. */
	tp_four v[U];
	TP_UNROLL
	for (int u = 0; u < U; u++) {
		const char *at = from + (i + (uint32_t)u * step < bytes ? i + (uint32_t)u * step : i);
		v[u] = NEAR ? tp_load16(at) : tp_load_user16(at);
	}
	TP_UNROLL
	for (int u = 0; u < U; u++)
		if (i + (uint32_t)u * step < bytes) tp_store_user16(to + i + (uint32_t)u * step, v[u]);
}

/* Of any bytes from anywhere to anywhere. */
TP_FAR void tp_pipe_copy_some(const char *from, char *to, uint64_t bytes, bool near, int thread, int threads)
{
	TP_NO_UNROLL
	for (uint64_t i = (uint64_t)thread * 16; i < bytes; i += (uint64_t)threads * 16) {
		const uint32_t n = bytes - i < 16 ? (uint32_t)(bytes - i) : 16;
		tp_user_store(to + i, near ? tp_load16(from + i) : tp_user_load(from + i, n), n);
	}
}

template <int U, bool NEAR>
TP_DEVICE void tp_pipe_copy(const char *from, char *to, uint64_t bytes, bool aligned, int thread, int threads)
{
	if (aligned && bytes % 16 == 0) tp_pipe_copy_vectors<U, NEAR>(from, to, bytes, thread, threads);
	else tp_pipe_copy_some(from, to, bytes, NEAR, thread, threads);
}

#endif
