/* A request's segments as memory: pinned while a carrier moves them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/fault.h"
#include "verbs/internal.h"

int tp_sge_enter(uint32_t pd, const struct ibv_sge *sge, uint32_t num_sge, uint32_t access, struct tp_span *spans)
{
	int count = 0;
	if (num_sge && tp_fault(TP_FAULT_PROTECTION, "", 0))
		return -1;
	for (uint32_t i = 0; i < num_sge; i++) {
		if (!sge[i].length)
			continue;
		struct tp_span *span = &spans[count];
		if (tp_key_enter(sge[i].lkey, pd, 0, sge[i].addr, sge[i].length, access, &span->grip)) {
			tp_span_leave(spans, count);
			return -1;
		}
		span->bytes = sge[i].length;
		count++;
	}
	return count;
}

void tp_span_leave(struct tp_span *spans, int count)
{
	for (int i = 0; i < count; i++)
		tp_key_leave(&spans[i].grip);
}

int tp_wqe_enter(struct tp_qp *qp, struct tp_wqe *wqe, uint32_t access, struct tp_span *spans)
{
	if (!wqe->inline_bytes)
		return tp_sge_enter(qp->pd->id, wqe->sge, wqe->num_sge, access, spans);
	spans[0] = (struct tp_span){ .grip = { .addr = tp_wqe_inline(&qp->sq, wqe) }, .bytes = wqe->inline_bytes };
	return 1;
}

/* Walks the spans from offset on; write: into them. */
static int copy(const struct tp_span *spans, int count, uint64_t offset, uint8_t *outside, size_t bytes, bool write)
{
	for (int i = 0; i < count && bytes; i++) {
		if (offset >= spans[i].bytes) {
			offset -= spans[i].bytes;
			continue;
		}
		size_t part = TP_MIN(bytes, (size_t)(spans[i].bytes - offset));
		int error = write ? tp_grip_write(&spans[i].grip, offset, outside, part) : tp_grip_read(&spans[i].grip, offset, outside, part);
		if (error)
			return error;
		outside += part;
		bytes -= part;
		offset = 0;
	}
	return bytes ? EFAULT : 0;
}

int tp_span_read(const struct tp_span *spans, int count, uint64_t offset, void *to, size_t bytes)
{
	return copy(spans, count, offset, to, bytes, false);
}

int tp_span_write(const struct tp_span *spans, int count, uint64_t offset, const void *from, size_t bytes)
{
	return copy(spans, count, offset, (uint8_t *)(uintptr_t)from, bytes, true);
}

static bool any_device(const struct tp_span *spans, int count)
{
	for (int i = 0; i < count; i++)
		if (spans[i].grip.flags & TP_KEY_DEVICE)
			return true;
	return false;
}

int tp_ahead_read(struct tp_ahead *ahead, const struct tp_span *spans, int count, uint64_t offset, void *to, size_t bytes, uint64_t more)
{
	enum { MOST = 256 << 10 };
	if (!any_device(spans, count))
		return tp_span_read(spans, count, offset, to, bytes);
	if (!ahead->data)
		ahead->data = malloc(MOST);
	if (!ahead->data)
		return tp_span_read(spans, count, offset, to, bytes);
	if (offset < ahead->offset || offset + bytes > ahead->offset + ahead->bytes) {
		ahead->offset = offset;
		ahead->bytes = TP_MAX(bytes, (size_t)TP_MIN(more, (uint64_t)MOST));
		int error = tp_span_read(spans, count, offset, ahead->data, ahead->bytes);
		if (error)
			return error;
	}
	memcpy(to, ahead->data + (offset - ahead->offset), bytes);
	return 0;
}

void tp_ahead_end(struct tp_ahead *ahead)
{
	free(ahead->data);
	ahead->data = NULL;
}
