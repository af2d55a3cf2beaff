/* Fused kernels on lines: reductions and copies, for both protocols (L) and every reduction (R).
 *
 * A reduction has up to three parts a round: the slices of INPUT go to their owners (push), the owner reduces what has come, its
 * own in its place, in rank order (reduce), and, in two shots, sends the result to all (gather). A thread handles the same unit of
 * all slices, so in place nothing is written before it was read. In two shots the next round's push comes before this round's
 * gather: what travels then overlaps, and no slot is written too early, as what a peer pushes next says that it has reduced.
 * One's own contribution is scaled and rounded before it goes to anybody, and one adds up the same value. */
#ifndef TP_EXEC_CUDA_LINES_MOVE_H
#define TP_EXEC_CUDA_LINES_MOVE_H

#include "exec/cuda/lines.h"
#include "exec/cuda/reduce.h"

/* What is done to 16 bytes. */
template <class T, class O> struct tp_reduction {
	enum {
		PEERS = T::N > 8 ? 1 : 4,           /* whose units lie in registers at once */
		DEPTH = T::N > 8 ? 1 : T::N > 4 ? 2 : 4
	};
	struct acc { typename T::acc a[T::N]; };
	tp_scaling<T> scaling;
	TP_OF_OBJECT explicit tp_reduction(const tp_dev_reduce &r) { tp_scaling_get<T>(r, &scaling); }
	TP_OF_OBJECT bool scales() const { return O::SCALES && scaling.pre; }
	TP_OF_OBJECT tp_four scale(tp_four v) const
	{
		typename T::acc a[T::N];
		T::load(v, a);
		tp_scale_before<T>(scaling, a);
		return T::store(a);
	}
	TP_OF_OBJECT void first(acc &sum, const tp_four &v) const { T::load(v, sum.a); }
	TP_OF_OBJECT void more(acc &sum, const tp_four &v) const { tp_reduce_more<T, O>(sum.a, v); }
	TP_OF_OBJECT tp_four last(acc &sum) const
	{
		if (O::SCALES && scaling.post) tp_scale_after<T>(scaling, sum.a);
		return T::store(sum.a);
	}
};
struct tp_raw {
	TP_OF_OBJECT bool scales() const { return false; }
	TP_OF_OBJECT tp_four scale(tp_four v) const { return v; }
};

/* The number of a rank's slice. In two steps (OWNERS) the root has none: -1. */
template <bool OWNERS>
TP_DEVICE int tp_lines_slice(const tp_fused_args &a, int p) { return !OWNERS ? p : p == a.root ? -1 : p - (p > a.root); }
TP_DEVICE int tp_lines_peer(const tp_fused_args &a, int i) { int p = a.rank + i; return p < a.nranks ? p : p - a.nranks; }

template <class L>
TP_DEVICE uint32_t tp_lines_from(const tp_fused_args &a, const tp_lines &k, uint32_t round, uint32_t unit)
{ return (k.first + round * a.units_a_round + unit) * (uint32_t)L::BYTES; }

/* Is the unit whole in every slice, and aligned? The last slice is the shortest. */
template <class L, bool OWNERS>
TP_DEVICE bool tp_lines_whole(const tp_fused_args &a, uint32_t from)
{ return a.aligned && tp_lines_left(a, a.nranks - 1 - OWNERS, from) >= L::BYTES; }

/* A unit of `slice` of INPUT. */
template <class L>
TP_DEVICE void tp_lines_load(const tp_fused_args &a, int slice, uint32_t from, bool whole, tp_four *v)
{ tp_unit_load<L>((const char *)a.input + (uint32_t)slice * a.in_stride + from, whole, tp_lines_left(a, slice, from), v); }

template <class L, class R>
TP_DEVICE void tp_lines_scale(const R &reduction, tp_four *v)
{
	TP_UNROLL
	for (int i = 0; i < L::VECTORS; i++) v[i] = reduction.scale(v[i]);
}

