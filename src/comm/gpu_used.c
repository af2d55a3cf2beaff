/* Whose a stream is, where several ranks of a communicator use one GPU in one process: kernels of two of them on one stream would wait for each other
 * for ever. A rank's streams are those that hold work of its own that isn't done yet, the latest and others; another rank may take what is done.
 *
 * A rank's calls outside captures are numbered, and each is done when those before it are. `latest` is the event behind the last one. When a rank goes
 * to another stream this event is kept, as a mark, and the next call records another one; so a call on the stream of the call before costs no
 * lock and no call of the driver's, only two words: `holds`, which another rank takes away with the stream, and `busy`, by which that one sees a call
 * that has begun and recorded nothing yet. One of the two sees the other.
 *
 * In a capture nothing is ever done; there a stream is another one in each capture. */
#include <stdlib.h>

#include "comm/gpu.h"

#define CAPTURES_KEPT 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;       /* what follows, and of all ranks what it leads to; CUDA is called with it */
static struct tp_gpu_rank *ranks;

struct tp_gpu_taken { struct tp_gpu_taken *next; struct tp_gpu_name name; bool current; uint64_t until; };
/* The event behind all calls up to that number. owned: not rank->done, which graphs record. */
struct tp_gpu_mark { struct tp_gpu_mark *next; CUevent event; uint64_t until; bool owned; };

static bool is_same(const struct tp_gpu_name *a, const struct tp_gpu_name *b)
{
	return a->handle == b->handle && a->id == b->id && a->captured == b->captured;
}

/* The GPU's context is current, and captures don't forbid it. */
static bool is_running(CUevent event) { return event && tp_cuda->EventQuery(event) == CUDA_ERROR_NOT_READY; }

static bool is_outstanding(struct tp_gpu_rank *rank, const struct tp_gpu_taken *t)
{
	struct tp_gpu_streams *s = &rank->streams;
	if (t->current) {
		bool held = atomic_exchange_explicit(&s->holds, false, memory_order_seq_cst);
		bool runs = atomic_load_explicit(&s->busy, memory_order_seq_cst) || is_running(s->latest);
		if (runs && held) atomic_store_explicit(&s->holds, true, memory_order_seq_cst);
		return runs;
	}
	const struct tp_gpu_mark *mark = s->marks;
	while (mark && mark->until < t->until) mark = mark->next;
	return is_running(mark ? mark->event : s->latest);
}

static void remove_taken(struct tp_gpu_streams *s, struct tp_gpu_taken **at)
{
	struct tp_gpu_taken *t = *at;
	*at = t->next;
	s->ncaptured -= t->name.captured;
	free(t);
}

static bool is_needed(const struct tp_gpu_streams *s, uint64_t after, uint64_t until)
{
	const struct tp_gpu_taken *t = s->taken;
	while (t && (t->name.captured || t->current || t->until <= after || t->until > until)) t = t->next;
	return t != NULL;
}

/* What is done by now is the rank's no longer. */
static void prune(struct tp_gpu_streams *s)
{
	uint64_t done = 0, after = 0;
	for (const struct tp_gpu_mark *m = s->marks; m && !is_running(m->event); m = m->next) done = m->until;
	for (struct tp_gpu_taken **at = &s->taken; *at;) {
		if (!(*at)->name.captured && !(*at)->current && (*at)->until <= done) remove_taken(s, at);
		else at = &(*at)->next;
	}
	for (struct tp_gpu_mark **at = &s->marks; *at;) {
		struct tp_gpu_mark *mark = *at;
		if (is_needed(s, after, mark->until)) {
			after = mark->until;
			at = &mark->next;
			continue;
		}
		*at = mark->next;
		if (mark->owned) {
			mark->next = s->spare;
			s->spare = mark;
		} else {
			free(mark);
		}
	}
}

/* The rank whose stream this is; -1: nobody's. */
static int find_other(const struct ncclComm *comm, const struct tp_gpu_name *name)
{
	const struct tp_gpu_rank *own = comm->gpu;
	for (struct tp_gpu_rank *r = ranks; r; r = r->streams.next_rank) {
		if (r == own || r->comm_hash != own->comm_hash || r->gpu != own->gpu) continue;
		for (struct tp_gpu_taken **at = &r->streams.taken; *at; at = &(*at)->next) {
			if (!is_same(&(*at)->name, name)) continue;
			if (name->captured || is_outstanding(r, *at)) return r->streams.rank;
			remove_taken(&r->streams, at);
			break;
		}
	}
	return -1;
}

