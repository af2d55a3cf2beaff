/* One step: a value made of its sources, given to all its destinations.
 *
 * Values are made where they are wanted: reduced straight from slots, peers' memory and buffers into the buffer or the
 * first slot they go to. Where the sources lie in other processes they are read in blocks that stay in the nearest caches.
 * What is large goes on by reference to the buffer that holds it, or, where it lies in no buffer and fits no slot, to a
 * staging ring of our own. */
#include <stdlib.h>
#include <string.h>

#include "exec/host/internal.h"

struct move {
	struct tp_exec *exec;
	struct tp_exec_op *op;
	struct tp_exec_lane *lane;
	struct tp_exec_step *step;
	size_t bytes;
	bool total_first;           /* send/recv, first chunk: the total travels in front */
	uint64_t raw_mask;
	uint32_t nremote;
};

static unsigned char *buffer_at(const struct move *m, const struct tp_exec_operand *o)
{
	size_t offset;
	switch (o->where) {
	case TP_INPUT:
		tp_exec_chunk(m->lane, o->block, o->piece, &offset);
		return (unsigned char *)(uintptr_t)m->lane->input + offset;
	case TP_OUTPUT:
		tp_exec_chunk(m->lane, o->block, o->piece, &offset);
		return m->lane->output + offset;
	default:
		return m->lane->program->scratch + o->block * m->lane->geometry->chunk_bytes;
	}
}

static ncclResult_t fail_size(const struct move *m, const struct tp_link *link, size_t theirs, size_t ours)
{
	if (m->op->plan->p2p)
		return TP_FAIL(ncclInvalidUsage, "rank %d receives %zu bytes from rank %d, which sends %zu: both sides of a send and receive must "
			"say the same size", m->exec->boot->rank, ours, link->peer, theirs);
	return TP_FAIL(ncclInvalidUsage, "rank %d expects a chunk of %zu bytes from rank %d on channel %d in this %s, and %zu came: the ranks' "
		"calls differ", m->exec->boot->rank, ours, link->peer, m->lane->program->channel, tp_coll_name(m->op->plan->spec.coll), theirs);
}

/* The chunk in a slot: where it lies; checked against what this step expects. */
static ncclResult_t open_slot(struct move *m, struct tp_link *link, bool size_known, struct tp_exec_source *out)
{
	struct tp_slot *slot = tp_link_peek(link);
	if (slot->tag != m->op->call.tag)
		return TP_FAIL(ncclInvalidUsage, "rank %d: what came from rank %d on channel %d belongs to another call (tag 0x%08x) than this %s (tag "
			"0x%08x): the ranks' calls differ", m->exec->boot->rank, link->peer, m->lane->program->channel, slot->tag,
			tp_coll_name(m->op->plan->spec.coll), m->op->call.tag);
	const struct tp_exec_ref *ref = (const struct tp_exec_ref *)slot->data;
	size_t bytes = slot->bytes;
	out->remote = NULL;
	if (slot->kind == TP_SLOT_REF) {
		out->at = (const void *)(uintptr_t)ref->addr;
		out->addr = ref->addr;
		if (!link->same_process) out->remote = link;
		if (m->total_first && ref->total != m->lane->geometry->block_bytes)
			return fail_size(m, link, ref->total, m->lane->geometry->block_bytes);
	} else {
		out->at = slot->data;
		if (m->total_first) {
			uint64_t total;
			memcpy(&total, slot->data, sizeof(total));
			if (bytes < TP_TOTAL_BYTES || total != m->lane->geometry->block_bytes)
				return fail_size(m, link, total, m->lane->geometry->block_bytes);
			out->at = slot->data + TP_TOTAL_BYTES;
			bytes -= TP_TOTAL_BYTES;
		}
		if (slot->bytes > link->capacity) return fail_size(m, link, slot->bytes, m->bytes);
	}
	if (!size_known && bytes <= m->lane->geometry->chunk_bytes) m->bytes = bytes;
	if (bytes != m->bytes) return fail_size(m, link, bytes, m->bytes);
	return ncclSuccess;
}