/* The units of the slices of INPUT to those they belong to, beginning with the next rank. */
template <class L, bool OWNERS, class R>
TP_DEVICE void tp_lines_push(const tp_fused_args &a, const tp_lines &k, const R &reduction, uint32_t round)
{
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		const bool mine = u.mine();
		if (L::LANES == 1 && !mine) continue;
		uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		if (!L::all(!mine || tp_lines_whole<L, OWNERS>(a, from)) || reduction.scales()) {
			tp_four v[L::VECTORS];
			bool loaded = false;
			TP_NO_UNROLL
			for (int i = 1; i < a.nranks; i++) {
				int p = tp_lines_peer(a, i);
				const int slice = tp_lines_slice<OWNERS>(a, p);
				if ((OWNERS && slice < 0) || !tp_lines_sends_to(a, p)) continue;
				/* All get the same, or each its own. */
				if ((L::LANES == 1 || mine) && (!loaded || a.in_stride)) {
					tp_lines_load<L>(a, slice, from, false, v);
					if (reduction.scales()) tp_lines_scale<L>(reduction, v);
				}
				loaded = true;
				tp_lines_delay();
				L::meet();
				if (mine) L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 0, epoch), u.at), v, epoch);
			}
			continue;
		}
		TP_NO_UNROLL
		for (int first = 1; first < a.nranks; first += L::PEERS) {
			tp_four v[L::PEERS][L::VECTORS];
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				int p = tp_lines_peer(a, first + q);
				const int slice = tp_lines_slice<OWNERS>(a, p);
				if (mine && first + q < a.nranks && (!OWNERS || slice >= 0) && tp_lines_sends_to(a, p))
					L::get((const char *)a.input + (uint32_t)slice * a.in_stride + from, v[q]);
			}
			tp_lines_delay();
			L::meet();
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				int p = tp_lines_peer(a, first + q);
				if (mine && first + q < a.nranks && (!OWNERS || tp_lines_slice<OWNERS>(a, p) >= 0) && tp_lines_sends_to(a, p))
					L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 0, epoch), u.at), v[q], epoch);
			}
		}
	}
}

/* This rank's slice. */
template <class L, bool OWNERS, class R>
TP_DEVICE void tp_lines_reduce(const tp_fused_args &a, tp_lines &k, const R &reduction, uint32_t round)
{
	constexpr int B = (int)R::PEERS < (int)L::PEERS ? (int)R::PEERS : (int)L::PEERS;
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		tp_four own[L::VECTORS];
		const bool whole = tp_lines_whole<L, OWNERS>(a, from);
		const int slice = tp_lines_slice<OWNERS>(a, a.rank);
		if (u.mine()) tp_lines_load<L>(a, slice, from, whole, own);
		if (reduction.scales()) tp_lines_scale<L>(reduction, own);
		typename R::acc sum[L::VECTORS];
		TP_NO_UNROLL
		for (int first = 0; first < a.nranks; first += B) {
			tp_four v[B][L::VECTORS];
			tp_unit_take<L, B, OWNERS>(a, k, first, 0, epoch, u.at, u.mine(), v);
			TP_UNROLL
			for (int q = 0; q < B; q++) {
				if (first + q >= a.nranks) break;
				TP_UNROLL
				for (int i = 0; i < L::VECTORS; i++) {
					tp_four x = first + q == a.rank ? own[i] : v[q][i];
					if (q == 0 && first == 0) reduction.first(sum[i], x);
					else reduction.more(sum[i], x);
				}
			}
		}
		tp_four result[L::VECTORS];
		TP_UNROLL
		for (int i = 0; i < L::VECTORS; i++) result[i] = reduction.last(sum[i]);
		if (OWNERS || a.gathers) {
			tp_lines_delay();
			L::meet();
		}
		if (!u.mine()) continue;
		if (OWNERS) L::push(L::place(tp_lines_slot<L>(a, a.root, a.rank, 1, epoch), u.at), result, epoch);
		TP_NO_UNROLL
		for (int i = 1; !OWNERS && a.gathers && i < a.nranks; i++) {
			int p = tp_lines_peer(a, i);
			L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 1, epoch), u.at), result, epoch);
		}
		if (!OWNERS)
			tp_unit_store<L>((char *)a.output + (a.gathers ? (uint32_t)a.rank * a.out_stride : 0u) + from, whole, tp_lines_left(a, slice, from), result);
	}
}

