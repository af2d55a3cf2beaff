/* Ends of links in device memory. Kernels keep an end's counters themselves, so an end is uploaded once and never read back. */
#include "exec/cuda/internal.h"

_Static_assert(sizeof(struct tp_dev_loan) == sizeof(struct tp_link_loan) && (int)TP_DEV_LOANS == TP_LINK_LOANS, "kernels know the table of loans");
/* As lend.h has them. */
_Static_assert(offsetof(struct tp_slot, tag) == 2 * sizeof(uint32_t) && offsetof(struct tp_slot, kind) == 3 * sizeof(uint32_t) && TP_SLOT_LENT == 2, "kernels know how a slot says that it is lent");
_Static_assert(offsetof(struct tp_slot, data) + offsetof(struct tp_slot_lent, addr) == 6 * sizeof(uint32_t), "kernels know where the address of what is lent lies");

enum { TOKEN_SLOTS = 8, LOCAL_SLOTS = 2, RING_LINE = 128 };

/* Of channel 0; the other channels' follow. */
static size_t end_index(const struct tp_cuda_exec *exec, int lane_class, int from, int to)
{
	bool receives = to == exec->boot->rank;
	size_t peer = (size_t)(receives ? from : to);
	return ((peer * 2 + receives) * TP_LINK_CLASSES + (size_t)lane_class) * (size_t)exec->nchannels;
}

/* The table is there once it is known which devices read GPU memory, which is after the executor. */
static ncclResult_t upload_loans(struct tp_cuda_exec *exec)
{
	uint64_t table = tp_links_loan_table(exec->links);
	if (exec->knows_loans) return ncclSuccess;
	TP_TRY(tp_cuda_upload(exec, exec->comm + offsetof(struct tp_dev_comm, loans), &table, sizeof(table)));
	exec->knows_loans = true;
	return ncclSuccess;
}

ncclResult_t tp_cuda_link_end(struct tp_cuda_exec *exec, int channel, int lane_class, int from, int to, uint64_t *out)
{
	uint64_t *ends = &exec->ends[end_index(exec, lane_class, from, to)];
	if (ends[channel]) {
		*out = ends[channel];
		return ncclSuccess;
	}
	/* The place of one channel's end says where all lie. */
	uint64_t first = 0;
	for (int c = 0; c < exec->nchannels && !first; c++)
		if (ends[c]) first = ends[c] - (uint64_t)c * sizeof(struct tp_dev_link);
	if (!first) TP_TRY(tp_cuda_take_memory(exec, (size_t)exec->nchannels * sizeof(struct tp_dev_link), "ends of links", &first));
	struct tp_device_link link;
	TP_TRY(tp_links_get_device(exec->links, channel, lane_class, from, to, &link));
	struct tp_dev_link end = { .slots = link.slots, .head = link.head, .flags = link.flags, .stride = link.stride, .flag_stride = link.flag_stride,
		.mask = link.mask, .capacity = link.capacity, .kind = (uint16_t)link.kind, .lends = link.lends, .peer = link.peer };
	if (link.lends) TP_TRY(upload_loans(exec));
	uint64_t at = first + (uint64_t)channel * sizeof(end);
	TP_TRY(tp_cuda_upload(exec, at, &end, sizeof(end)));
	exec->ends_lend[end_index(exec, lane_class, from, to) + (size_t)channel] = link.lends;
	*out = ends[channel] = at;
	return ncclSuccess;
}

bool tp_cuda_link_lends(const struct tp_cuda_exec *exec, int channel, int lane_class, int from, int to)
{
	return exec->ends_lend[end_index(exec, lane_class, from, to) + (size_t)channel];
}

uint32_t tp_cuda_find_loan(const struct tp_cuda_exec *exec, const void *buffer, size_t bytes, struct tp_link_loan *range)
{
	uint32_t index;
	return tp_links_find_loan(exec->links, buffer, bytes, range, &index) ? index + 1 : 0;
}

ncclResult_t tp_cuda_local_ends(struct tp_cuda_exec *exec, int channel, bool token, int number, uint64_t *sender, uint64_t *receiver)
{
	if (number >= TP_CUDA_LOCAL_LINKS)
		return TP_FAIL(ncclInternalError, "rank %d: a program has more than %d rings between its lanes", exec->boot->rank, TP_CUDA_LOCAL_LINKS);
	uint64_t *ends = &exec->local_ends[((size_t)channel * 2 + token) * TP_CUDA_LOCAL_LINKS + (size_t)number];
	if (!*ends) {
		uint32_t nslots = token ? TOKEN_SLOTS : LOCAL_SLOTS;
		size_t stride = token ? RING_LINE : tp_align_up(sizeof(struct tp_slot) + TP_CUDA_LOCAL_BYTES, RING_LINE);
		uint64_t ring, at;
		TP_TRY(tp_cuda_take_memory(exec, RING_LINE + nslots * stride, "a ring between lanes", &ring));
		TP_TRY(tp_cuda_take_memory(exec, 2 * sizeof(struct tp_dev_link), "ends of links", &at));
		struct tp_dev_link link = { .slots = ring + RING_LINE, .head = ring, .flags = ring + RING_LINE, .stride = (uint32_t)stride,
			.flag_stride = (uint32_t)stride, .mask = nslots - 1, .capacity = token ? 0 : TP_CUDA_LOCAL_BYTES, .kind = TP_LINK_SELF, .peer = exec->boot->rank };
		TP_TRY(tp_cuda_upload(exec, at, (struct tp_dev_link[2]){ link, link }, 2 * sizeof(link)));
		*ends = at;
	}
	*sender = *ends;
	*receiver = *ends + sizeof(struct tp_dev_link);
	return ncclSuccess;
}
