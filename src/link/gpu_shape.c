/* Where things lie in a rank's arena:
 *
 *   board    a line for each place on the host: words by which peers show that their stores arrive
 *   heads    a line for each ring that this rank sends to: its receiver says there how far it is
 *   wide     rings of class 0 from the place before (in the channel's order), one a channel: what a ring algorithm streams through
 *   rings    all others that this rank receives from
 *   region   for fused kernels
 *
 * The bandwidth of a ring needs large chunks (each costs a fence and a flag, some 1.5 us, and at 32 channels a chunk of 128 KB takes
 * 12 us over NVLink); all other links share what is left, and all pairs together have as much in flight. */
#include "link/internal.h"

#define LINE 128
#define CAPACITY_MAX ((size_t)256 << 10)
#define CAPACITY_MIN ((size_t)1024)
#define WIDE_SLOTS 4
#define FEW_SLOTS_BELOW ((size_t)16 << 10)

static size_t slot_stride(size_t capacity) { return tp_align_up(sizeof(struct tp_slot) + capacity, LINE); }

/* The largest capacity of which nslots slots fit in bytes, in pages where it is as large. */
static size_t fit_capacity(size_t bytes, uint32_t nslots)
{
	size_t stride = bytes / nslots / LINE * LINE;
	size_t room = stride > sizeof(struct tp_slot) ? stride - sizeof(struct tp_slot) : 0;
	size_t capacity = room >= 4096 ? room / 4096 * 4096 : room / LINE * LINE;
	return TP_MIN(TP_MAX(capacity, CAPACITY_MIN), CAPACITY_MAX);
}

void tp_gpu_shape_fit(int nlocal, int largest_nlocal, int nchannels, size_t budget, size_t region_bytes, struct tp_gpu_shape *out)
{
	size_t rings = (size_t)TP_MAX(largest_nlocal - 1, 1) * nchannels * TP_LINK_CLASSES;
	size_t fixed = (size_t)LINE * (TP_GPU_LOCAL_MAX + (size_t)largest_nlocal * nchannels * TP_LINK_CLASSES);
	size_t usable = budget > fixed ? budget - fixed : 0;
	size_t wide_each = usable * 3 / 8 / (size_t)nchannels, each = usable * 5 / 8 / rings;
	struct tp_gpu_shape s = { .nlocal = nlocal, .nchannels = nchannels, .wide_nslots = WIDE_SLOTS };
	s.wide_capacity = fit_capacity(wide_each, s.wide_nslots);
	s.nslots = fit_capacity(each, 4) >= FEW_SLOTS_BELOW ? 4 : 2;
	s.capacity = fit_capacity(each, s.nslots);
	s.wide_capacity = TP_MAX(s.wide_capacity, s.capacity);
	s.stride = slot_stride(s.capacity);
	s.wide_stride = slot_stride(s.wide_capacity);
	size_t own_rings = (size_t)(nlocal - 1) * nchannels * TP_LINK_CLASSES;
	s.heads = (size_t)LINE * TP_GPU_LOCAL_MAX;
	s.wide = s.heads + (size_t)LINE * nlocal * nchannels * TP_LINK_CLASSES;
	s.rings = s.wide + (nlocal > 1 ? (size_t)nchannels * s.wide_nslots * s.wide_stride : 0);
	s.region = tp_align_up(s.rings + own_rings * s.nslots * s.stride, 4096);
	s.bytes = tp_align_up(s.region + region_bytes, 4096);
	*out = s;
}

/* The peer's number among the others of place own. */
static size_t among_others(int peer, int own) { return (size_t)(peer < own ? peer : peer - 1); }

struct tp_gpu_ring tp_gpu_shape_ring(const struct tp_gpu_shape *s, int channel, int lane_class, int from, int to)
{
	int next = s->next ? s->next[channel * s->nlocal + from] : (from + 1) % s->nlocal;
	if (lane_class == 0 && to == next)
		return (struct tp_gpu_ring){ s->wide + (size_t)channel * s->wide_nslots * s->wide_stride, s->wide_nslots, s->wide_stride, s->wide_capacity };
	size_t number = (among_others(from, to) * (size_t)s->nchannels + (size_t)channel) * TP_LINK_CLASSES + (size_t)lane_class;
	return (struct tp_gpu_ring){ s->rings + number * s->nslots * s->stride, s->nslots, s->stride, s->capacity };
}

size_t tp_gpu_shape_head(const struct tp_gpu_shape *s, int channel, int lane_class, int to)
{
	/* to's number among all, not among the others: `from` isn't known here, and one line too many costs nothing. */
	return s->heads + LINE * (((size_t)to * (size_t)s->nchannels + (size_t)channel) * TP_LINK_CLASSES + (size_t)lane_class);
}
