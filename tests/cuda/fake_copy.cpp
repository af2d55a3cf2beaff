/* Copies, fills, host functions and waits for memory, in streams and captures. */
#include "fake.h"

#include <sched.h>
#include <string.h>

using namespace fake;

static void check_still_there(CUdeviceptr ptr, size_t bytes, bool known, const char *what)
{
	guard inner(fake::lock);
	if (check_range(ptr, bytes, known) != CUDA_SUCCESS) die("%s %#llx, %zu bytes: it was freed while the work was outstanding", what, ptr, bytes);
}

static op copy_op(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	op what;
	what.type = CU_GRAPH_NODE_TYPE_MEMCPY;
	bool to_known = find_memory(to) != nullptr, from_known = find_memory(from) != nullptr;
	what.work = [=] {
		check_still_there(to, bytes, to_known, "copy to");
		check_still_there(from, bytes, from_known, "copy from");
		copy_bytes(to, from, bytes);
	};
	return what;
}

/* Pageable host memory: read during the call, or written before it returns, as CUDA has it; a capture takes the addresses. */
static CUresult copy(guard &held, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, bool wait)
{
	CUstream stream;
	task_ref t;
	FAKE_TRY(find_stream(handle, &stream));
	if (bytes == 0) return CUDA_SUCCESS;
	FAKE_TRY(check_range(to, bytes, false));
	FAKE_TRY(check_range(from, bytes, false));
	op what = copy_op(to, from, bytes);
	if (!stream->capture && !find_memory(from) && find_memory(to)) {
		auto kept = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
		what.work = [=] {
			check_still_there(to, bytes, true, "copy to");
			copy_bytes(to, (uintptr_t)kept->data(), bytes);
		};
	}
	if (!stream->capture && !find_memory(to)) wait = true;
	FAKE_TRY(submit(held, handle, std::move(what), &t));
	CUcontext context = stream->context;
	if (wait) wait_task(held, t);
	return context->sticky;
}

#define COPY_NOW(name, to, from) \
	FAKE_ENTER(name); \
	FAKE_TRY(unsafe()); \
	return copy(held, to, from, bytes, CU_STREAM_LEGACY, true)
#define COPY_LATER(name, to, from) \
	FAKE_ENTER(name); \
	return copy(held, to, from, bytes, stream, false)

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { COPY_NOW(cuMemcpy, to, from); }
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) { COPY_NOW(cuMemcpyDtoD_v2, to, from); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { COPY_NOW(cuMemcpyHtoD_v2, to, (CUdeviceptr)(uintptr_t)from); }
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { COPY_NOW(cuMemcpyDtoH_v2, (CUdeviceptr)(uintptr_t)to, from); }
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	FAKE_ENTER(cuMemcpyAsync);
	counts["copies"]++;
	return copy(held, to, from, bytes, stream, false);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) { COPY_LATER(cuMemcpyHtoDAsync_v2, to, (CUdeviceptr)(uintptr_t)from); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) { COPY_LATER(cuMemcpyDtoHAsync_v2, (CUdeviceptr)(uintptr_t)to, from); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) { COPY_LATER(cuMemcpyDtoDAsync_v2, to, from); }
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) { COPY_LATER(cuMemcpyPeerAsync, to, from); }

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *attribute_starts,
	size_t nattributes, CUstream handle)
{
	FAKE_ENTER(cuMemcpyBatchAsync_v2);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream == stream->context->legacy || count == 0 || nattributes == 0 || nattributes > count || !attributes || attribute_starts[0] != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	counts["copies"]++;
	std::vector<std::function<void()>> all;
	for (size_t i = 0; i < count; i++) {
		FAKE_TRY(check_range(to[i], bytes[i], false));
		FAKE_TRY(check_range(from[i], bytes[i], false));
		all.push_back(copy_op(to[i], from[i], bytes[i]).work);
	}
	op what;
	what.work = [all] { for (auto &one : all) one(); };
	return submit(held, handle, std::move(what), nullptr);
}

static CUresult fill(guard &held, CUdeviceptr to, unsigned value, size_t width, size_t count, CUstream stream)
{
	if (count == 0) return CUDA_SUCCESS;
	if (to % width != 0) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(check_range(to, count * width, true));
	op what;
	what.type = CU_GRAPH_NODE_TYPE_MEMSET;
	what.work = [=] {
		check_still_there(to, count * width, true, "fill");
		fill_bytes(to, value, width, count);
	};
	return submit(held, stream, std::move(what), nullptr);
}

/* On the legacy stream; doesn't wait. */
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
	FAKE_ENTER(cuMemsetD8_v2);
	FAKE_TRY(unsafe());
	return fill(held, to, value, 1, count, CU_STREAM_LEGACY);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
	FAKE_ENTER(cuMemsetD8Async);
	return fill(held, to, value, 1, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
	FAKE_ENTER(cuMemsetD32Async);
	return fill(held, to, value, 4, count, stream);
}

/* A host function must not call CUDA: a call that it makes is refused. */
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
	FAKE_ENTER(cuLaunchHostFunc);
	op what;
	what.type = CU_GRAPH_NODE_TYPE_HOST;
	what.host = { function, data };
	what.work = [=] { call_host(function, data); };
	return submit(held, stream, std::move(what), nullptr);
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr ptr, cuuint32_t value, unsigned int flags)
{
	FAKE_ENTER(cuStreamWriteValue32_v2);
	if (flags > 1 || ptr % 4 != 0) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(check_range(ptr, 4, true));
	op what;
	what.work = [=] { __atomic_store_n(word_at(ptr), value, __ATOMIC_RELEASE); };
	return submit(held, stream, std::move(what), nullptr);
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr ptr, cuuint32_t value, unsigned int flags)
{
	FAKE_ENTER(cuStreamWaitValue32_v2);
	flags &= ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH;
	if (flags > 3 || ptr % 4 != 0) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(check_range(ptr, 4, true));
	op what;
	what.work = [=] {
		for (uint32_t *at = word_at(ptr);;) {
			uint32_t found = __atomic_load_n(at, __ATOMIC_ACQUIRE);
			if (flags == CU_STREAM_WAIT_VALUE_GEQ ? (int32_t)(found - value) >= 0 : flags == CU_STREAM_WAIT_VALUE_EQ ? found == value
				: flags == CU_STREAM_WAIT_VALUE_AND ? (found & value) != 0 : ~(found | value) != 0) return;
			sched_yield();
		}
	};
	return submit(held, stream, std::move(what), nullptr);
}
