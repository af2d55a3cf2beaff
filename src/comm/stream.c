/* Host streams: each a list of operations, of any communicators, of which only the first may run. A handle is looked up
 * among the live ones, so that a foreign pointer is an error, never read. */
#include <stdlib.h>

#include "comm/internal.h"

struct tp_stream {
	struct tp_stream *next;             /* live streams */
	struct tp_stream_place *first, *last;
	uint64_t issued;                    /* number of the last place */
	_Atomic uint64_t completed;         /* everything up to this number is done */
	ncclResult_t error;                 /* the first since it was last reported */
	int waiters;
	bool destroyed;                     /* not among the live; freed when nothing needs it */
};

pthread_mutex_t tp_order_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_stream *live;

static void before_fork(void) { pthread_mutex_lock(&tp_order_lock); }
static void in_parent(void) { pthread_mutex_unlock(&tp_order_lock); }
/* What is on a stream is of the parent's communicators, so the streams are the parent's too. Kept reachable, never used. */
static void in_child(void)
{
	static struct tp_stream *abandoned;
	if (live) abandoned = live;
	live = NULL;
	(void)abandoned;
	pthread_mutex_unlock(&tp_order_lock);
}
TP_FORK_HOOK(TP_FORK_ORDER, before_fork, in_parent, in_child)

static void free_if_over(struct tp_stream *stream)
{
	if (stream->destroyed && !stream->first && !stream->waiters) free(stream);
}

ncclResult_t tp_stream_find(cudaStream_t stream, const char *name, struct tp_stream **out)
{
	for (struct tp_stream *s = live; s; s = s->next) {
		if (s != (struct tp_stream *)stream) continue;
		*out = s;
		return ncclSuccess;
	}
	return TP_FAIL(ncclInvalidArgument, "%s: %p is not a stream of this process: host ranks take those of telpher_stream_create, or NULL",
		name, (void *)stream);
}

void tp_stream_append(struct tp_stream_place *place)
{
	struct tp_stream *stream = place->stream;
	place->next = NULL;
	place->number = ++stream->issued;
	if (stream->last) stream->last->next = place;
	else stream->first = place;
	stream->last = place;
}

static struct tp_stream_place *place_of(struct tp_op *op, int i) { return i ? &op->more_places[i - 1] : &op->place; }

bool tp_stream_op_is_first(struct tp_op *op)
{
	for (int i = 0; i < op->nplaces; i++)
		if (place_of(op, i)->stream->first != place_of(op, i)) return false;
	return true;
}

static void take_out(struct tp_stream_place *place)
{
	struct tp_stream *stream = place->stream;
	struct tp_stream_place **link = &stream->first, *before = NULL;
	while (*link != place) {
		before = *link;
		link = &before->next;
	}
	*link = place->next;
	if (stream->last == place) stream->last = before;
}

void tp_stream_op_done(struct tp_op *op, ncclResult_t result)
{
	for (int i = 0; i < op->nplaces; i++) {
		struct tp_stream *stream = place_of(op, i)->stream;
		bool was_first = stream->first == place_of(op, i);
		take_out(place_of(op, i));
		if (result != ncclSuccess && stream->error == ncclSuccess) stream->error = result;
		atomic_store_explicit(&stream->completed, stream->first ? stream->first->number - 1 : stream->issued,
			memory_order_release);                                                      /* pairs with reached */
		if (was_first && stream->first && stream->first->op->comm != op->comm) {
			/* Its queue may be asleep, waiting for its turn here. */
			struct ncclComm *next = stream->first->op->comm;
			tp_engine_submit(&next->runnable);
			tp_bell_ring(next->runnable.bell);
		}
		free_if_over(stream);
	}
}

