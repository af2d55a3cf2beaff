#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

struct tp_cuda cuda;
CUresult (*cuda_kernel_node)(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out);
CUresult (*cuda_kernel_name)(const char **out, CUkernel kernel);

bool cuda_open(void)
{
	const char *path = getenv("TELPHER_CUDA_LIBRARY");
	void *opened = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!opened) return false;
#define FIND(name, symbol, parameters) *(void **)&cuda.name = dlsym(opened, #symbol);
	TP_CUDA_FUNCTIONS(FIND, FIND)
#undef FIND
	*(void **)&cuda_kernel_node = dlsym(opened, "cuGraphKernelNodeGetParams_v2");
	*(void **)&cuda_kernel_name = dlsym(opened, "cuKernelGetName");
	return cuda.Init && cuda.Init(0) == CUDA_SUCCESS;
}

void cuda_check(CUresult result, const char *call, const char *file, int line)
{
	const char *name = NULL;
	if (result == CUDA_SUCCESS) return;
	if (cuda.GetErrorName) cuda.GetErrorName(result, &name);
	fprintf(stderr, "%s:%d: cu%s: %s (%d)\n", file, line, call, name ? name : "?", (int)result);
	_Exit(1);
}

bool library_open(struct library *l)
{
	void *opened = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
	if (!opened) {
		fprintf(stderr, "%s: %s\n", l->name, dlerror());
		return false;
	}
#define FIND(function) *(void **)&l->function = dlsym(opened, #function);
	MEMBERS(FIND)
	OPTIONAL_MEMBERS(FIND)
#undef FIND
#define MISSING(function) if (!l->function) { fprintf(stderr, "%s: %s has no %s\n", l->name, l->path, #function); return false; }
	MEMBERS(MISSING)
#undef MISSING
	return true;
}