static ncclResult_t open_sources(struct move *m)
{
	const struct tp_exec_step *step = m->step;
	bool size_known = step->size_from != TP_SIZE_SLOT;
	size_t offset;
	if (step->size_from == TP_SIZE_CHUNK) m->bytes = tp_exec_chunk(m->lane, step->size_block, step->size_piece, &offset);
	else if (step->size_from == TP_SIZE_SCRATCH) m->bytes = m->lane->program->scratch_bytes[step->size_block];
	for (int i = 0; i < step->nsrc; i++) {
		const struct tp_exec_operand *o = &step->src[i];
		struct tp_exec_source *source = &m->exec->sources[i];
		if (o->end) {
			TP_TRY(open_slot(m, o->end->link, size_known, source));
			size_known = true;
			m->nremote += source->remote != NULL;
		} else {
			*source = (struct tp_exec_source){ .at = buffer_at(m, o) };
			if (o->where == TP_INPUT && m->op->pre && i < 64) m->raw_mask |= 1ull << i;
		}
	}
	return ncclSuccess;
}

static bool goes_by_ref(const struct move *m, const struct tp_exec_operand *o)
{
	const struct tp_link *link = o->end->link;
	if (link->same_process) return m->bytes >= TP_REF_BYTES_SAME_PROCESS;
	return link->by_ref && m->bytes >= m->op->ref_bytes;
}

static size_t inline_bytes(const struct move *m) { return m->bytes + (m->total_first ? TP_TOTAL_BYTES : 0); }

/* Where a chunk that must be copied goes: the link's slot, or its staging ring where the slot is too small. */
static ncclResult_t place_copy(struct move *m, const struct tp_exec_operand *o, unsigned char **out, bool *staged)
{
	struct tp_exec_end *end = o->end;
	struct tp_link *link = end->link;
	*staged = inline_bytes(m) > link->capacity;
	if (!*staged) {
		*out = tp_link_claim(link)->data + (m->total_first ? TP_TOTAL_BYTES : 0);
		return ncclSuccess;
	}
	if (!link->by_ref && !link->same_process)
		return TP_FAIL(ncclInternalError, "rank %d: a chunk of %zu bytes for rank %d doesn't fit a slot of %zu", m->exec->boot->rank, m->bytes,
			link->peer, link->capacity);
	if (end->staging_bytes < m->bytes) {
		/* Made for the operation's largest chunk, so nothing refers to a smaller ring: operations end with all their references
		 * read. */
		size_t each = tp_align_up(m->op->plan->p2p ? TP_MAX(m->op->limit, m->bytes) : m->lane->geometry->chunk_bytes, TP_CACHE_LINE);
		free(end->staging);
		end->staging_bytes = 0;
		end->staging = malloc(each * (link->mask + 1));
		if (!end->staging)
			return TP_FAIL(ncclSystemError, "rank %d: no memory for %u chunks of %zu bytes on the way to rank %d", m->exec->boot->rank,
				link->mask + 1, each, link->peer);
		end->staging_bytes = each;
	}
	*out = end->staging + (link->next & link->mask) * end->staging_bytes;
	return ncclSuccess;
}

static ncclResult_t publish(struct move *m, const struct tp_exec_operand *o, const void *ref)
{
	struct tp_link *link = o->end->link;
	struct tp_slot *slot = tp_link_claim(link);
	slot->tag = m->op->call.tag;
	slot->kind = ref ? TP_SLOT_REF : TP_SLOT_INLINE;
	slot->bytes = (uint32_t)(ref ? m->bytes : inline_bytes(m));
	if (ref) *(struct tp_exec_ref *)slot->data = (struct tp_exec_ref){ (uintptr_t)ref, m->lane->geometry->block_bytes };
	else if (m->total_first) memcpy(slot->data, &(uint64_t){ m->lane->geometry->block_bytes }, TP_TOTAL_BYTES);
	tp_link_publish(link, slot);
	if (!ref) tp_exec_own_next(link, m->bytes);
	return ref || o->end->net ? tp_exec_op_mark(m->exec, m->op, o->end) : ncclSuccess;
}

/* Sent from where it lies: what the plan leaves unchanged until it has gone, over a network, if it is worth that and a copy would go into a slot. Whether
 * the link takes that memory, tp_link_lend says. */
static bool may_be_lent(const struct move *m, const struct tp_exec_operand *o)
{
	return o->by_ref && o->end->net && m->bytes >= TP_LEND_BYTES && inline_bytes(m) <= o->end->link->capacity;
}

