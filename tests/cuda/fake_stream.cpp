/* Streams and events. A stream is the chain of its tasks. The legacy stream is ordered with all blocking streams of its
 * context: its tasks come after theirs, theirs after its. */
#include "fake.h"

namespace fake {

namespace {
unsigned long long next_stream = 1;
thread_local std::map<CUcontext, CUstream> per_thread;
}

CUstream make_stream(CUcontext context, unsigned flags, int priority)
{
	CUstream stream = new CUstream_st();
	stream->context = context;
	stream->flags = flags;
	stream->priority = priority;
	stream->id = next_stream++;
	handle_add(stream, STREAM);
	context->streams.insert(stream);
	return stream;
}

CUresult find_stream(CUstream handle, CUstream *out)
{
	CUcontext context;
	if (handle == nullptr || handle == CU_STREAM_LEGACY) {
		FAKE_TRY(current(&context));
		*out = context->legacy;
		return CUDA_SUCCESS;
	}
	if (handle == CU_STREAM_PER_THREAD) {
		FAKE_TRY(current(&context));
		CUstream &mine = per_thread[context];
		if (!mine) mine = make_stream(context, 0, 0);
		*out = mine;
		return CUDA_SUCCESS;
	}
	if (!handle_live(handle, STREAM)) return CUDA_ERROR_INVALID_HANDLE;
	if (!handle_live(handle->context, CONTEXT)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (handle->context->sticky != CUDA_SUCCESS) return handle->context->sticky;
	*out = handle;
	return CUDA_SUCCESS;
}

task_ref enqueue(CUstream stream, const std::vector<task_ref> &before, std::function<void()> work, int threads)
{
	CUcontext context = stream->context;
	std::vector<task_ref> all = before;
	all.push_back(stream->tail);
	if (stream == context->legacy) {
		for (CUstream s : context->streams)
			if (s->flags == CU_STREAM_DEFAULT) all.push_back(s->tail);
	} else if (stream->flags == CU_STREAM_DEFAULT) {
		all.push_back(context->legacy->tail);
	}
	stream->tail = add_task(context, all, std::move(work), threads);
	return stream->tail;
}

CUresult submit(guard &held, CUstream handle, op what, task_ref *out)
{
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	what.context = stream->context;
	if (stream->capture) return capture_op(stream, std::move(what));
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	task_ref t = enqueue(stream, {}, std::move(what.work), what.threads);
	if (set.launch_blocking) wait_task(held, t);
	if (out) *out = t;
	return CUDA_SUCCESS;
}

}

using namespace fake;

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
	FAKE_ENTER(cuStreamCreateWithPriority);
	CUcontext context;
	FAKE_TRY(current(&context));
	if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
	*out = make_stream(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
	return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags)
{
	FAKE_ENTER(cuStreamCreate);
	CUcontext context;
	FAKE_TRY(current(&context));
	if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
	*out = make_stream(context, flags, 0);
	return CUDA_SUCCESS;
}

/* Returns at once; what is enqueued runs to its end. */
CUresult cuStreamDestroy_v2(CUstream handle)
{
	FAKE_ENTER(cuStreamDestroy_v2);
	if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
	if (!handle_live(handle, STREAM)) return CUDA_ERROR_INVALID_HANDLE;
	if (handle->capture) capture_leave(handle);
	/* A blocking stream's work stays before that of the legacy stream. */
	if (handle->flags == CU_STREAM_DEFAULT && handle->tail && !handle->tail->done)
		handle->context->legacy->tail = add_task(handle->context, { handle->context->legacy->tail, handle->tail }, nullptr, 0);
	handle->context->streams.erase(handle);
	handle->tail = nullptr;
	handle_remove(handle, STREAM);
	return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle)
{
	FAKE_ENTER(cuStreamSynchronize);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	FAKE_TRY(unsafe());
	if (stream == stream->context->legacy) {
		FAKE_TRY(implicit(stream->context));
		enqueue(stream, {}, nullptr, 0);
	}
	wait_task(held, stream->tail);
	return stream->context->sticky;
}

CUresult cuStreamQuery(CUstream handle)
{
	FAKE_ENTER(cuStreamQuery);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	FAKE_TRY(unsafe());
	if (stream == stream->context->legacy) {
		FAKE_TRY(implicit(stream->context));
		enqueue(stream, {}, nullptr, 0);
	}
	return stream->tail && !stream->tail->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *out)
{
	FAKE_ENTER(cuStreamGetCtx);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	*out = stream->context;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *out)
{
	FAKE_ENTER(cuStreamGetId);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);      /* as seen on an H200, driver 580 */
	*out = stream->id;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *out)
{
	FAKE_ENTER(cuStreamGetFlags);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	*out = stream->flags;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *out)
{
	FAKE_ENTER(cuStreamGetPriority);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	*out = stream->priority;
	return CUDA_SUCCESS;
}

/* Events. */
CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
	FAKE_ENTER(cuEventCreate);
	CUcontext context;
	FAKE_TRY(current(&context));
	if (flags > 7) return CUDA_ERROR_INVALID_VALUE;
	CUevent event = new CUevent_st();
	event->context = context;
	event->flags = flags;
	handle_add(event, EVENT);
	*out = event;
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
	FAKE_ENTER(cuEventDestroy_v2);
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	event->task = nullptr;
	event->nodes.clear();
	handle_remove(event, EVENT);
	return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
	FAKE_ENTER(cuEventRecordWithFlags);
	CUstream stream;
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
	if (flags > CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
	if (stream->capture) return capture_record(event, stream, flags);
	if (flags == CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	event->capture_id = 0;
	event->nodes.clear();
	event->task = enqueue(stream, {}, nullptr, 0);
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_DEFAULT); }

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
	FAKE_ENTER(cuStreamWaitEvent);
	CUstream stream;
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	FAKE_TRY(find_stream(handle, &stream));
	if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
	if (stream->capture || event->capture_id) return capture_wait(stream, event, flags);
	if (flags == CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	if (event->task && !event->task->done) enqueue(stream, { event->task }, nullptr, 0);
	return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
	FAKE_ENTER(cuEventQuery);
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	if (event->context->sticky != CUDA_SUCCESS) return event->context->sticky;
	if (event->capture_id) return CUDA_ERROR_CAPTURED_EVENT;
	FAKE_TRY(unsafe());
	return event->task && !event->task->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent event)
{
	FAKE_ENTER(cuEventSynchronize);
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	if (event->capture_id) return CUDA_ERROR_CAPTURED_EVENT;
	FAKE_TRY(unsafe());
	CUcontext context = event->context;
	task_ref recorded = event->task;
	wait_task(held, recorded);
	return context->sticky;
}

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
	FAKE_ENTER(cuEventElapsedTime);
	if (!handle_live(start, EVENT) || !handle_live(end, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->task || !end->task) return CUDA_ERROR_INVALID_HANDLE;
	if (!start->task->done || !end->task->done) return CUDA_ERROR_NOT_READY;
	*ms = (float)(end->task->done_at - start->task->done_at);
	return CUDA_SUCCESS;
}
