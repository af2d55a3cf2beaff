/* What fused kernels are made of: lines that carry their own flags, and a block's time.
 *
 * Time. Every round of every fused kernel in which a block took part has a number, the epoch, the same on all ranks; it is the
 * flag in that round's lines. Slots come in two parities: epoch e is written over e - 2. That is safe once the reader is known to
 * have ended e - 2:
 *   where every rank hears from every rank, whoever has ended e - 1 has heard what its peers sent after they had ended e - 2.
 *     A thread handles the same places of a slot in each round, so within a kernel this holds thread by thread; before the last
 *     round, which may be shorter, the block's threads meet;
 *   elsewhere (a root) a block says to all peers when it begins an epoch (its head), having ended all before, and whoever wants to
 *     write to it waits for the head of e - 1. tp_dev_epoch.heard tells whether that is needed at all.
 * Units that lie beyond a slice's end travel as well, empty, so that nobody is left without word.
 *
 * Before the epochs reach the end of their 32 bits, all lines of a block, heads too, are zeroed and time begins anew, between two
 * barriers: what is left of the last age could be taken for a line or a head of the next. So within an age epochs only grow, and are
 * compared as they are: however long ago a head was written (blocks get none while all hear from all), it is never taken for news.
 *
 * Units. A unit is what a protocol moves at once: a thread's 16 bytes in two lines (LL), or the 120 bytes of a line of 128 that eight
 * threads share (LL128): 16 bytes each, the eighth 8 and the flag. A warp's store to a line lands whole, and so does its load, if its
 * threads are together: they meet before the pushes of a unit and before each look, or the flag could go ahead of the others' bytes, or be newer than what they
 * have seen. The warp looks until all its lines have come. */
#ifndef TP_EXEC_CUDA_LINES_H
#define TP_EXEC_CUDA_LINES_H

#include "exec/cuda/block.h"
#include "exec/cuda/fused.h"

enum {
	TP_LINES_AGE = 0xfff00000u          /* no kernel begins later than that: it may have 2^20 rounds */
};

/* The program's memory, 16 aligned bytes: no other rank touches it while the kernel runs. */
#ifdef TP_EMULATE
#define TP_OF_OBJECT inline
/* Tests may define it: called where lateness shows, of a rank (it may sleep) or of a thread (the turns that it is to miss). */
extern "C" __attribute__((weak)) unsigned tp_lines_test_delay(void);
TP_DEVICE void tp_lines_delay()
{
	for (unsigned turns = tp_lines_test_delay ? tp_lines_test_delay() : 0; turns; turns--) tp_nap(turns, false);
}
TP_DEVICE tp_four tp_load_user16(const void *p) { return *(const tp_four *)p; }
TP_DEVICE void tp_store_user16(void *p, tp_four v) { *(tp_four *)p = v; }
TP_DEVICE void tp_load_user8(const void *p, uint32_t *x, uint32_t *y)
{
	*x = ((const uint32_t *)p)[0];
	*y = ((const uint32_t *)p)[1];
}
TP_DEVICE void tp_store_user8(void *p, uint32_t x, uint32_t y)
{
	((uint32_t *)p)[0] = x;
	((uint32_t *)p)[1] = y;
}
#else
#define TP_OF_OBJECT __device__ __forceinline__
#ifdef TP_CUDA_DELAYS
/* For stress runs on GPUs: where the emulator's threads may be late, one in sixteen is, by up to 16 us; the chance is the clock's. */
TP_DEVICE void tp_lines_delay()
{
	uint32_t x = (uint32_t)clock64() ^ (uint32_t)tp_thread() * 0x9e3779b1u ^ (uint32_t)tp_block() * 0x85ebca77u;
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	if (x >> 28 == 0) __nanosleep(x >> 14 & 0x3fff);
}
#else
TP_DEVICE void tp_lines_delay() { }
#endif
TP_DEVICE tp_four tp_load_user16(const void *p)
{
	tp_four v;
	asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
	return v;
}
TP_DEVICE void tp_store_user16(void *p, tp_four v)
{ asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
/* 8 bytes. */
TP_DEVICE void tp_load_user8(const void *p, uint32_t *x, uint32_t *y)
{ asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(*x), "=r"(*y) : "l"(p)); }
TP_DEVICE void tp_store_user8(void *p, uint32_t x, uint32_t y)
{ asm volatile("st.global.v2.u32 [%0], {%1,%2};" :: "l"(p), "r"(x), "r"(y) : "memory"); }
#endif