/* What the others have sent, to their places in OUTPUT. phase 0: every slice is slice_bytes long. */
template <class L, bool OWNERS>
TP_DEVICE void tp_lines_collect(const tp_fused_args &a, tp_lines &k, uint32_t round, int phase)
{
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		const uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		const bool whole = L::all(!u.mine() || (phase ? tp_lines_whole<L, OWNERS>(a, from) : a.aligned && a.slice_bytes - from >= L::BYTES));
		char *to = (char *)a.output + from;
		TP_NO_UNROLL
		for (int first = 0; first < a.nranks; first += L::PEERS) {
			tp_four v[L::PEERS][L::VECTORS];
			tp_unit_take<L, L::PEERS, OWNERS>(a, k, first, phase, epoch, u.at, u.mine(), v);
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				const int p = first + q, slice = tp_lines_slice<OWNERS>(a, p);
				if (!u.mine() || p >= a.nranks || (OWNERS && slice < 0) || !tp_lines_takes_from(a, p)) continue;
				if (whole) L::put(to + (uint32_t)slice * a.out_stride, v[q]);
				else tp_unit_store<L>(to + (uint32_t)slice * a.out_stride, false, phase ? tp_lines_left(a, slice, from) : a.slice_bytes - from, v[q]);
			}
		}
	}
}

/* Two steps to a root: all give to the owners of slices, who reduce and give to the root. So each rank hears from every other one in each
 * round, as in two shots; the root hears of a round's owners by what it gathers, and so gathers the first round before it pushes the
 * second. And what it pushes last says that it has gathered the round before, for whatever comes after this kernel. */
template <class L, class R>
TP_DEVICE void tp_lines_run_reduce_owners(const tp_fused_args &a)
{
	const R reduction(a.reduce);
	tp_lines k = tp_lines_begin(a);
	const bool root = a.rank == a.root;
	TP_NO_UNROLL
	for (uint32_t round = 0; round <= k.rounds; round++) {
		const bool last = round && round + 1 == k.rounds, first = root && (last || round == 1) && round < k.rounds;
		if (first) {
			tp_lines_collect<L, true>(a, k, round - 1, 1);
			tp_block_sync();
		}
		if (round < k.rounds) {
			tp_lines_open(a, k, round);
			/* Owners hear from each other by what is pushed alone: the last says that all threads have ended the round before. */
			if (last && !root) tp_block_sync();
			tp_lines_push<L, true>(a, k, reduction, round);
		}
		if (root && round && !first) tp_lines_collect<L, true>(a, k, round - 1, 1);
		if (round == k.rounds) break;
		if (!root) tp_lines_reduce<L, true>(a, k, reduction, round);
	}
	if (tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1);
	tp_lines_end(a, k);
}

/* Two shots: round r + 1 is pushed before round r is gathered. */
template <class L, class R>
TP_DEVICE void tp_lines_run_reduce(const tp_fused_args &a)
{
	const R reduction(a.reduce);
	tp_lines k = tp_lines_begin(a);
	const bool all = a.pattern == TP_FUSED_ALL, root = a.rank == a.root;
	TP_NO_UNROLL
	for (uint32_t round = 0; round <= k.rounds; round++) {
		const bool last = round && round + 1 == k.rounds;
		if (round < k.rounds) {
			tp_lines_open(a, k, round);
			if (all && last && !a.gathers) tp_block_sync();
			if (all || !root) tp_lines_push<L, false>(a, k, reduction, round);
		}
		if (a.gathers && round) tp_lines_collect<L, false>(a, k, round - 1, 1);
		if (round == k.rounds) break;
		if (last && a.gathers) tp_block_sync();
		if (all || root) tp_lines_reduce<L, false>(a, k, reduction, round);
		if (root && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1 + round);
	}
	if (all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1);
	tp_lines_end(a, k);
}