static ncclResult_t publish_loan(struct move *m, const struct tp_exec_operand *o, const void *memory, void *grant)
{
	struct tp_link *link = o->end->link;
	struct tp_slot *slot = tp_link_claim(link);
	struct tp_slot_lent *lent = (struct tp_slot_lent *)slot->data;
	*lent = (struct tp_slot_lent){ .addr = (uintptr_t)memory, .grant = grant, .first_bytes = m->total_first ? TP_TOTAL_BYTES : 0 };
	if (m->total_first) memcpy(lent->first, &(uint64_t){ m->lane->geometry->block_bytes }, TP_TOTAL_BYTES);
	slot->tag = m->op->call.tag;
	slot->kind = TP_SLOT_LENT;
	slot->bytes = (uint32_t)inline_bytes(m);
	tp_link_publish(link, slot);
	return tp_exec_op_mark(m->exec, m->op, o->end);
}

static ncclResult_t grow_blocks(struct tp_exec *exec, size_t bytes)
{
	if (bytes <= exec->blocks_room) return ncclSuccess;
	free(exec->blocks);
	exec->blocks_room = 0;
	exec->blocks = aligned_alloc(TP_CACHE_LINE, tp_align_up(bytes, TP_CACHE_LINE));
	if (!exec->blocks)
		return TP_FAIL(ncclSystemError, "rank %d: no memory for %zu bytes of blocks to reduce", exec->boot->rank, bytes);
	exec->blocks_room = bytes;
	return ncclSuccess;
}

static void fill_reduce(const struct move *m, bool final, void *dst, uint64_t raw_mask, int nsrc, size_t bytes)
{
	tp_reduce_run(&m->op->call.reduce, final && m->op->post, dst, m->exec->addresses, nsrc, raw_mask, bytes);
}

/* Sources that lie elsewhere, or are to be scaled and rounded first, come into blocks of our own. */
static ncclResult_t reduce_blocks(struct move *m, unsigned char *dst, bool final)
{
	struct tp_exec *exec = m->exec;
	int nsrc = m->step->nsrc;
	size_t block = TP_MIN(TP_MAX(((size_t)1 << 20) / (size_t)nsrc, 4096), TP_BLOCK_BYTES) & ~(size_t)63;
	TP_TRY(grow_blocks(exec, block * (size_t)nsrc));
	for (size_t at = 0; at < m->bytes; at += block) {
		size_t bytes = TP_MIN(block, m->bytes - at);
		uint64_t raw_mask = m->raw_mask;
		for (int i = 0; i < nsrc; i++) {
			const struct tp_exec_source *source = &exec->sources[i];
			unsigned char *own = exec->blocks + block * (size_t)i;
			bool raw = m->op->pre && m->step->src[i].where == TP_INPUT;
			if (source->remote) {
				TP_TRY(tp_link_read(source->remote, own, source->addr + at, bytes));
			} else if (raw && nsrc > 1 && (m->op->round_first || i >= 64)) {
				const void *from = (const char *)source->at + at;
				tp_reduce_run(&m->op->call.reduce, false, own, &from, 1, 1, bytes);
				if (i < 64) raw_mask &= ~(1ull << i);
			} else {
				exec->addresses[i] = (const char *)source->at + at;
				continue;
			}
			exec->addresses[i] = own;
		}
		fill_reduce(m, final, dst + at, raw_mask, nsrc, bytes);
	}
	return ncclSuccess;
}

static ncclResult_t reduce_into(struct move *m, unsigned char *dst)
{
	bool final = m->step->flags & TP_STEP_FINAL;
	if (!m->bytes) return ncclSuccess;
	if (m->nremote || (m->raw_mask && m->op->round_first) || m->step->nsrc > 64) return reduce_blocks(m, dst, final);
	for (int i = 0; i < m->step->nsrc; i++) m->exec->addresses[i] = m->exec->sources[i].at;
	fill_reduce(m, final, dst, m->raw_mask, m->step->nsrc, m->bytes);
	return ncclSuccess;
}

static ncclResult_t copy_into(struct move *m, unsigned char *dst, bool past_caches)
{
	const struct tp_exec_source *source = &m->exec->sources[0];
	if (source->remote) return tp_link_read(source->remote, dst, source->addr, m->bytes);
	if (past_caches && source->at != dst) tp_exec_stream_copy(dst, source->at, m->bytes);
	else if (source->at != dst && m->bytes) memcpy(dst, source->at, m->bytes);
	return ncclSuccess;
}