/* Up to 16 bytes at any element. */
TP_FAR tp_four tp_user_load(const char *from, uint32_t bytes)
{
	uint64_t low = 0, high = 0;
	const uint32_t odd = (uint32_t)(uintptr_t)from | bytes | 8, each = odd & (0u - odd);
	TP_NO_UNROLL
	for (uint32_t i = 0; i < bytes; i += each) {
		uint64_t v = each == 8 ? *(const uint64_t *)(from + i) : each == 4 ? *(const uint32_t *)(from + i) :
			each == 2 ? *(const uint16_t *)(from + i) : *(const uint8_t *)(from + i);
		if (i < 8) low |= v << 8 * i;
		else high |= v << 8 * (i - 8);
	}
	return { (uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32) };
}

TP_FAR void tp_user_store(char *to, tp_four v, uint32_t bytes)
{
	uint64_t low = v.x | (uint64_t)v.y << 32, high = v.z | (uint64_t)v.w << 32;
	const uint32_t odd = (uint32_t)(uintptr_t)to | bytes | 8, each = odd & (0u - odd);
	TP_NO_UNROLL
	for (uint32_t i = 0; i < bytes; i += each) {
		uint64_t part = i < 8 ? low >> 8 * i : high >> 8 * (i - 8);
		if (each == 8) *(uint64_t *)(to + i) = part;
		else if (each == 4) *(uint32_t *)(to + i) = (uint32_t)part;
		else if (each == 2) *(uint16_t *)(to + i) = (uint16_t)part;
		else *(uint8_t *)(to + i) = (uint8_t)part;
	}
}

/* The usual few without a call, whose code would have to be fetched first: 0, 4 and 8 bytes. (Lines of 128 bytes carry more, and have no registers for it.) */
TP_DEVICE tp_four tp_user_load_few(const char *from, uint32_t bytes)
{
	const uint32_t *at = (const uint32_t *)from;
	if (((uint32_t)(uintptr_t)from | bytes) % 4 || bytes > 8) return tp_user_load(from, bytes);
	return { bytes ? at[0] : 0u, bytes == 8 ? at[1] : 0u, 0, 0 };
}
TP_DEVICE void tp_user_store_few(char *to, tp_four v, uint32_t bytes)
{
	uint32_t *at = (uint32_t *)to;
	if (((uint32_t)(uintptr_t)to | bytes) % 4 || bytes > 8) {
		tp_user_store(to, v, bytes);
		return;
	}
	if (bytes) at[0] = v.x;
	if (bytes == 8) at[1] = v.y;
}

/* Lines of 16 bytes. Those of 32 threads lie together, first their first halves. */
struct tp_ll {
	enum { KIND = 0, LANES = 1, VECTORS = 1, BYTES = 16, PEERS = 4 };
	TP_METHOD uint32_t offset(int) { return 0; }
	/* A whole unit of the program's, in an aligned place. */
	TP_METHOD void get(const char *from, tp_four *v) { *v = tp_load_user16(from); }
	TP_METHOD void put(char *to, const tp_four *v) { tp_store_user16(to, *v); }
	TP_METHOD char *place(char *slot, uint32_t unit) { return slot + (unit & ~31u) * 32 + (unit & 31u) * 16; }
	TP_METHOD void push(char *at, const tp_four *v, uint32_t flag)
	{
		tp_store_line(at, { v->x, flag, v->y, flag });
		tp_store_line(at + 512, { v->z, flag, v->w, flag });
	}
	TP_METHOD bool look(const char *at, tp_four *v, uint32_t flag)
	{
		tp_four a = tp_load_line(at), b = tp_load_line(at + 512);
		*v = { a.x, a.z, b.x, b.z };
		return a.y == flag && a.w == flag && b.y == flag && b.w == flag;
	}
	TP_METHOD void meet() { }
	TP_METHOD bool all(bool x) { return x; }
	TP_METHOD bool any(bool x) { return x; }
};