/* From now on another stream, or others, are current. */
static void leave_current(struct tp_gpu_streams *s)
{
	for (struct tp_gpu_taken *t = s->taken; t; t = t->next) {
		if (!t->current) continue;
		t->current = false;
		t->until = s->calls;
		s->moved = true;
	}
	atomic_store_explicit(&s->holds, false, memory_order_seq_cst);
}

static void forget_old_captures(struct tp_gpu_streams *s)
{
	struct tp_gpu_taken **last = NULL;
	if (s->ncaptured < CAPTURES_KEPT) return;
	for (struct tp_gpu_taken **at = &s->taken; *at; at = &(*at)->next)
		if ((*at)->name.captured) last = at;
	if (last) remove_taken(s, last);
}

static ncclResult_t add_taken(struct tp_gpu_streams *s, const struct tp_gpu_name *name)
{
	struct tp_gpu_taken *t = s->taken;
	while (t && !is_same(&t->name, name)) t = t->next;
	if (!t) {
		if (name->captured) forget_old_captures(s);
		t = tp_alloc(1, sizeof(*t), "a rank's stream");
		if (!t) return ncclSystemError;
		*t = (struct tp_gpu_taken){ .next = s->taken, .name = *name };
		s->taken = t;
		s->ncaptured += name->captured;
	}
	t->current = !name->captured;
	return ncclSuccess;
}

static ncclResult_t take_locked(struct ncclComm *comm, const struct tp_gpu_name *name, bool first, int *other)
{
	struct tp_gpu_streams *s = &comm->gpu->streams;
	if (!s->listed) {
		s->listed = true;
		s->rank = comm->rank;
		s->next_rank = ranks;
		ranks = comm->gpu;
	}
	if (first && !name->captured) leave_current(s);
	prune(s);
	*other = find_other(comm, name);
	if (*other >= 0) return ncclSuccess;
	TP_TRY(add_taken(s, name));
	if (name->captured) {
		s->checked_captured = *name;
		return ncclSuccess;
	}
	s->checked = *name;
	atomic_store_explicit(&s->busy, true, memory_order_seq_cst);
	atomic_store_explicit(&s->holds, true, memory_order_seq_cst);
	return ncclSuccess;
}

ncclResult_t tp_gpu_used_take(struct ncclComm *comm, const struct tp_gpu_name *name, bool first, int *other)
{
	bool pushed;
	int mode;
	*other = -1;
	TP_TRY(tp_gpu_enter(comm->gpu->gpu, &pushed));
	tp_gpu_relax(&mode);
	pthread_mutex_lock(&lock);
	ncclResult_t result = take_locked(comm, name, first, other);
	pthread_mutex_unlock(&lock);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	return result;
}

void tp_gpu_used_several(struct tp_gpu_rank *rank) { atomic_store_explicit(&rank->streams.holds, false, memory_order_seq_cst); }

bool tp_gpu_used_again(struct tp_gpu_rank *rank, const struct tp_gpu_name *name)
{
	struct tp_gpu_streams *s = &rank->streams;
	if (name->captured) return is_same(&s->checked_captured, name);
	if (!is_same(&s->checked, name)) return false;
	atomic_store_explicit(&s->busy, true, memory_order_seq_cst);        /* pairs with is_outstanding */
	if (tp_likely(atomic_load_explicit(&s->holds, memory_order_seq_cst))) return true;
	atomic_store_explicit(&s->busy, false, memory_order_seq_cst);
	return false;
}

