/* Contexts: primary ones, others, and each thread's stack of them. */
#include "fake.h"

namespace fake {

namespace {
thread_local std::vector<CUcontext> stack;
unsigned long long next_id = 1;

CUcontext create(int ordinal, unsigned flags, bool primary)
{
	CUcontext context = new CUctx_st();
	context->ordinal = ordinal;
	context->id = next_id++;
	context->flags = flags;
	context->primary = primary;
	handle_add(context, CONTEXT);
	context->legacy = make_stream(context, 0, 0);
	context->streams.erase(context->legacy);
	return context;
}
}

CUresult current(CUcontext *out)
{
	if (stack.empty() || !stack.back()) return CUDA_ERROR_INVALID_CONTEXT;
	CUcontext context = stack.back();
	if (!handle_live(context, CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
	if (context->sticky != CUDA_SUCCESS) return context->sticky;
	*out = context;
	return CUDA_SUCCESS;
}

}

using namespace fake;

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
	FAKE_ENTER(cuDevicePrimaryCtxRetain);
	if (device < 0 || (size_t)device >= fake::devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	fake::device &d = fake::devices[(size_t)device];
	if (!d.primary) d.primary = create(device, 0, true);
	d.retained++;
	*out = d.primary;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	FAKE_ENTER(cuDevicePrimaryCtxRelease_v2);
	if (device < 0 || (size_t)device >= fake::devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	fake::device &d = fake::devices[(size_t)device];
	if (d.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
	d.retained--;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	FAKE_ENTER(cuDevicePrimaryCtxGetState);
	if (device < 0 || (size_t)device >= fake::devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	*flags = 0;
	*active = fake::devices[(size_t)device].retained > 0;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device)
{
	FAKE_ENTER(cuCtxCreate_v2);
	if (device < 0 || (size_t)device >= fake::devices.size()) return CUDA_ERROR_INVALID_DEVICE;
	*out = create(device, flags, false);
	stack.push_back(*out);
	return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
	FAKE_ENTER(cuCtxDestroy_v2);
	if (!handle_live(context, CONTEXT) || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
	wait_context(held, context);
	if (!stack.empty() && stack.back() == context) stack.pop_back();
	for (CUstream stream : context->streams) handle_remove(stream, STREAM);
	handle_remove(context, CONTEXT);
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	FAKE_ENTER(cuCtxPushCurrent_v2);
	if (!handle_live(context, CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
	stack.push_back(context);
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
	FAKE_ENTER(cuCtxPopCurrent_v2);
	if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
	if (out) *out = stack.back();
	stack.pop_back();
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	FAKE_ENTER(cuCtxSetCurrent);
	if (context && !handle_live(context, CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
	if (!stack.empty()) stack.pop_back();
	if (context) stack.push_back(context);
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
	FAKE_ENTER(cuCtxGetCurrent);
	*out = stack.empty() ? nullptr : stack.back();
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *out)
{
	FAKE_ENTER(cuCtxGetDevice);
	CUcontext context;
	FAKE_TRY(current(&context));
	*out = context->ordinal;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *out)
{
	FAKE_ENTER(cuCtxGetId);
	if (!context) FAKE_TRY(current(&context));
	if (!handle_live(context, CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
	*out = context->id;
	return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
	FAKE_ENTER(cuCtxSynchronize);
	CUcontext context;
	FAKE_TRY(current(&context));
	FAKE_TRY(unsafe());
	wait_context(held, context);
	return context->sticky;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	FAKE_ENTER(cuCtxGetStreamPriorityRange);
	if (least) *least = 0;
	if (greatest) *greatest = -5;
	return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	FAKE_ENTER(cuCtxEnablePeerAccess);
	CUcontext context;
	FAKE_TRY(current(&context));
	if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
	if (!handle_live(peer, CONTEXT) || peer->ordinal == context->ordinal) return CUDA_ERROR_INVALID_CONTEXT;
	if (!reaches(context->ordinal, peer->ordinal)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	return context->peers.insert(peer).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxGetLimit(size_t *out, CUlimit limit)
{
	FAKE_ENTER(cuCtxGetLimit);
	*out = limit == CU_LIMIT_STACK_SIZE ? 1024 : limit == CU_LIMIT_PRINTF_FIFO_SIZE ? 1 << 20 : 8 << 20;
	return CUDA_SUCCESS;
}