/* Lines of 128 bytes. Where a warp has one thread, that thread is all eight, one after the other. */
struct tp_ll128 {
	enum { KIND = 1, LANES = TP_WARP < 8 ? 1 : 8, VECTORS = 8 / LANES, BYTES = 120, PEERS = 4 };
	TP_METHOD uint32_t lane(int i) { return LANES == 1 ? (uint32_t)i : (uint32_t)tp_thread() % LANES; }
	TP_METHOD uint32_t offset(int i) { return lane(i) * 16; }
	TP_METHOD void get(const char *from, tp_four *v)
	{
		TP_UNROLL
		for (int i = 0; i < VECTORS; i++) {
			tp_load_user8(from + offset(i), &v[i].x, &v[i].y);
			v[i].z = v[i].w = 0;
			if (lane(i) < 7) tp_load_user8(from + offset(i) + 8, &v[i].z, &v[i].w);
		}
	}
	TP_METHOD void put(char *to, const tp_four *v)
	{
		TP_UNROLL
		for (int i = 0; i < VECTORS; i++) {
			tp_store_user8(to + offset(i), v[i].x, v[i].y);
			if (lane(i) < 7) tp_store_user8(to + offset(i) + 8, v[i].z, v[i].w);
		}
	}
	TP_METHOD char *place(char *slot, uint32_t unit) { return slot + unit * 128; }
	TP_METHOD void push(char *at, const tp_four *v, uint32_t flag)
	{
		TP_UNROLL
		for (int i = 0; i < VECTORS; i++) {
			bool last = lane(i) == 7;
			tp_store_line(at + lane(i) * 16, { v[i].x, v[i].y, last ? flag : v[i].z, last ? flag : v[i].w });
		}
	}
	/* The last thread's z and w are the flag: nobody reads them as data. */
	TP_METHOD bool look(const char *at, tp_four *v, uint32_t flag)
	{
		bool ok = true;
		TP_UNROLL
		for (int i = VECTORS - 1; i >= 0; i--) {
			v[i] = tp_load_line(at + lane(i) * 16);
			if (lane(i) == 7) ok = v[i].z == flag && v[i].w == flag;
		}
		return ok;
	}
	/* Before the pushes of a unit, and before each look: by all threads of the warp. */
	TP_METHOD void meet() { tp_warp_sync(); }
	TP_METHOD bool all(bool x) { return tp_warp_all(x); }
	TP_METHOD bool any(bool x) { return tp_warp_any(x); }
};

/* A block in a fused kernel. */
struct tp_lines {
	uint32_t now, heard, gates;         /* as the kernel found them; round r is epoch now + 1 + r */
	uint32_t first, count, rounds;      /* its units of each slice */
	unsigned turn;
	bool stopped;                       /* aborted: nothing comes any more */
};

TP_DEVICE tp_dev_comm *tp_lines_comm(const tp_fused_args &a) { return (tp_dev_comm *)a.comm; }

TP_DEVICE char *tp_lines_share(const tp_fused_args &a, int rank)
{
	uint64_t base = rank < TP_FUSED_INLINE ? a.region[rank] : tp_lines_comm(a)->region[rank];
	return (char *)base + (size_t)tp_block() * a.layout.share;
}

/* Where `from` writes near `at` in an epoch: the first peer's slot, and how far on `from`'s is. */
template <class L>
TP_DEVICE char *tp_lines_slots(const tp_fused_args &a, int at, int phase, uint32_t epoch)
{
	uint32_t index = ((uint32_t)phase * 2 + epoch % 2) * ((uint32_t)a.nranks - 1);
	return tp_lines_share(a, at) + a.layout.lines[L::KIND] + index * a.layout.slot[L::KIND];
}
template <class L>
TP_DEVICE uint32_t tp_lines_seat(const tp_fused_args &a, int at, int from) { return (uint32_t)(from - (from > at)) * a.layout.slot[L::KIND]; }
template <class L>
TP_DEVICE char *tp_lines_slot(const tp_fused_args &a, int at, int from, int phase, uint32_t epoch)
{ return tp_lines_slots<L>(a, at, phase, epoch) + tp_lines_seat<L>(a, at, from); }

