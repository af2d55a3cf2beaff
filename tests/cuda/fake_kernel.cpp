/* Modules, functions and launches. Any image will do: a function is the emulator's kernel of that name.
 *
 * Loading waits for all kernels of the context, and so does the first use of a function under lazy loading, CUDA's default: a
 * program that loads while its kernels spin hangs here as it may on a GPU. */
#include "fake.h"

#include <algorithm>
#include <string.h>

#include "emulator_run.h"

struct CUfunc_st { CUmodule module; const tp_emulated_kernel *kernel; bool loaded; };
struct CUmod_st { CUcontext context; std::map<std::string, std::unique_ptr<CUfunc_st>> functions; };

namespace fake {

std::map<std::string, unsigned long long> &counts = *new std::map<std::string, unsigned long long>;

namespace {

thread_local bool in_host_function;

/* One argument, a struct; or a buffer, by "extra". */
CUresult find_args(const tp_emulated_kernel *kernel, void **parameters, void **extra, std::vector<char> &out)
{
	const void *from = nullptr;
	if (parameters && extra) return CUDA_ERROR_INVALID_VALUE;
	if (parameters) from = parameters[0];
	for (void **e = extra; e && *e; e += 2)
		if (*e == (void *)1) from = e[1];
	if (!from) return CUDA_ERROR_INVALID_VALUE;
	out.assign((const char *)from, (const char *)from + kernel->args_bytes);
	return CUDA_SUCCESS;
}

void load(guard &held, CUfunction function)
{
	if (function->loaded) return;
	wait_context(held, function->module->context);
	function->loaded = true;
}

CUresult get_function(CUmodule module, const char *name, CUfunction *out)
{
	if (!handle_live(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
	std::unique_ptr<CUfunc_st> &f = module->functions[name];
	if (!f) {
		const tp_emulated_kernel *kernel = tp_emulator_find(name);
		if (!kernel) {
			module->functions.erase(name);
			return CUDA_ERROR_NOT_FOUND;
		}
		f.reset(new CUfunc_st { module, kernel, set.eager });
	}
	*out = f.get();
	return CUDA_SUCCESS;
}

CUresult check_shape(const CUlaunchConfig &c)
{
	if (c.gridDimX == 0 || c.gridDimY == 0 || c.gridDimZ == 0 || c.blockDimX == 0 || c.blockDimY == 0 || c.blockDimZ == 0) return CUDA_ERROR_INVALID_VALUE;
	if (c.blockDimX * c.blockDimY * c.blockDimZ > 1024) return CUDA_ERROR_INVALID_VALUE;
	if (c.gridDimY * c.gridDimZ * c.blockDimY * c.blockDimZ != 1 || c.blockDimX % 32 != 0)
		die("a kernel launched with a grid %u x %u x %u of %u x %u x %u threads: the emulator has one dimension and whole warps", c.gridDimX, c.gridDimY,
			c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ);
	return CUDA_SUCCESS;
}

op kernel_op(const CUlaunchConfig &c, CUfunction function, std::vector<char> args)
{
	op what;
	CUcontext context = function->module->context;
	const tp_emulated_kernel *kernel = function->kernel;
	struct kept_args { std::vector<char> bytes; void *parameters[1]; };
	auto kept = std::make_shared<kept_args>(kept_args{ std::move(args), {} });      /* what.work's, and so the node's */
	kept->parameters[0] = kept->bytes.data();
	int blocks = (int)c.gridDimX, threads = (int)c.blockDimX;
	int places = set.sms * set.blocks_per_sm * 512, resident = std::max(1, places / threads);
	what.type = CU_GRAPH_NODE_TYPE_KERNEL;
	what.kernel = { function, c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ, c.sharedMemBytes, kept->parameters, nullptr, nullptr, nullptr };
	what.threads = std::min(blocks * threads, places);
	what.work = [=] {
		{
			guard inner(fake::lock);
			counts["kernels"]++;
			counts[kernel->name]++;
			if (context->sticky != CUDA_SUCCESS) return;
			CUresult error = injected("kernel");
			if (error != CUDA_SUCCESS) {
				context->sticky = error;
				return;
			}
		}
		tp_emulator_launch(kernel, blocks, threads, resident, kept->bytes.data());
	};
	return what;
}

CUresult apply_attributes(const CUlaunchConfig &c, std::vector<CUevent> &events)
{
	for (unsigned i = 0; i < c.numAttrs; i++) {
		const CUlaunchAttribute &a = c.attrs[i];
		switch (a.id) {
		case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
			if (a.value.cooperative && (int)(c.gridDimX * c.blockDimX) > set.sms * set.blocks_per_sm * 512) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
			break;
		case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
			if (c.gridDimX % std::max(a.value.clusterDim.x, 1u) != 0) return CUDA_ERROR_INVALID_VALUE;
			break;
		case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: events.push_back(a.value.launchCompletionEvent.event); break;
		case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT: events.push_back(a.value.programmaticEvent.event); break;
		default: break;
		}
	}
	return CUDA_SUCCESS;
}

CUresult launch(guard &held, const CUlaunchConfig &c, CUfunction function, void **parameters, void **extra)
{
	CUstream stream;
	std::vector<char> args;
	std::vector<CUevent> events;
	if (!function) return CUDA_ERROR_INVALID_HANDLE;
	if (!handle_live(function->module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
	FAKE_TRY(find_stream(c.hStream, &stream));
	if (stream->context != function->module->context) return CUDA_ERROR_INVALID_HANDLE;
	FAKE_TRY(check_shape(c));
	FAKE_TRY(apply_attributes(c, events));
	FAKE_TRY(find_args(function->kernel, parameters, extra, args));
	load(held, function);
	op what = kernel_op(c, function, std::move(args));
	counts["launches"]++;
	if (events.empty()) return submit(held, c.hStream, std::move(what), nullptr);
	/* The event is there once the kernel has begun. */
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	task_ref begun = hold_task(stream->context);
	std::function<void()> inner = std::move(what.work);
	what.work = [=] {
		{
			guard again(fake::lock);
			finish_task(begun);
		}
		inner();
	};
	for (CUevent event : events) {
		if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
		event->task = begun;
		event->capture_id = 0;
	}
	return submit(held, c.hStream, std::move(what), nullptr);
}

}

void call_host(CUhostFn function, void *data)
{
	in_host_function = true;
	function(data);
	in_host_function = false;
}

bool called_from_host_function() { return in_host_function; }

}

using namespace fake;

static CUresult load_module(guard &held, CUmodule *out, const void *image)
{
	CUcontext context;
	FAKE_TRY(current(&context));
	if (!image) return CUDA_ERROR_INVALID_VALUE;
	wait_context(held, context);
	*out = new CUmod_st();
	(*out)->context = context;
	handle_add(*out, MODULE);
	return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
	FAKE_ENTER(cuModuleLoadData);
	return load_module(held, out, image);
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options, void **values)
{
	FAKE_ENTER(cuModuleLoadDataEx);
	for (unsigned i = 0; i < count; i++)
		if ((options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) && values) values[i] = nullptr;
	return load_module(held, out, image);
}

CUresult cuModuleUnload(CUmodule module)
{
	FAKE_ENTER(cuModuleUnload);
	if (!handle_live(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
	wait_context(held, module->context);
	handle_remove(module, MODULE);
	return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
	FAKE_ENTER(cuModuleGetFunction);
	return get_function(module, name, out);
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *, size_t *, CUmodule, const char *)
{
	FAKE_ENTER(cuModuleGetGlobal_v2);
	return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *out)
{
	FAKE_ENTER(cuModuleGetLoadingMode);
	*out = set.eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int *out, CUmodule module)
{
	FAKE_ENTER(cuModuleGetFunctionCount);
	const tp_emulated_kernel *all;
	if (!handle_live(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
	*out = (unsigned)tp_emulator_kernels(&all);
	return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction *out, unsigned int count, CUmodule module)
{
	FAKE_ENTER(cuModuleEnumerateFunctions);
	const tp_emulated_kernel *all;
	size_t n = tp_emulator_kernels(&all);
	for (unsigned i = 0; i < count && i < n; i++) FAKE_TRY(get_function(module, all[i].name, &out[i]));
	return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function)
{
	FAKE_ENTER(cuFuncLoad);
	load(held, function);
	return CUDA_SUCCESS;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState *out, CUfunction function)
{
	FAKE_ENTER(cuFuncIsLoaded);
	*out = function->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **out, CUfunction function)
{
	FAKE_ENTER(cuFuncGetName);
	*out = function->kernel->name;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction function)
{
	FAKE_ENTER(cuFuncGetAttribute);
	load(held, function);
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 512; break;
	case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = 64; break;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *out = 1024; break;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *out = 90; break;
	default: *out = 0; break;
	}
	return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
	FAKE_ENTER(cuFuncSetAttribute);
	load(held, function);
	if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
		if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
		unsigned long long percent = (unsigned long long)value;
		if (!counts.count("carveout least") || percent < counts["carveout least"]) counts["carveout least"] = percent;
		if (percent > counts["carveout most"]) counts["carveout most"] = percent;
	}
	return CUDA_SUCCESS;
}

/* A library is the current context's module. */
CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int)
{
	FAKE_ENTER(cuLibraryLoadData);
	return load_module(held, (CUmodule *)out, code);
}

CUresult cuLibraryUnload(CUlibrary library) { return cuModuleUnload((CUmodule)library); }
CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) { return cuModuleGetFunction((CUfunction *)out, (CUmodule)library, name); }

CUresult cuLibraryGetModule(CUmodule *out, CUlibrary library)
{
	*out = (CUmodule)library;
	return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel)
{
	*out = (CUfunction)kernel;
	return CUDA_SUCCESS;
}

/* Of 228 KB of shared memory a block takes what its launch gives it and 2 KB. */
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction function, int threads, size_t shared)
{
	FAKE_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
	if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
	load(held, function);
	*out = std::min({ 32, set.blocks_per_sm * 512 / threads, static_cast<int>((228 << 10) / (shared + (2 << 10))) });
	return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x, unsigned int block_y,
	unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters, void **extra)
{
	FAKE_ENTER(cuLaunchKernel);
	CUlaunchConfig config = { grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0 };
	return launch(held, config, function, parameters, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
	FAKE_ENTER(cuLaunchKernelEx);
	return launch(held, *config, function, parameters, extra);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, const CUDA_KERNEL_NODE_PARAMS *p)
{
	FAKE_ENTER(cuGraphAddKernelNode_v2);
	CUfunction function = p->func ? p->func : (CUfunction)p->kern;
	std::vector<char> args;
	CUlaunchConfig config = { p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ, p->sharedMemBytes, nullptr, nullptr, 0 };
	if (!handle_live(graph, GRAPH) || !function) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(check_shape(config));
	FAKE_TRY(find_args(function->kernel, p->kernelParams, p->extra, args));
	load(held, function);
	op what = kernel_op(config, function, std::move(args));
	what.context = function->module->context;
	return add_node(graph, before, count, std::move(what), out);
}

/* For tests, by dlsym: see count_of. */
extern "C" FAKE_EXPORT long long fakeCudaCount(const char *what);
extern "C" FAKE_EXPORT long long fakeCudaCount(const char *what)
{
	guard held(fake::lock);
	return count_of(what);
}