/* Two steps from a root: what it gave this rank goes to the other owners, and here where it belongs. */
template <class L>
TP_DEVICE void tp_lines_forward(const tp_fused_args &a, tp_lines &k, uint32_t round)
{
	const uint32_t epoch = k.now + 1 + round, slice = (uint32_t)tp_lines_slice<true>(a, a.rank);
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		const uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		tp_four v[1][L::VECTORS];
		tp_unit_take<L, 1, true>(a, k, a.root, 0, epoch, u.at, u.mine(), v);
		tp_lines_delay();
		L::meet();
		if (!u.mine()) continue;
		TP_NO_UNROLL
		for (int i = 1; i < a.nranks; i++) {
			const int p = tp_lines_peer(a, i);
			if (p != a.root) L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 1, epoch), u.at), v[0], epoch);
		}
		tp_unit_store<L>((char *)a.output + slice * a.out_stride + from, tp_lines_whole<L, true>(a, from), tp_lines_left(a, (int)slice, from), v[0]);
	}
}

/* The root's own copy. */
template <class L>
TP_DEVICE void tp_lines_keep_all(const tp_fused_args &a, const tp_lines &k, uint32_t round)
{
	if (a.input == a.output) return;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		if (!u.mine()) continue;
		const uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		const bool whole = tp_lines_whole<L, true>(a, from);
		TP_NO_UNROLL
		for (int slice = 0; slice < a.nranks - 1; slice++) {
			const uint32_t left = tp_lines_left(a, slice, from), at = (uint32_t)slice * a.in_stride + from;
			tp_four v[L::VECTORS];
			tp_unit_load<L>((const char *)a.input + at, whole, left, v);
			tp_unit_store<L>((char *)a.output + at, whole, left, v);
		}
	}
}

template <class L>
TP_DEVICE void tp_lines_run_broadcast(const tp_fused_args &a)
{
	tp_lines k = tp_lines_begin(a);
	TP_NO_UNROLL
	for (uint32_t round = 0; round < k.rounds; round++) {
		tp_lines_open(a, k, round);
		if (a.rank == a.root) {
			tp_lines_push<L, true>(a, k, tp_raw(), round);
			tp_lines_keep_all<L>(a, k, round);
		} else {
			tp_lines_forward<L>(a, k, round);
			tp_lines_collect<L, true>(a, k, round, 1);
		}
		if (tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1 + round);
	}
	tp_lines_end(a, k);
}

/* What a rank gives to itself. */
template <class L>
TP_DEVICE void tp_lines_keep(const tp_fused_args &a, const tp_lines &k, uint32_t round)
{
	const char *from = (const char *)a.input + (uint32_t)a.rank * a.in_stride;
	char *to = (char *)a.output + (uint32_t)a.rank * a.out_stride;
	if (from == to || (a.pattern != TP_FUSED_ALL && a.rank != a.root)) return;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		if (!u.mine()) continue;
		uint32_t at = tp_lines_from<L>(a, k, round, u.at);
		tp_four v[L::VECTORS];
		const bool whole = a.aligned && a.slice_bytes - at >= L::BYTES;
		tp_unit_load<L>(from + at, whole, a.slice_bytes - at, v);
		tp_unit_store<L>(to + at, whole, a.slice_bytes - at, v);
	}
}

template <class L>
TP_DEVICE void tp_lines_run_copy(const tp_fused_args &a)
{
	tp_lines k = tp_lines_begin(a);
	const bool all = a.pattern == TP_FUSED_ALL;
	TP_NO_UNROLL
	for (uint32_t round = 0; round < k.rounds; round++) {
		tp_lines_open(a, k, round);
		if (all && round && round + 1 == k.rounds) tp_block_sync();
		tp_lines_push<L, false>(a, k, tp_raw(), round);
		tp_lines_keep<L>(a, k, round);
		tp_lines_collect<L, false>(a, k, round, 0);
		if (!all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1 + round);
	}
	if (all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1);
	tp_lines_end(a, k);
}

#endif