/* After a turn in vain. False: don't wait any longer. */
TP_DEVICE bool tp_lines_wait(const tp_fused_args &a, tp_lines &k)
{
	if (k.stopped) return false;
	k.stopped = tp_block_stopped(tp_lines_comm(a), ++k.turn);
	tp_nap(k.turn, a.gives_way);
	return !k.stopped;
}

/* Heads and gates are the last warp's business: in small kernels it has nothing else to do. */
TP_DEVICE int tp_lines_head_lane() { return tp_thread() - (tp_threads() - TP_WARP); }

TP_DEVICE void *tp_lines_head(const tp_fused_args &a, int at, int from, uint32_t epoch)
{
	return tp_lines_share(a, at) + a.layout.heads + (epoch % 2 * (uint32_t)a.nranks + (uint32_t)from) * 16;
}

TP_DEVICE void tp_lines_send_heads(const tp_fused_args &a, uint32_t epoch)
{
	TP_NO_UNROLL
	for (int p = tp_lines_head_lane(); p >= 0 && p < a.nranks; p += TP_WARP)
		if (p != a.rank) tp_store_line(tp_lines_head(a, p, a.rank, epoch), { a.tag, epoch, a.slice_bytes, epoch });
}

TP_DEVICE bool tp_lines_sends_to(const tp_fused_args &a, int p)
{
	if (p == a.rank) return false;
	return a.pattern == TP_FUSED_ALL || (a.pattern == TP_FUSED_FROM_ROOT ? a.rank == a.root || a.owners : p == a.root);
}
TP_DEVICE bool tp_lines_takes_from(const tp_fused_args &a, int p)
{
	if (p == a.rank) return false;
	return a.pattern == TP_FUSED_ALL || (a.pattern == TP_FUSED_FROM_ROOT ? p == a.root || (a.owners && a.rank != a.root) : a.rank == a.root);
}

/* Until those that are about to be written to have begun the epoch before. */
TP_DEVICE void tp_lines_await_heads(const tp_fused_args &a, tp_lines &k, uint32_t before)
{
	TP_NO_UNROLL
	for (int p = tp_lines_head_lane(); p >= 0 && p < a.nranks; p += TP_WARP) {
		if (!tp_lines_sends_to(a, p)) continue;
		for (;;) {
			tp_four head = tp_load_line(tp_lines_head(a, a.rank, p, before));
			if (head.y == head.w && head.y >= before) break;
			if (!tp_lines_wait(a, k)) break;
		}
	}
}

/* Are those that this rank heard from in the same call? A head that was written over is of a peer that has ended this call. */
TP_DEVICE void tp_lines_check_heads(const tp_fused_args &a, tp_lines &k, uint32_t epoch)
{
	TP_NO_UNROLL
	for (int p = tp_lines_head_lane(); p >= 0 && p < a.nranks; p += TP_WARP) {
		if (!tp_lines_takes_from(a, p)) continue;
		for (;;) {
			tp_four head = tp_load_line(tp_lines_head(a, a.rank, p, epoch));
			if (head.y == head.w && head.y > epoch) break;
			if (head.y == epoch && head.w == epoch) {
				if (head.x != a.tag) tp_block_fault(tp_lines_comm(a), TP_BLOCK_TAG, p, tp_block(), head.x, a.tag);
				break;
			}
			if (!tp_lines_wait(a, k)) break;
		}
	}
}

/* All ranks' blocks with this number meet; what they wrote before is seen after. differs: set where a peer comes with another call, or for other places in
 * windows. (At a kernel's first barrier: at another, a peer may be in the next kernel by now.) */