/* The event behind the calls on the streams that were left, so far `latest`, is kept; the next call gets another one. */
static ncclResult_t keep_latest(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_gpu_streams *s = &rank->streams;
	struct tp_gpu_mark **last = &s->marks;
	uint64_t after = 0;
	while (*last) {
		after = (*last)->until;
		last = &(*last)->next;
	}
	s->moved = false;
	if (!s->latest || !is_needed(s, after, s->calls)) return ncclSuccess;
	/* Graphs know `done`, so it stays. */
	bool owned = s->latest != rank->done || !rank->captured;
	struct tp_gpu_mark *mark = owned ? s->spare : NULL;
	CUevent fresh = mark ? mark->event : NULL;
	if (mark) s->spare = mark->next;
	else if (!(mark = tp_alloc(1, sizeof(*mark), "a rank's mark"))) return ncclSystemError;
	CUresult error = fresh || !owned ? CUDA_SUCCESS : tp_cuda->EventCreate(&fresh, CU_EVENT_DISABLE_TIMING);
	if (error != CUDA_SUCCESS) {
		free(mark);
		return TP_GPU_FAIL(comm, "EventCreate", error);
	}
	if (owned && s->latest == rank->done) rank->done = fresh;
	else if (owned) s->behind = fresh;
	*mark = (struct tp_gpu_mark){ NULL, s->latest, s->calls, owned };
	*last = mark;
	return ncclSuccess;
}

/* Which event the call at hand records: `done`, or beside it, where graphs record that, one of its own. */
static ncclResult_t choose_latest(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_gpu_streams *s = &rank->streams;
	if (s->moved) TP_TRY(keep_latest(comm));
	if (rank->captured && !s->behind) TP_GPU_TRY(comm, EventCreate(&s->behind, CU_EVENT_DISABLE_TIMING));
	s->latest = rank->captured ? s->behind : rank->done;
	return ncclSuccess;
}

ncclResult_t tp_gpu_used_record(struct ncclComm *comm, CUstream stream)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_gpu_streams *s = &rank->streams;
	if (tp_unlikely(s->moved || s->latest != (rank->captured ? s->behind : rank->done) || !s->latest)) {
		pthread_mutex_lock(&lock);
		ncclResult_t result = choose_latest(comm);
		pthread_mutex_unlock(&lock);
		TP_TRY(result);
	}
	s->calls++;
	if (tp_unlikely(rank->captured)) TP_GPU_TRY(comm, EventRecord(s->behind, stream));
	return ncclSuccess;
}

void tp_gpu_used_settle(struct tp_gpu_rank *rank)
{
	struct tp_gpu_streams *s = &rank->streams;
	int mode;
	tp_gpu_relax(&mode);
	pthread_mutex_lock(&lock);
	if (!is_running(s->latest)) {
		leave_current(s);
		for (struct tp_gpu_taken **at = &s->taken; *at;) {
			if (!(*at)->name.captured) remove_taken(s, at);
			else at = &(*at)->next;
		}
		prune(s);
	}
	pthread_mutex_unlock(&lock);
	tp_gpu_unrelax(mode);
}

bool tp_gpu_used_forget_graphs(struct tp_gpu_rank *rank)
{
	struct tp_gpu_streams *s = &rank->streams;
	bool kept = false;
	int mode;
	tp_gpu_relax(&mode);
	pthread_mutex_lock(&lock);
	prune(s);
	for (const struct tp_gpu_mark *m = s->marks; m; m = m->next) kept |= !m->owned;
	pthread_mutex_unlock(&lock);
	tp_gpu_unrelax(mode);
	return !kept;
}

void tp_gpu_used_close(struct tp_gpu_rank *rank)
{
	struct tp_gpu_streams *s = &rank->streams;
	pthread_mutex_lock(&lock);
	struct tp_gpu_rank **at = &ranks;
	while (*at && *at != rank) at = &(*at)->streams.next_rank;
	if (*at) *at = s->next_rank;
	s->listed = false;
	while (s->taken) remove_taken(s, &s->taken);
	pthread_mutex_unlock(&lock);
}

static void free_marks(struct tp_gpu_mark *marks)
{
	for (struct tp_gpu_mark *m = marks, *next; m; m = next) {
		next = m->next;
		if (m->owned && m->event) tp_cuda->EventDestroy(m->event);
		free(m);
	}
}

void tp_gpu_used_free(struct tp_gpu_rank *rank)
{
	struct tp_gpu_streams *s = &rank->streams;
	free_marks(s->marks);
	free_marks(s->spare);
	if (s->behind) tp_cuda->EventDestroy(s->behind);
	s->marks = s->spare = NULL;
	s->behind = NULL;
}