ncclResult_t tp_stream_create(cudaStream_t *out)
{
	if (!out) return TP_FAIL(ncclInvalidArgument, "telpher_stream_create: stream is NULL");
	enum tp_device_kind kind;
	TP_TRY(tp_device_kind(&kind));
	if (kind == TP_DEVICE_CUDA)
		return TP_FAIL(ncclInvalidUsage, "telpher_stream_create: ranks of this process are GPUs, which use CUDA's streams; TELPHER_DEVICE=host makes them "
			"host ranks");
	struct tp_stream *stream = tp_alloc(1, sizeof(*stream), "a stream");
	if (!stream) return ncclSystemError;
	pthread_mutex_lock(&tp_order_lock);
	stream->next = live;
	live = stream;
	pthread_mutex_unlock(&tp_order_lock);
	*out = (cudaStream_t)stream;
	return ncclSuccess;
}

ncclResult_t tp_stream_destroy(cudaStream_t handle)
{
	pthread_mutex_lock(&tp_order_lock);
	struct tp_stream *stream = NULL;
	ncclResult_t result = tp_stream_find(handle, "telpher_stream_destroy", &stream);
	if (result == ncclSuccess) {
		struct tp_stream **link = &live;
		while (*link != stream) link = &(*link)->next;
		*link = stream->next;
		stream->destroyed = true;
		free_if_over(stream);
	}
	pthread_mutex_unlock(&tp_order_lock);
	return result;
}

static ncclResult_t take_error(struct tp_stream *stream)
{
	ncclResult_t error = stream->error;
	stream->error = ncclSuccess;
	return error;
}

ncclResult_t tp_stream_query(cudaStream_t handle)
{
	if (tp_stream_is_sync(handle)) return ncclSuccess;
	pthread_mutex_lock(&tp_order_lock);
	struct tp_stream *stream = NULL;
	ncclResult_t result = tp_stream_find(handle, "telpher_stream_query", &stream);
	if (result == ncclSuccess) result = stream->first ? ncclInProgress : take_error(stream);
	pthread_mutex_unlock(&tp_order_lock);
	return result;
}

struct target { struct tp_stream *stream; uint64_t completed; };

static bool reached(void *arg)
{
	struct target *target = arg;
	return atomic_load_explicit(&target->stream->completed, memory_order_acquire) >= target->completed;
}

/* The communicators that have something on the stream, each once, counted in. tp_order_lock held. */
static int gather_comms(struct tp_stream *stream, struct tp_runnable **set, struct ncclComm **comms, int room)
{
	int n = 0;
	for (struct tp_stream_place *p = stream->first; p && n < room; p = p->next) {
		int i = 0;
		while (i < n && comms[i] != p->op->comm) i++;
		if (i < n) continue;
		comms[n] = p->op->comm;
		set[n++] = &p->op->comm->runnable;
		atomic_fetch_add_explicit(&p->op->comm->inside, 1, memory_order_seq_cst);
	}
	return n;
}

ncclResult_t tp_stream_synchronize(cudaStream_t handle)
{
	if (tp_stream_is_sync(handle)) return ncclSuccess;
	struct tp_runnable *set[32];
	struct ncclComm *comms[32];
	pthread_mutex_lock(&tp_order_lock);
	struct tp_stream *stream = NULL;
	ncclResult_t result = tp_stream_find(handle, "telpher_stream_synchronize", &stream);
	if (result != ncclSuccess) {
		pthread_mutex_unlock(&tp_order_lock);
		return result;
	}
	struct target target = { stream, stream->issued };
	stream->waiters++;
	while (!reached(&target)) {
		int n = gather_comms(stream, set, comms, (int)TP_ARRAY_LEN(set));
		/* With more communicators than fit, what these leave is looked for again. */
		uint64_t some = atomic_load_explicit(&stream->completed, memory_order_relaxed) + (uint64_t)n;
		struct target next = { stream, TP_MIN(target.completed, some) };
		pthread_mutex_unlock(&tp_order_lock);
		tp_engine_wait(set, n, reached, &next);
		for (int i = 0; i < n; i++) tp_comm_leave(comms[i]);
		pthread_mutex_lock(&tp_order_lock);
	}
	stream->waiters--;
	result = take_error(stream);
	free_if_over(stream);
	pthread_mutex_unlock(&tp_order_lock);
	return result;
}