TP_DEVICE void tp_lines_barrier(const tp_fused_args &a, tp_lines &k, uint32_t *differs = nullptr)
{
	const uint32_t word = (uint32_t)a.place << 16 | a.call;
	k.gates++;
	tp_block_sync();
	TP_NO_UNROLL
	for (int p = tp_lines_head_lane(); p >= 0 && p < a.nranks; p += TP_WARP)
		if (p != a.rank) tp_store_release64((uint64_t *)(tp_lines_share(a, p) + a.layout.gates) + a.rank, (uint64_t)word << 32 | k.gates);
	TP_NO_UNROLL
	for (int p = tp_lines_head_lane(); p >= 0 && p < a.nranks; p += TP_WARP) {
		if (p == a.rank) continue;
		const uint64_t *gate = (const uint64_t *)(tp_lines_share(a, a.rank) + a.layout.gates) + p;
		uint64_t found;
		while ((int32_t)((uint32_t)(found = tp_load_acquire64(gate)) - k.gates) < 0 && tp_lines_wait(a, k)) { }
		const uint32_t other = (uint32_t)(found >> 32);
		if (!differs || k.stopped || other == word) continue;
		if ((uint16_t)other != a.call) tp_block_fault(tp_lines_comm(a), TP_BLOCK_TAG, p, tp_block(), (uint16_t)other, a.call);
		else tp_block_fault(tp_lines_comm(a), TP_BLOCK_PLACE, p, tp_block(), other >> 16, a.place);
		tp_block_set(differs, 1);
	}
	tp_block_sync();
}

/* The end of an age. At the first barrier all that was ever sent to this block lies there, heads that it had no reason to look at too;
 * nobody sends anything new before the second. */
TP_FAR tp_lines tp_lines_scrub(const tp_fused_args &a, tp_lines k)
{
	char *share = tp_lines_share(a, a.rank);
	TP_NO_UNROLL
	for (int side = 0; side < 2; side++) {
		tp_lines_barrier(a, k);
		TP_NO_UNROLL
		for (uint32_t at = (uint32_t)tp_thread() * 16; side == 0 && at < a.layout.share; at += (uint32_t)tp_threads() * 16)
			if (at < a.layout.gates || at >= a.layout.lines[0]) tp_store_line(share + at, { 0, 0, 0, 0 });
		tp_fence();
	}
	k.now = k.heard = 0;
	return k;
}

/* A kernel without rounds: it has nothing but barriers. */
TP_DEVICE tp_lines tp_lines_begin_gates(const tp_fused_args &a)
{
	tp_four e = tp_load_line(&tp_lines_comm(a)->epoch[tp_block()]);
	tp_lines_delay();
	return { e.x, e.y, e.z, 0, 0, 0, 0, false };
}

TP_DEVICE tp_lines tp_lines_begin(const tp_fused_args &a)
{
	tp_lines k = tp_lines_begin_gates(a);
	const uint32_t b = (uint32_t)tp_block();
	const bool more = b < a.units_more;
	k.first = a.units_each * b + (more ? b : a.units_more);
	k.count = a.units_each + more;
	k.rounds = a.rounds[more ? 0 : 1];
	if (k.now >= TP_LINES_AGE) k = tp_lines_scrub(a, k);
	return k;
}

TP_DEVICE void tp_lines_end(const tp_fused_args &a, const tp_lines &k)
{
	tp_block_sync();
	if (tp_thread() == 0) {
		uint32_t now = k.now + k.rounds;
		tp_store_line(&tp_lines_comm(a)->epoch[tp_block()], { now, a.pattern == TP_FUSED_ALL && k.rounds ? now : k.heard, k.gates, 0 });
	}
	if (a.counts) tp_kernel_end(tp_lines_comm(a));
}

/* Before a block writes to its peers' slots for a round. Where all hear from all, only the first has to ask, and only after an epoch
 * that had a root. */
TP_DEVICE void tp_lines_open(const tp_fused_args &a, tp_lines &k, uint32_t round)
{
	bool all = a.pattern == TP_FUSED_ALL;
	if (all && round) return;
	if (round) tp_block_sync();
	if (!all || tp_block() == 0) tp_lines_send_heads(a, k.now + 1 + round);
	if (k.heard == k.now + round) return;
	tp_lines_await_heads(a, k, k.now + round);
	tp_block_sync();
}

