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

TP_DEVICE int tp_lines_peer(const tp_fused_args &a, int i) { int p = a.rank + i; return p < a.nranks ? p : p - a.nranks; }

template <class L>
TP_DEVICE uint32_t tp_lines_from(const tp_fused_args &a, const tp_lines &k, uint32_t round, uint32_t unit)
{ return (k.first + round * a.units_a_round + unit) * (uint32_t)L::BYTES; }

/* A unit of `slice` of INPUT. */
template <class L>
TP_DEVICE void tp_lines_load(const tp_fused_args &a, int slice, uint32_t from, tp_four *v)
{ tp_unit_load<L>((const char *)a.input + slice * a.in_stride + from, tp_lines_left(a, slice, from), v); }

template <class L, class R>
TP_DEVICE void tp_lines_scale(const R &reduction, tp_four *v)
{
	TP_UNROLL
	for (int i = 0; i < L::VECTORS; i++) v[i] = reduction.scale(v[i]);
}

/* The units of the slices of INPUT to those they belong to, beginning with the next rank. */
template <class L, class R>
TP_DEVICE void tp_lines_push(const tp_fused_args &a, const tp_lines &k, const R &reduction, uint32_t round)
{
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		if (!u.mine()) continue;
		uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		TP_NO_UNROLL
		for (int first = 1; first < a.nranks; ) {
			if (reduction.scales()) {
				int p = tp_lines_peer(a, first++);
				tp_four v[L::VECTORS];
				tp_lines_load<L>(a, p, from, v);
				tp_lines_scale<L>(reduction, v);
				if (tp_lines_sends_to(a, p)) L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 0, epoch), u.at), v, epoch);
				continue;
			}
			tp_four v[L::PEERS][L::VECTORS];
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				int p = tp_lines_peer(a, first + q);
				if (first + q < a.nranks && tp_lines_sends_to(a, p)) tp_lines_load<L>(a, p, from, v[q]);
			}
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				int p = tp_lines_peer(a, first + q);
				if (first + q < a.nranks && tp_lines_sends_to(a, p))
					L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 0, epoch), u.at), v[q], epoch);
			}
			first += L::PEERS;
		}
	}
}

/* This rank's slice. */
template <class L, class R>
TP_DEVICE void tp_lines_reduce(const tp_fused_args &a, tp_lines &k, const R &reduction, uint32_t round)
{
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		tp_four own[L::VECTORS];
		if (u.mine()) tp_lines_load<L>(a, a.rank, from, own);
		if (reduction.scales()) tp_lines_scale<L>(reduction, own);
		typename R::acc sum[L::VECTORS];
		TP_NO_UNROLL
		for (int first = 0; first < a.nranks; first += L::PEERS) {
			tp_four v[L::PEERS][L::VECTORS];
			tp_unit_take<L>(a, k, first, 0, epoch, u.at, u.mine(), v);
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				if (first + q >= a.nranks) break;
				TP_UNROLL
				for (int i = 0; i < L::VECTORS; i++) {
					tp_four x = first + q == a.rank ? own[i] : v[q][i];
					if (q == 0 && first == 0) reduction.first(sum[i], x);
					else reduction.more(sum[i], x);
				}
			}
		}
		if (!u.mine()) continue;
		tp_four result[L::VECTORS];
		TP_UNROLL
		for (int i = 0; i < L::VECTORS; i++) result[i] = reduction.last(sum[i]);
		tp_unit_store<L>((char *)a.output + (a.gathers ? a.rank * a.out_stride : 0) + from, tp_lines_left(a, a.rank, from), result);
		if (!a.gathers) continue;
		TP_NO_UNROLL
		for (int i = 1; i < a.nranks; i++) {
			int p = tp_lines_peer(a, i);
			L::push(L::place(tp_lines_slot<L>(a, p, a.rank, 1, epoch), u.at), result, epoch);
		}
	}
}

/* What the others have sent, to their places in OUTPUT. */
template <class L>
TP_DEVICE void tp_lines_collect(const tp_fused_args &a, tp_lines &k, uint32_t round, int phase)
{
	const uint32_t epoch = k.now + 1 + round;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		uint32_t from = tp_lines_from<L>(a, k, round, u.at);
		TP_NO_UNROLL
		for (int first = 0; first < a.nranks; first += L::PEERS) {
			tp_four v[L::PEERS][L::VECTORS];
			tp_unit_take<L>(a, k, first, phase, epoch, u.at, u.mine(), v);
			TP_UNROLL
			for (int q = 0; q < L::PEERS; q++) {
				int p = first + q;
				if (!u.mine() || p >= a.nranks || !tp_lines_takes_from(a, p)) continue;
				uint32_t left = phase ? tp_lines_left(a, p, from) : (uint32_t)a.slice_bytes - from;
				tp_unit_store<L>((char *)a.output + p * a.out_stride + from, left, v[q]);
			}
		}
	}
}

/* Two shots: round r + 1 is pushed before round r is gathered. */
template <class L, class R>
TP_DEVICE void tp_lines_run_reduce(const tp_fused_args &a)
{
	const R reduction(a.reduce);
	tp_lines k = tp_lines_begin<L>(a);
	const bool all = a.pattern == TP_FUSED_ALL, root = a.rank == a.root;
	TP_NO_UNROLL
	for (uint32_t round = 0; round <= k.rounds; round++) {
		const bool last = round && round + 1 == k.rounds;
		if (round < k.rounds) {
			tp_lines_open(a, k, round);
			if (all && last && !a.gathers) tp_block_sync();
			if (all || !root) tp_lines_push<L>(a, k, reduction, round);
		}
		if (a.gathers && round) tp_lines_collect<L>(a, k, round - 1, 1);
		if (round == k.rounds) break;
		if (last && a.gathers) tp_block_sync();
		if (all || root) tp_lines_reduce<L>(a, k, reduction, round);
		if (root && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1 + round);
	}
	if (all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1);
	tp_lines_end(a, k);
}

/* What a rank gives to itself. */
template <class L>
TP_DEVICE void tp_lines_keep(const tp_fused_args &a, const tp_lines &k, uint32_t round)
{
	const char *from = (const char *)a.input + a.rank * a.in_stride;
	char *to = (char *)a.output + a.rank * a.out_stride;
	if (from == to || (a.pattern != TP_FUSED_ALL && a.rank != a.root)) return;
	TP_NO_UNROLL
	for (tp_unit<L> u(a, k, round); u.more(); u.next()) {
		if (!u.mine()) continue;
		uint32_t at = tp_lines_from<L>(a, k, round, u.at);
		tp_four v[L::VECTORS];
		tp_unit_load<L>(from + at, (uint32_t)a.slice_bytes - at, v);
		tp_unit_store<L>(to + at, (uint32_t)a.slice_bytes - at, v);
	}
}

template <class L>
TP_DEVICE void tp_lines_run_copy(const tp_fused_args &a)
{
	tp_lines k = tp_lines_begin<L>(a);
	const bool all = a.pattern == TP_FUSED_ALL;
	TP_NO_UNROLL
	for (uint32_t round = 0; round < k.rounds; round++) {
		tp_lines_open(a, k, round);
		if (all && round && round + 1 == k.rounds) tp_block_sync();
		tp_lines_push<L>(a, k, tp_raw(), round);
		tp_lines_keep<L>(a, k, round);
		tp_lines_collect<L>(a, k, round, 0);
		if (!all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1 + round);
	}
	if (all && tp_block() == 0) tp_lines_check_heads(a, k, k.now + 1);
	tp_lines_end(a, k);
}

#endif
