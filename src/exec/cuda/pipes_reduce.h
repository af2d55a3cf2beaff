/* The part of pipes_move.h, which includes it, that reduces: what has come of a chunk, and one's own, are fed to shared memory in bulk, and reduced
 * from there to a tile, from where they are sent. */
#ifndef TP_EXEC_CUDA_PIPES_REDUCE_H
#define TP_EXEC_CUDA_PIPES_REDUCE_H

/* Where it isn't a reduction: what comes from one source. */
struct tp_pipe_plain {
	struct acc { tp_four v; };
	TP_OF_OBJECT explicit tp_pipe_plain(const tp_dev_reduce &) { }
	TP_OF_OBJECT bool scales() const { return false; }
	TP_OF_OBJECT tp_four scale(tp_four v) const { return v; }
	TP_OF_OBJECT void first(acc &sum, const tp_four &v) const { sum.v = v; }
	TP_OF_OBJECT void more(acc &, const tp_four &) const { }
	TP_OF_OBJECT tp_four last(acc &sum) const { return sum.v; }
};

TP_DEVICE char *tp_pipe_feed_stage(const tp_pipe_args &a, char *feeds, uint32_t feeder, int rank)
{ return feeds + (feeder * (uint32_t)a.nranks + (uint32_t)rank) * a.chunk; }

/* Feeding warp `number`: every a.feeders'th chunk. One's own, where it can't be loaded in bulk, is left to those who reduce. */
TP_FAR void tp_pipe_feed(tp_pipes_shared &sh, const tp_pipe_args &a, char *feeds, int number)
{
	uint32_t parity = 0;
	TP_NO_UNROLL
	for (uint32_t c = (uint32_t)number; a.sources && c < sh.own.chunks; c += a.feeders, parity ^= 1) {
		const uint32_t bytes = tp_pipe_bytes(a, sh.own, c), whole = (bytes + 15) & ~15u;
		/* What the stages held before has been reduced. */
		for (unsigned turn = 0; tp_warp_any(tp_block_load(&sh.made) + a.feeders <= c); turn++)
			if (tp_warp_any(!tp_pipe_wait(&sh.stopped, a, turn))) return;
		bool go = true;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks; q += TP_WARP) {
			const bool own = q == a.nranks - 1;
			const int p = own ? (int)a.rank : tp_pipe_peer(a, q);
			uint64_t *bar = &sh.fed[number][p];
			if (!go || !tp_pipe_has(a.sources, p)) continue;
			if (own) {
				if (!tp_pipe_is_bulk(a, bytes)) continue;
				tp_bulk_load(tp_pipe_feed_stage(a, feeds, (uint32_t)number, p), tp_pipe_at(a, sh.own, c), bytes, bar);
				tp_bulk_loaded(bar, parity);
				continue;
			}
			go = tp_pipe_await(&sh.stopped, a, 0, p, sh.received[0][q] + c + 1, a.tag, TP_BLOCK_TAG) != TP_PIPE_STOP;
			if (!go || !bytes) continue;
			tp_bulk_acquired();
			tp_bulk_load(tp_pipe_feed_stage(a, feeds, (uint32_t)number, p), tp_pipe_slot(a, a.rank, p, 0, sh.received[0][q] + c + 1), whole, bar);
			tp_bulk_loaded(bar, parity);
		}
		if (!tp_warp_all(go)) return;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP)
			if (tp_pipe_has(a.sources, tp_pipe_peer(a, q))) tp_pipe_consumed(a, 0, tp_pipe_peer(a, q), sh.received[0][q] + c + 1);
		tp_warp_sync();
		if (tp_pipe_lane() == 0) tp_block_set(&sh.ready[number], c + 1);       /* seen by tp_pipe_reduce */
	}
}

/* D vectors of a chunk, `step` bytes apart, of all sources in rank order. own: one's own where it isn't fed. */
template <int D, class R>
TP_DEVICE void tp_pipe_reduce_vectors(const tp_pipe_args &a, const R &reduction, const char *stages, const char *own, char *tile, char *out, uint32_t bytes,
	uint32_t i, uint32_t step)
{
	typename R::acc sum[D];
	bool begun = false;
	TP_NO_UNROLL
	for (int p = 0; p < a.nranks; p++) {
		if (!tp_pipe_has(a.sources, p)) continue;
		const char *from = stages + (uint32_t)p * a.chunk;
		tp_four v[D];
		TP_UNROLL
		for (int d = 0; d < D; d++) {
			const uint32_t at = i + (uint32_t)d * step, left = bytes - at;
			if (at >= bytes) continue;
			v[d] = own && p == a.rank ? tp_user_load(own + at, left < 16 ? left : 16) : *(const tp_four *)(from + at);
			if (p == a.rank && reduction.scales()) v[d] = reduction.scale(v[d]);
			if (begun) reduction.more(sum[d], v[d]);
			else reduction.first(sum[d], v[d]);
		}
		begun = true;
	}
	TP_UNROLL
	for (int d = 0; d < D; d++) {
		const uint32_t at = i + (uint32_t)d * step, left = bytes - at;
		if (at >= bytes) continue;
		const tp_four result = reduction.last(sum[d]);
		*(tp_four *)(tile + at) = result;
		if (out) tp_user_store(out + at, result, left < 16 ? left : 16);
	}
}

template <class R>
TP_FAR void tp_pipe_reduce(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, const R &reduction, char *feeds, char *tiles, const tp_pipe_group &g)
{
	enum { D = 2 };
	char *to = tp_pipe_result(a, k);
	const uint32_t step = (uint32_t)g.warps * TP_WARP * 16;
	TP_NO_UNROLL
	for (uint32_t c = 0; c < k.chunks; c++) {
		const uint32_t feeder = c % a.feeders;
		if (g.thread == 0) {
			bool go = true;
			for (unsigned turn = 0; go && tp_block_load(&sh.ready[feeder]) <= c; turn++) go = tp_pipe_wait(&sh.stopped, a, turn);
			for (unsigned turn = 0; go && tp_block_load(&sh.freed[c % a.tiles]) < c / a.tiles; turn++) go = tp_pipe_wait(&sh.stopped, a, turn);
			sh.go[g.number] = go;
		}
		tp_pipe_meet(g);
		if (!sh.go[g.number]) return;
		const uint32_t bytes = tp_pipe_bytes(a, sh.own, c);
		const bool bulk = tp_pipe_is_bulk(a, bytes);
		char *const tile = tiles + c % a.tiles * a.chunk, *const out = a.stores && !bulk ? to + (uint64_t)c * a.chunk : nullptr;
		const char *const stages = tp_pipe_feed_stage(a, feeds, feeder, 0), *const own = bulk ? nullptr : tp_pipe_at(a, sh.own, c);
		TP_NO_UNROLL
		for (uint32_t i = (uint32_t)g.thread * 16; i < bytes; i += D * step) tp_pipe_reduce_vectors<D>(a, reduction, stages, own, tile, out, bytes, i, step);
		tp_bulk_fence();
		tp_pipe_meet(g);
		if (g.thread == 0) tp_block_set(&sh.made, c + 1);     /* seen by tp_pipe_send and tp_pipe_feed */
	}
}

#endif