/* Whole units of this thread's warp in a round: for (tp_unit u(…); u.more(); u.next()). Threads beyond the end go along. */
template <class L>
struct tp_unit {
	uint32_t warp, at, end, step;       /* of the slot; at < end: this thread's is one */
	TP_OF_OBJECT tp_unit(const tp_fused_args &a, const tp_lines &k, uint32_t round)
	{
		const uint32_t a_warp = TP_WARP / L::LANES, begin = round * a.units_a_round, left = k.count - begin;
		end = left < a.units_a_round ? left : a.units_a_round;
		warp = (uint32_t)tp_thread() / TP_WARP * a_warp;
		at = warp + (uint32_t)tp_thread() % TP_WARP / L::LANES;
		step = (uint32_t)tp_threads() / TP_WARP * a_warp;
	}
	TP_OF_OBJECT bool more() const { return warp < end; }
	TP_OF_OBJECT bool mine() const { return at < end; }
	TP_OF_OBJECT void next() { warp += step; at += step; }
};

/* Bytes of a slice from an offset on. */
TP_DEVICE uint32_t tp_lines_left(const tp_fused_args &a, int slice, uint32_t from)
{
	uint32_t begin = (uint32_t)slice * a.in_stride, end = begin + a.slice_bytes, at = begin + from;
	if (end > a.total_bytes) end = a.total_bytes;
	return end > at ? end - at : 0;
}

/* Bytes of vector i of a unit of which `left` are there. */
template <class L>
TP_DEVICE uint32_t tp_unit_bytes(int i, uint32_t left)
{
	uint32_t at = L::offset(i), end = left < L::BYTES ? left : (uint32_t)L::BYTES;
	return at >= end ? 0 : end - at < 16 ? end - at : 16;
}

/* A unit of which `left` bytes are there, wherever it lies; what isn't there is zero. */
template <class L>
TP_DEVICE void tp_unit_load(const char *from, bool whole, uint32_t left, tp_four *v)
{
	if (whole) {
		L::get(from, v);
		return;
	}
	TP_UNROLL
	for (int i = 0; i < L::VECTORS; i++) {
		uint32_t bytes = tp_unit_bytes<L>(i, left);
		v[i] = L::KIND == 0 ? tp_user_load_few(from + L::offset(i), bytes) : tp_user_load(from + L::offset(i), bytes);
	}
}

template <class L>
TP_DEVICE void tp_unit_store(char *to, bool whole, uint32_t left, const tp_four *v)
{
	if (whole) {
		L::put(to, v);
		return;
	}
	TP_UNROLL
	for (int i = 0; i < L::VECTORS; i++) {
		uint32_t bytes = tp_unit_bytes<L>(i, left);
		if (L::KIND == 0) tp_user_store_few(to + L::offset(i), v[i], bytes);
		else tp_user_store(to + L::offset(i), v[i], bytes);
	}
}

/* One unit of several ranks, all there: v[q] is of first + q, the own one is left alone. */
template <class L, int B, bool OWNERS>
TP_DEVICE void tp_unit_take(const tp_fused_args &a, tp_lines &k, int first, int phase, uint32_t epoch, uint32_t unit, bool mine,
	tp_four (*v)[L::VECTORS])
{
	const char *at = L::place(tp_lines_slots<L>(a, a.rank, phase, epoch), unit);
	tp_lines_delay();
	for (;;) {
		bool ok = true;
		L::meet();
		TP_UNROLL
		for (int q = 0; q < B; q++) {
			int p = first + q;
			if (!mine || p >= a.nranks || !tp_lines_takes_from(a, p)) continue;
			/* From a root in two steps: it gives in the first, the other owners in the second. */
			if (OWNERS && a.pattern == TP_FUSED_FROM_ROOT && (phase == 0) != (p == a.root)) continue;
			ok &= L::look(at + tp_lines_seat<L>(a, a.rank, p), v[q], epoch);
		}
		if (L::all(ok)) return;
		bool go = tp_lines_wait(a, k);
		k.stopped = L::any(k.stopped);
		if (L::any(!go)) return;
	}
}

#endif