/* The value goes into its buffers; *value: where it can be read from, NULL where it still has to be made. */
static ncclResult_t write_buffers(struct move *m, bool plain, const unsigned char **value)
{
	const struct tp_exec_step *step = m->step;
	*value = NULL;
	for (int i = 0; i < step->nbuf; i++) {
		unsigned char *dst = buffer_at(m, &step->buf[i]);
		if (step->buf[i].where == TP_SCRATCH) m->lane->program->scratch_bytes[step->buf[i].block] = m->bytes;
		if (*value) {
			if (m->bytes && *value != dst) memcpy(dst, *value, m->bytes);
			continue;
		}
		bool last = m->op->streams && step->buf[i].where == TP_OUTPUT && !step->nout;
		TP_TRY(plain ? copy_into(m, dst, last) : reduce_into(m, dst));
		*value = dst;
	}
	if (!*value && plain && !m->exec->sources[0].remote) *value = m->exec->sources[0].at;
	return ncclSuccess;
}

static ncclResult_t give_links(struct move *m, bool plain, const unsigned char *value)
{
	const struct tp_exec_step *step = m->step;
	/* The chunk that plan.h says a reference is to; NULL where it doesn't hold the value as it is. */
	bool from_source = step->nsrc == 1 && step->src[0].where != TP_LINK && !(step->flags & TP_STEP_REDUCE);
	const void *ref = from_source ? (plain ? m->exec->sources[0].at : NULL) : step->nbuf ? value : NULL;
	bool own = ref && (from_source ? step->src[0].where : step->buf[0].where) == TP_SCRATCH;
	void *grant;
	for (int i = 0; i < step->nout; i++) {
		const struct tp_exec_operand *o = &step->out[i];
		if (ref && o->by_ref && goes_by_ref(m, o)) {
			TP_TRY(publish(m, o, ref));
			continue;
		}
		if (ref && !own && may_be_lent(m, o) && tp_link_lend(o->end->link, ref, m->bytes, &grant)) {
			TP_TRY(publish_loan(m, o, ref, grant));
			continue;
		}
		unsigned char *dst = NULL;
		bool staged;
		TP_TRY(place_copy(m, o, &dst, &staged));
		if (value) {
			tp_exec_fill(dst, value, m->bytes);
		} else {
			TP_TRY(plain ? copy_into(m, dst, false) : reduce_into(m, dst));
			value = dst;
		}
		TP_TRY(publish(m, o, staged ? dst : NULL));
	}
	return ncclSuccess;
}

/* What goes into a slot and past the caches into one buffer: made in the slot, which is warm, and copied from there. Made in the buffer each of its
 * lines would be read first. Not what is then sent from there. */
static bool is_made_in_slot(const struct move *m)
{
	const struct tp_exec_step *step = m->step;
	if (!m->op->streams || step->nbuf != 1 || step->buf[0].where != TP_OUTPUT || step->nout != 1 || !(step->flags & TP_STEP_REDUCE)) return false;
	const struct tp_exec_operand *o = &step->out[0];
	return o->end->net && inline_bytes(m) <= o->end->link->capacity &&
		!(may_be_lent(m, o) && tp_link_prepare_loan(o->end->link, buffer_at(m, &step->buf[0]), m->bytes));
}

static ncclResult_t make_in_slot(struct move *m)
{
	const struct tp_exec_operand *o = &m->step->out[0];
	unsigned char *dst = NULL;
	bool staged;
	TP_TRY(place_copy(m, o, &dst, &staged));
	TP_TRY(reduce_into(m, dst));
	tp_exec_stream_copy(buffer_at(m, &m->step->buf[0]), dst, m->bytes);
	return publish(m, o, NULL);
}

ncclResult_t tp_exec_step_move(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_lane *lane, struct tp_exec_step *step)
{
	struct move m = { .exec = exec, .op = op, .lane = lane, .step = step, .total_first = op->plan->p2p && lane->round == 0 };
	if (step->nsrc) {
		TP_TRY(open_sources(&m));
		bool plain = step->nsrc == 1 && !m.raw_mask && !(op->post && step->flags & TP_STEP_FINAL);
		const unsigned char *value;
		if (is_made_in_slot(&m)) {
			TP_TRY(make_in_slot(&m));
		} else {
			TP_TRY(write_buffers(&m, plain, &value));
			if (step->nout) TP_TRY(give_links(&m, plain, value));
		}
		for (int i = 0; i < step->nsrc; i++)
			if (step->src[i].end) tp_link_release(step->src[i].end->link);
	}
	for (int i = 0; i < step->ntake; i++) tp_link_release(step->take[i].end->link);
	for (int i = 0; i < step->ngive; i++) {
		struct tp_link *link = step->give[i].end->link;
		tp_link_publish(link, tp_link_claim(link));
	}
	return ncclSuccess;
}
