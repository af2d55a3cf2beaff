/* Copies between GPUs and the host for the card (gpu.h).
 *
 * Each context has a few lanes: a stream of its own that waits for no other (a copy on the legacy stream would wait for a kernel that waits
 * for that very copy), and pinned memory in two halves, one of which the GPU fills while the other is emptied. What takes long, or waits
 * for kernels, is done when the first region of a context is registered. A copy is over when its event is: only then does its caller
 * raise a completion or set a flag. A capture that is under way in the program forbids nothing of this: our calls are relaxed. */
#include "verbs/gpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

enum { LANES = 4, HALVES = 2, HALF_BYTES = 512 << 10 };

struct lane {
	pthread_mutex_t lock;
	CUstream stream;
	CUevent event[HALVES];
	uint8_t *half[HALVES];
};

struct tp_gpu_copier {
	struct tp_gpu_copier *next;
	CUcontext context;
	unsigned long long context_id;  /* a context made later may have the same address */
	int ordinal;
	struct lane lanes[LANES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_gpu_copier *copiers;
static pthread_mutex_t atomics = PTHREAD_MUTEX_INITIALIZER;

#define CALL(name, ...) calls(#name, tp_gpu_driver.name(__VA_ARGS__))
/* The first call that failed. */
struct failure { const char *call; CUresult error; };
static _Thread_local struct failure failure;

static bool calls(const char *name, CUresult error)
{
	if (error == CUDA_SUCCESS)
		return true;
	if (!failure.call)
		failure = (struct failure){ name, error };
	return false;
}

/* ---- into a context and out of it ---- */

struct visit { CUstreamCaptureMode mode; bool pushed; };

static bool enter(CUcontext context, struct visit *visit)
{
	failure = (struct failure){ NULL, CUDA_SUCCESS };
	visit->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	visit->pushed = CALL(CtxPushCurrent, context);
	return visit->pushed && CALL(ThreadExchangeStreamCaptureMode, &visit->mode);
}

static void leave(struct visit *visit)
{
	CUcontext old;
	if (!visit->pushed)
		return;
	CALL(ThreadExchangeStreamCaptureMode, &visit->mode);
	CALL(CtxPopCurrent, &old);
}

/* ---- copiers ---- */

static void close_lane(struct lane *lane)
{
	for (int i = 0; i < HALVES; i++) {
		if (lane->event[i])
			CALL(EventDestroy, lane->event[i]);
		if (lane->half[i])
			CALL(MemFreeHost, lane->half[i]);
	}
	if (lane->stream)
		CALL(StreamDestroy, lane->stream);
}

static bool open_lane(struct lane *lane)
{
	bool ok = CALL(StreamCreate, &lane->stream, CU_STREAM_NON_BLOCKING);
	pthread_mutex_init(&lane->lock, NULL);
	for (int i = 0; i < HALVES; i++) {
		ok = ok && CALL(EventCreate, &lane->event[i], CU_EVENT_DISABLE_TIMING);
		ok = ok && CALL(MemHostAlloc, (void **)&lane->half[i], HALF_BYTES, CU_MEMHOSTALLOC_PORTABLE);
	}
	return ok;
}

/* In the context. */
static struct tp_gpu_copier *make_copier(void)
{
	struct tp_gpu_copier *copier = tp_alloc(1, sizeof(*copier), "copies from and to a GPU");
	bool ok = copier != NULL;
	for (int i = 0; i < LANES && ok; i++)
		ok = open_lane(&copier->lanes[i]);
	if (copier && !ok) {
		for (int i = 0; i < LANES; i++)
			close_lane(&copier->lanes[i]);
		free(copier);
		return NULL;
	}
	return copier;
}

static unsigned long long id_of(CUcontext context)
{
	unsigned long long id = 0;
	return tp_gpu_driver.CtxGetId && tp_gpu_driver.CtxGetId(context, &id) == CUDA_SUCCESS ? id : 0;
}

/* A primary context is held, so that it outlives its last other user; one that the program made is the program's. */
static bool hold_context(CUcontext *context, int ordinal)
{
	CUcontext primary = NULL;
	unsigned int flags;
	int active = 0;
	CUdevice device;
	if (!CALL(DeviceGet, &device, ordinal) || !CALL(DevicePrimaryCtxGetState, device, &flags, &active))
		return false;
	if (*context && !active)
		return true;
	if (!CALL(DevicePrimaryCtxRetain, &primary, device))
		return false;
	if (*context && *context != primary)
		CALL(DevicePrimaryCtxRelease, device);
	else
		*context = primary;
	return true;
}

static struct tp_gpu_copier *find_copier(CUcontext context, int ordinal)
{
	for (struct tp_gpu_copier *one = copiers; one; one = one->next)
		if (one->context == context && one->ordinal == ordinal && one->context_id == id_of(context))
			return one;
	return NULL;
}

static struct tp_gpu_copier *open_copier(CUcontext context, int ordinal)
{
	struct visit visit;
	struct tp_gpu_copier *copier = enter(context, &visit) ? make_copier() : NULL;
	leave(&visit);
	if (!copier)
		return NULL;
	copier->context = context;
	copier->context_id = id_of(context);
	copier->ordinal = ordinal;
	copier->next = copiers;
	copiers = copier;
	TP_INFO(TP_NET, "memory of GPU %d is registered with the software card: its copy engine carries the data", ordinal);
	return copier;
}

int tp_gpu_copier(CUcontext context, int ordinal, uint64_t addr, uint64_t bytes, struct tp_gpu_copier **out)
{
	failure = (struct failure){ NULL, CUDA_SUCCESS };
	pthread_mutex_lock(&lock);
	struct tp_gpu_copier *found = context ? find_copier(context, ordinal) : NULL;
	if (!found && hold_context(&context, ordinal)) {
		found = find_copier(context, ordinal);
		if (!found)
			found = open_copier(context, ordinal);
	}
	pthread_mutex_unlock(&lock);
	if (!found) {
		if (!failure.call)
			return ENOMEM;
		tp_gpu_failed(failure.call, failure.error, addr, bytes);
		return failure.error == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : EFAULT;
	}
	*out = found;
	return 0;
}

void tp_gpu_copiers_forget(void)
{
	pthread_mutex_init(&lock, NULL);
	pthread_mutex_init(&atomics, NULL);
	copiers = NULL;
}

/* ---- lanes ---- */

static struct lane *take_lane(struct tp_gpu_copier *copier)
{
	static _Thread_local uint32_t last;
	for (uint32_t i = 0; i < LANES; i++)
		if (pthread_mutex_trylock(&copier->lanes[(last + i) % LANES].lock) == 0) {
			last = (last + i) % LANES;
			return &copier->lanes[last];
		}
	pthread_mutex_lock(&copier->lanes[last].lock);
	return &copier->lanes[last];
}

struct transfer {
	const struct tp_gpu_range *range;
	struct lane *lane;
	struct visit visit;
};

/* Is everything from addr on what was registered? Where it was freed the copy would hit whatever lies there now. */
static int check_range(const struct tp_gpu_range *range, uint64_t addr, uint64_t bytes)
{
	uint64_t left = bytes;
	for (uint32_t i = 0; i < range->count; i++) {
		const struct tp_gpu_piece *piece = &range->pieces[i];
		if (piece->end <= addr || piece->start >= addr + bytes)
			continue;
		left -= TP_MIN(piece->end, addr + bytes) - TP_MAX(piece->start, addr);
		struct tp_gpu_address now = tp_gpu_ask(piece->start);
		if (!now.device || now.id != piece->id)
			return TP_CARD_FAIL(EFAULT, "%llu bytes of GPU memory at 0x%llx can't be reached: they were freed while they were registered (0x%llx, %llu bytes)",
				(unsigned long long)bytes, (unsigned long long)addr, (unsigned long long)range->addr, (unsigned long long)range->bytes);
	}
	return !left ? 0 : TP_CARD_FAIL(EFAULT, "%llu bytes at 0x%llx can't be reached: %llu of them are in a page of a DMA-BUF (0x%llx, %llu bytes), but weren't allocated",
		(unsigned long long)bytes, (unsigned long long)addr, (unsigned long long)left, (unsigned long long)range->addr, (unsigned long long)range->bytes);
}

static bool begin(struct transfer *transfer, const struct tp_gpu_range *range)
{
	transfer->range = range;
	transfer->lane = take_lane(range->copier);
	return enter(range->copier->context, &transfer->visit);
}

/* Whatever was begun is over, or has failed. */
static int end(struct transfer *transfer, bool ok, uint64_t addr, uint64_t bytes)
{
	struct failure why = failure;
	if (!ok && transfer->visit.pushed)
		CALL(StreamSynchronize, transfer->lane->stream);
	leave(&transfer->visit);
	pthread_mutex_unlock(&transfer->lane->lock);
	return ok ? 0 : tp_gpu_failed(why.call, why.error, addr, bytes);
}

/* One copy an allocation: CUDA takes none that reaches into the next. */
static bool push(const struct transfer *transfer, uint64_t addr, uint8_t *host, size_t bytes, bool write)
{
	bool ok = true;
	for (uint32_t i = 0; i < transfer->range->count && bytes && ok; i++) {
		const struct tp_gpu_piece *piece = &transfer->range->pieces[i];
		if (piece->end <= addr)
			continue;
		size_t part = TP_MIN(bytes, (size_t)(piece->end - addr));
		ok = write ? CALL(MemcpyHtoDAsync, (CUdeviceptr)addr, host, part, transfer->lane->stream) :
			CALL(MemcpyDtoHAsync, host, (CUdeviceptr)addr, part, transfer->lane->stream);
		addr += part;
		host += part;
		bytes -= part;
	}
	return ok;
}

/* What is written last: programs, and kernels, poll the end of a message. A word comes at once. */
static size_t tail_of(uint64_t addr, size_t bytes)
{
	uint64_t end = addr + bytes;
	return bytes >= 8 && (end & 7) == 0 ? 8 : bytes >= 4 && (end & 3) == 0 ? 4 : 1;
}

/* ---- copies ---- */

int tp_gpu_write(const struct tp_gpu_range *range, uint64_t addr, const void *from, size_t bytes)
{
	struct transfer transfer;
	size_t tail = tail_of(addr, bytes);
	int error = check_range(range, addr, bytes), half = 0;
	if (error)
		return error;
	bool ok = begin(&transfer, range), used[HALVES] = { false };
	struct lane *lane = transfer.lane;
	for (size_t at = 0; at < bytes && ok; half ^= 1) {
		size_t part = TP_MIN(bytes - at, (size_t)HALF_BYTES), last = at + part == bytes ? tail : 0;
		if (used[half])
			ok = CALL(EventSynchronize, lane->event[half]);
		if (ok)
			memcpy(lane->half[half], (const uint8_t *)from + at, part);
		ok = ok && push(&transfer, addr + at, lane->half[half], part - last, true);
		/* Of one stream, so it begins when the rest is there. */
		ok = ok && push(&transfer, addr + at + part - last, lane->half[half] + part - last, last, true);
		ok = ok && CALL(EventRecord, lane->event[half], lane->stream);
		used[half] = ok;
		at += part;
	}
	for (int i = 0; i < HALVES && ok; i++)
		ok = !used[i] || CALL(EventSynchronize, lane->event[i]);
	return end(&transfer, ok, addr, bytes);
}

int tp_gpu_read(const struct tp_gpu_range *range, uint64_t addr, void *to, size_t bytes)
{
	struct transfer transfer;
	int error = check_range(range, addr, bytes), half = 0;
	if (error)
		return error;
	bool ok = begin(&transfer, range);
	struct lane *lane = transfer.lane;
	size_t asked = 0, done = 0, parts[HALVES];
	while (done < bytes && ok) {
		/* One half ahead. */
		while (asked < bytes && asked - done < (size_t)HALF_BYTES * HALVES && ok) {
			int into = (int)(asked / HALF_BYTES % HALVES);
			parts[into] = TP_MIN(bytes - asked, (size_t)HALF_BYTES);
			ok = push(&transfer, addr + asked, lane->half[into], parts[into], false) && CALL(EventRecord, lane->event[into], lane->stream);
			asked += parts[into];
		}
		ok = ok && CALL(EventSynchronize, lane->event[half]);
		if (!ok)
			break;
		tp_key_copy((uint8_t *)to + done, lane->half[half], parts[half]);
		done += parts[half];
		half ^= 1;
	}
	return end(&transfer, ok, addr, bytes);
}

/* Between allocations of one context; both are checked. */
static bool push_within(const struct transfer *transfer, uint64_t to, const struct tp_gpu_range *from, uint64_t from_addr, size_t bytes)
{
	bool ok = true;
	const struct tp_gpu_range *into = transfer->range;
	for (uint32_t i = 0, k = 0; bytes && ok && i < into->count && k < from->count;) {
		if (into->pieces[i].end <= to) {
			i++;
			continue;
		}
		if (from->pieces[k].end <= from_addr) {
			k++;
			continue;
		}
		size_t part = TP_MIN(bytes, (size_t)TP_MIN(into->pieces[i].end - to, from->pieces[k].end - from_addr));
		ok = CALL(MemcpyDtoDAsync, (CUdeviceptr)to, (CUdeviceptr)from_addr, part, transfer->lane->stream);
		to += part;
		from_addr += part;
		bytes -= part;
	}
	return ok;
}

int tp_gpu_move(const struct tp_gpu_range *to, uint64_t to_addr, const struct tp_gpu_range *from, uint64_t from_addr, size_t bytes, bool *source)
{
	struct transfer transfer;
	if (to->copier != from->copier)
		return EXDEV;
	if (!bytes)
		return 0;
	*source = check_range(from, from_addr, bytes) != 0;
	if (*source || check_range(to, to_addr, bytes))
		return EFAULT;
	size_t tail = tail_of(to_addr, bytes);
	bool ok = begin(&transfer, to);
	ok = ok && push_within(&transfer, to_addr, from, from_addr, bytes - tail);
	ok = ok && push_within(&transfer, to_addr + bytes - tail, from, from_addr + bytes - tail, tail);
	ok = ok && CALL(EventRecord, transfer.lane->event[0], transfer.lane->stream) && CALL(EventSynchronize, transfer.lane->event[0]);
	return end(&transfer, ok, to_addr, bytes);
}

void tp_gpu_lock_atomics(void) { pthread_mutex_lock(&atomics); }
void tp_gpu_unlock_atomics(void) { pthread_mutex_unlock(&atomics); }
