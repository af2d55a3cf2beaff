/* Kernels: from the images in this library to functions of a context. All of them are loaded at once, for a lazy load may wait
 * for a kernel that spins. */
#include <stdatomic.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/cuda/internal.h"

enum { PARAM_FILE, PARAM_CARVEOUT };
static struct tp_param params[] = {
	[PARAM_FILE] = { .name = "TELPHER_CUDA_KERNELS", .kind = TP_PARAM_STRING,
		.doc = "A file with GPU kernels (a fatbin) to use instead of those in the library, for trying others" },
	[PARAM_CARVEOUT] = { .name = "NCCL_L1_SHARED_MEMORY_CARVEOUT", .kind = TP_PARAM_INT, .fallback = "0", .max = 100,
		.doc = "GPUs: percent of a multiprocessor's memory that our kernels ask for as shared memory, the rest being L1 cache; at least as much as lets all "
			"of them that a multiprocessor can have run side by side, which 0 asks for" },
};
TP_PARAM_TABLE("exec", params)

enum { MOST_MODULES = 64, MOST_IMAGE_BYTES = 64 << 20, MOST_FUNCTIONS = 1024 };

static const char *const kind_names[TP_CUDA_NKINDS] = { [TP_CUDA_STEPS] = "steps", [TP_CUDA_FUSED + TP_FUSED_LL] = "ll",
	[TP_CUDA_FUSED + TP_FUSED_LL128] = "ll128", [TP_CUDA_FUSED + TP_FUSED_WINDOW] = "window", [TP_CUDA_FUSED + TP_FUSED_TWO_STEP] = "two_step",
	[TP_CUDA_FUSED + TP_FUSED_PIPE] = "pipe", [TP_CUDA_FUSED + TP_FUSED_PUSH] = "push" };
/* The files of those that only move; NULL: the kind has none. */
static const char *const kind_copies[TP_CUDA_NKINDS] = { [TP_CUDA_STEPS] = "steps_copy", [TP_CUDA_FUSED + TP_FUSED_LL] = "lines_copy",
	[TP_CUDA_FUSED + TP_FUSED_LL128] = "lines_copy", [TP_CUDA_FUSED + TP_FUSED_TWO_STEP] = "lines_copy",
	[TP_CUDA_FUSED + TP_FUSED_PIPE] = "pipes_copy", [TP_CUDA_FUSED + TP_FUSED_PUSH] = "pipes_copy" };
static const char *const type_files[ncclNumTypes] = { [ncclInt8] = "integers", [ncclUint8] = "integers", [ncclInt32] = "integers",
	[ncclUint32] = "integers", [ncclInt64] = "integers", [ncclUint64] = "integers", [ncclFloat16] = "halves", [ncclFloat32] = "floats",
	[ncclFloat64] = "floats", [ncclBfloat16] = "halves", [ncclFloat8e4m3] = "quarters", [ncclFloat8e5m2] = "quarters" };
static const char *const op_names[TP_CUDA_NOPS] = { [ncclSum] = "sum", [ncclProd] = "prod", [ncclMax] = "max", [ncclMin] = "min" };
static const char *const type_names[ncclNumTypes] = { [ncclInt8] = "i8", [ncclUint8] = "u8", [ncclInt32] = "i32", [ncclUint32] = "u32",
	[ncclInt64] = "i64", [ncclUint64] = "u64", [ncclFloat16] = "f16", [ncclFloat32] = "f32", [ncclFloat64] = "f64",
	[ncclBfloat16] = "bf16", [ncclFloat8e4m3] = "e4m3", [ncclFloat8e5m2] = "e5m2" };

struct loading {
	struct tp_cuda_kernels *kernels;
	CUmodule modules[MOST_MODULES];
	const char *names[MOST_MODULES];
	int nmodules;
	int resident, with_pipes;       /* blocks on a multiprocessor, the least so far: of what isn't pipes; of all */
	int shared;                     /* bytes that launches give to blocks of what is being loaded */
	CUfunction functions[MOST_FUNCTIONS];
	int nfunctions;
	int block_bytes;                /* of shared memory, of the largest block */
	enum tp_cuda_pipes wanted, level;   /* level: what needs the kernels that are loaded */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_cuda_kernels *loaded;

bool tp_cuda_kernels_built(void)
{
	return tp_cuda_nimages > 0 || tp_param_string(&params[PARAM_FILE]);
}

/* Sums and products don't know signs. */
static ncclDataType_t plain_type(ncclDataType_t type, ncclRedOp_t op)
{
	if (op != ncclSum && op != ncclProd) return type;
	return type == ncclInt8 ? ncclUint8 : type == ncclInt32 ? ncclUint32 : type == ncclInt64 ? ncclUint64 : type;
}

/* Its code is there from now on. */
static ncclResult_t load_function(struct loading *l, CUfunction function)
{
	static const char *const does[] = { [TP_CUDA_PIPES_TRANSFER] = "carry sends", [TP_CUDA_PIPES_MOVE] = "move", [TP_CUDA_PIPES_ALL] = "reduce" };
	const struct tp_gpu *gpu = l->kernels->gpu;
	int value, blocks, own;
	if (tp_cuda->FuncLoad) TP_CUDA_TRY(gpu, FuncLoad(function));
	else TP_CUDA_TRY(gpu, FuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
	if (l->shared) {
		/* Where no block of them fits a multiprocessor, nobody uses these, and so they don't count. */
		CUresult result = tp_cuda->FuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, l->shared);
		if (result == CUDA_SUCCESS) result = tp_cuda->OccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, TP_DEV_THREADS, (size_t)l->shared);
		if (result != CUDA_SUCCESS || blocks < 1) {
			if (l->wanted >= l->level) TP_INFO(TP_INIT, "device %d: a multiprocessor has no room for a block of pipes that %s", gpu->ordinal, does[l->level]);
			l->wanted = TP_MIN(l->wanted, l->level - 1);
			return ncclSuccess;
		}
	} else {
		TP_CUDA_TRY(gpu, OccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, TP_DEV_THREADS, 0));
	}
	if (blocks < l->with_pipes) l->with_pipes = blocks;
	if (!l->shared && blocks < l->resident) l->resident = blocks;
	if (l->nfunctions == MOST_FUNCTIONS) return TP_FAIL(ncclInternalError, "this library has more than %d kernels", MOST_FUNCTIONS);
	l->functions[l->nfunctions++] = function;
	TP_CUDA_TRY(gpu, FuncGetAttribute(&own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function));
	l->block_bytes = TP_MAX(l->block_bytes, own + l->shared);
	return ncclSuccess;
}

/* A multiprocessor divides its memory between shared memory and L1 in a few ways (CUDA's programming guide has them), in another one only while it is
 * empty, and a preference is rounded up to the next. Each kernel would get what it needs itself; then, where one of lines spins, one of pipes that it waits
 * for would find no room. So all get one, the least in which as many of the largest blocks fit as the budget counts on. What is left is L1 for
 * the program's kernels beside ours, and for our own, which hardly need any. */
static int least_carveout(const struct tp_gpu *gpu, int bytes)
{
	static const int small[] = { 8, 16, 32, 64, 100 }, middle[] = { 8, 16, 32, 64, 100, 132, 164 }, large[] = { 8, 16, 32, 64, 100, 132, 164, 196, 228 };
	int most = 0;
	if (tp_cuda->DeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, gpu->device) != CUDA_SUCCESS || most <= 0) return 100;
	const int *ways = most >= 228 << 10 ? large : most >= 164 << 10 ? middle : small;
	const size_t nways = most >= 228 << 10 ? TP_ARRAY_LEN(large) : most >= 164 << 10 ? TP_ARRAY_LEN(middle) : TP_ARRAY_LEN(small);
	for (size_t i = 0; i < nways; i++)
		if (ways[i] << 10 >= bytes) return (int)((int64_t)(ways[i] << 10) * 100 / most);
	return 100;
}

static ncclResult_t set_carveouts(struct loading *l)
{
	const struct tp_gpu *gpu = l->kernels->gpu;
	int percent = (int)tp_param_int(&params[PARAM_CARVEOUT]), reserved = 0;
	/* Of each block, by the driver. */
	if (tp_cuda->DeviceGetAttribute(&reserved, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, gpu->device) != CUDA_SUCCESS || reserved <= 0) reserved = 1024;
	const int least = least_carveout(gpu, l->with_pipes * ((int)tp_align_up((size_t)l->block_bytes, 128) + reserved));
	percent = TP_MAX(percent, least);
	TP_INFO(TP_INIT, "device %d: %d blocks on a multiprocessor, of up to %d bytes of shared memory each: %d %% of it asked for", gpu->ordinal, l->with_pipes, l->block_bytes,
		percent);
	for (int i = 0; i < l->nfunctions; i++)
		TP_CUDA_TRY(gpu, FuncSetAttribute(l->functions[i], CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent));
	return ncclSuccess;
}

/* In that file first: a look into the wrong one is an error to the driver and to who watches it. */
static ncclResult_t find_function(struct loading *l, const char *file, const char *name, CUfunction *out)
{
	int first = 0;
	while (first < l->nmodules && strcmp(l->names[first], file) != 0) first++;
	for (int i = 0; i < l->nmodules; i++) {
		int m = (first + i) % l->nmodules;
		CUresult found = tp_cuda->ModuleGetFunction(out, l->modules[m], name);
		if (found == CUDA_ERROR_NOT_FOUND) continue;
		if (found != CUDA_SUCCESS)
			return tp_gpu_fail(__FILE__, __LINE__, __func__, l->kernels->gpu, "ModuleGetFunction", found);
		return load_function(l, *out);
	}
	return TP_FAIL(ncclSystemError, "the kernel %s isn't among those for %s (compute capability %d.%d): %s", name, l->kernels->gpu->name,
		l->kernels->gpu->major, l->kernels->gpu->minor, tp_param_string(&params[PARAM_FILE]) ? "TELPHER_CUDA_KERNELS names a file without it" :
		"this library wasn't built as a whole");
}

static ncclResult_t find_kind(struct loading *l, enum tp_cuda_kind kind)
{
	struct tp_cuda_kernels *k = l->kernels;
	char name[64], file[64];
	l->shared = kind == TP_CUDA_FUSED + TP_FUSED_PIPE || kind == TP_CUDA_FUSED + TP_FUSED_PUSH ? (int)tp_pipes_shared(k->shared_most) : 0;
	for (int type = 0; type < ncclNumTypes && kind != TP_CUDA_FUSED + TP_FUSED_PUSH; type++) {
		for (int op = 0; op < TP_CUDA_NOPS; op++) {
			if ((int)plain_type(type, op) != type) continue;
			snprintf(name, sizeof(name), "tp_%s_%s_%s", kind_names[kind], type_names[type], op_names[op]);
			snprintf(file, sizeof(file), "%s_%s", kind == TP_CUDA_FUSED + TP_FUSED_PIPE ? "pipes" : kind_names[kind], type_files[type]);
			TP_TRY(find_function(l, file, name, &k->reduce[kind][type][op]));
		}
	}
	for (int type = 0; type < ncclNumTypes; type++)
		for (int op = 0; op < TP_CUDA_NOPS; op++) k->reduce[kind][type][op] = k->reduce[kind][plain_type(type, op)][op];
	if (!kind_copies[kind]) return ncclSuccess;
	snprintf(name, sizeof(name), "tp_%s_copy", kind_names[kind]);
	return find_function(l, kind_copies[kind], name, &k->copy[kind]);
}

static ncclResult_t load_image(struct loading *l, const char *name, const void *data)
{
	const struct tp_gpu *gpu = l->kernels->gpu;
	if (l->nmodules == MOST_MODULES) return TP_FAIL(ncclInternalError, "this library has more than %d files of kernels", MOST_MODULES);
	CUresult result = tp_cuda->ModuleLoadData(&l->modules[l->nmodules], data);
	const bool unfit = result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_INVALID_PTX || result == CUDA_ERROR_INVALID_IMAGE
		|| result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
	/* A driver takes what later minor versions compiled, not later major ones. */
	const int toolkit = tp_param_string(&params[PARAM_FILE]) ? 0 : tp_cuda_images_toolkit;
	if (unfit && gpu->driver_version / 1000 < toolkit / 1000)
		return TP_FAIL(ncclSystemError, "the driver, for CUDA %d.%d, doesn't take this library's kernels, which CUDA %d.%d has compiled: they need a driver for CUDA %d.0 "
			"or newer. Update it, or build the library with an older CUDA", gpu->driver_version / 1000, gpu->driver_version % 1000 / 10, toolkit / 1000,
			toolkit % 1000 / 10, toolkit / 1000);
	if (unfit && result != CUDA_ERROR_INVALID_IMAGE)
		return TP_FAIL(ncclSystemError, "this library has no kernels for %s (compute capability %d.%d): it is older than what they are built for, or "
			"the driver (%d.%d) is too old to compile them", gpu->name, gpu->major, gpu->minor, gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
	if (result != CUDA_SUCCESS) return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, name, result);
	l->names[l->nmodules++] = name;
	return ncclSuccess;
}

static ncclResult_t load_file(struct loading *l, const char *path)
{
	FILE *file = fopen(path, "re");
	if (!file) return TP_FAIL(ncclSystemError, "TELPHER_CUDA_KERNELS: %s can't be opened: %m", path);
	unsigned char *data = malloc(MOST_IMAGE_BYTES);
	size_t bytes = data ? fread(data, 1, MOST_IMAGE_BYTES, file) : 0;
	ncclResult_t result = ncclSuccess;
	if (!data) result = TP_FAIL(ncclSystemError, "no memory for the kernels of %s", path);
	else if (!bytes || bytes == MOST_IMAGE_BYTES)
		result = TP_FAIL(ncclInvalidUsage, "TELPHER_CUDA_KERNELS: %s has %s %d bytes", path, bytes ? "more than" : "none of up to", MOST_IMAGE_BYTES);
	fclose(file);
	if (result == ncclSuccess) result = load_image(l, path, data);
	free(data);
	return result;
}

/* From which level on a file of pipes is needed. */
static enum tp_cuda_pipes level_of(const char *name)
{
	if (strcmp(name, "pipes_transfers") == 0) return TP_CUDA_PIPES_TRANSFER;
	return strcmp(name, "pipes_copy") == 0 ? TP_CUDA_PIPES_MOVE : TP_CUDA_PIPES_ALL;
}

static ncclResult_t load_images(struct loading *l)
{
	const char *path = tp_param_string(&params[PARAM_FILE]);
	if (path) return load_file(l, path);
	if (!tp_cuda_nimages)
		return TP_FAIL(ncclSystemError, "this library was built without nvcc and has no GPU kernels: install CUDA's compiler and build it again, or set "
			"TELPHER_DEVICE=host");
	for (int i = 0; i < tp_cuda_nimages; i++) {
		const char *name = tp_cuda_images[i].name;
		if (strncmp(name, "pipes_", 6) == 0 && l->wanted < level_of(name)) continue;
		TP_TRY(load_image(l, name, tp_cuda_images[i].data));
	}
	return ncclSuccess;
}

/* What a communicator of so many ranks could use, whatever the kernels, and however its GPUs are joined. */
static ncclResult_t find_wanted(const struct tp_gpu *gpu, int nranks, bool shared_gpu, enum tp_cuda_pipes *out)
{
	struct tp_fused_machine machine = { .major = gpu->major, .minor = gpu->minor, .nranks = nranks };
	snprintf(machine.gpu, sizeof(machine.gpu), "%s", gpu->name);
	*out = TP_CUDA_PIPES_NONE;
	for (int join = 0; join <= TP_FUSED_SHARED; join++) {
		struct tp_fused_table table;
		machine.join = (uint32_t)join;
		tp_fused_defaults(&machine, &table);
		TP_TRY(tp_fused_read_table(&machine, &table));
		bool may = (join == TP_FUSED_SHARED) == shared_gpu && nranks <= TP_PIPE_RANKS && (table.pipes != 1 || gpu->major >= 9);
		if (may) *out = TP_MAX(*out, tp_fused_table_pipes(&table));
	}
	return ncclSuccess;
}

enum tp_cuda_pipes tp_cuda_pipes_wanted(const struct tp_cuda_kernels *kernels, int nranks, bool shared_gpu)
{
	enum tp_cuda_pipes wanted;
	/* A table that can't be read would have been an error when kernels were loaded. */
	return find_wanted(kernels->gpu, nranks, shared_gpu, &wanted) == ncclSuccess ? TP_MIN(wanted, kernels->pipes) : TP_CUDA_PIPES_NONE;
}

/* Blocks that the device holds of what communicators launch whose pipes carry so much. */
static ncclResult_t count_residents(struct loading *l)
{
	struct tp_cuda_kernels *k = l->kernels;
	int transfers = l->resident;
	if (l->wanted >= TP_CUDA_PIPES_TRANSFER)
		TP_CUDA_TRY(k->gpu, OccupancyMaxActiveBlocksPerMultiprocessor(&transfers, k->streams_piped, TP_DEV_THREADS, TP_PIPE_SHARED));
	k->resident[TP_CUDA_PIPES_NONE] = l->resident * k->gpu->sms;
	k->resident[TP_CUDA_PIPES_TRANSFER] = TP_MIN(l->resident, transfers) * k->gpu->sms;
	k->resident[TP_CUDA_PIPES_MOVE] = k->resident[TP_CUDA_PIPES_ALL] = l->with_pipes * k->gpu->sms;
	return ncclSuccess;
}

static ncclResult_t load_all(struct loading *l)
{
	static const enum tp_cuda_pipes least[TP_CUDA_NKINDS] = { [TP_CUDA_FUSED + TP_FUSED_PUSH] = TP_CUDA_PIPES_MOVE,
		[TP_CUDA_FUSED + TP_FUSED_PIPE] = TP_CUDA_PIPES_ALL };
	TP_TRY(load_images(l));
	l->level = TP_CUDA_PIPES_TRANSFER;
	l->shared = (int)tp_pipes_shared(l->kernels->shared_most);
	if (l->wanted >= l->level) TP_TRY(find_function(l, "pipes_transfers", "tp_streams_piped", &l->kernels->streams_piped));
	for (enum tp_cuda_kind kind = 0; kind < TP_CUDA_NKINDS; kind++) {
		l->level = least[kind];
		if (l->wanted >= l->level) TP_TRY(find_kind(l, kind));
	}
	l->kernels->pipes = l->wanted;
	l->shared = 0;
	TP_TRY(find_function(l, "transfers", "tp_transfers", &l->kernels->transfers));
	TP_TRY(find_function(l, "transfers", "tp_transfers_more", &l->kernels->transfers_more));
	TP_TRY(find_function(l, "streams", "tp_streams", &l->kernels->streams));
	TP_TRY(find_function(l, "streams", "tp_streams_more", &l->kernels->streams_more));
	TP_TRY(find_function(l, "copies", "tp_copies", &l->kernels->copies));
	if (l->with_pipes < 1)
		return TP_FAIL(ncclSystemError, "a block of %d threads of our kernels doesn't fit %s", TP_DEV_THREADS, l->kernels->gpu->name);
	TP_TRY(count_residents(l));
	return set_carveouts(l);
}

static ncclResult_t load_new(const struct tp_gpu *gpu, enum tp_cuda_pipes wanted, struct tp_cuda_kernels **out)
{
	struct loading l = { .kernels = tp_alloc(1, sizeof(struct tp_cuda_kernels), "the table of kernels"), .resident = 1 << 16, .with_pipes = 1 << 16, .wanted = wanted };
	bool pushed;
	int mode;
	if (!l.kernels) return ncclSystemError;
#ifdef TP_CUDA_DELAYS
	TP_WARN("the kernels of this library wait by chance (it was built with TELPHER_CUDA_DELAYS): they are for stress tests, and slow");
#endif
	l.kernels->gpu = gpu;
	if (tp_cuda->DeviceGetAttribute(&l.kernels->shared_most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, gpu->device) != CUDA_SUCCESS)
		l.kernels->shared_most = 0;
	ncclResult_t result = tp_gpu_enter(gpu, &pushed);
	if (result == ncclSuccess) {
		tp_gpu_relax(&mode);
		result = load_all(&l);
		for (int m = 0; result != ncclSuccess && m < l.nmodules; m++) tp_cuda->ModuleUnload(l.modules[m]);
		tp_gpu_unrelax(mode);
		tp_gpu_leave(pushed);
	}
	if (result == ncclSuccess) *out = l.kernels;
	else free(l.kernels);
	return result;
}

/* By any communicator to come, whatever rows of the table are for it. */
static ncclResult_t find_all_wanted(const struct tp_gpu *gpu, enum tp_cuda_pipes *out)
{
	*out = TP_CUDA_PIPES_NONE;
	for (int n = 2; n <= TP_PIPE_RANKS; n++)
		for (int shared = 0; shared < 2; shared++) {
			enum tp_cuda_pipes wanted;
			TP_TRY(find_wanted(gpu, n, shared, &wanted));
			*out = TP_MAX(*out, wanted);
		}
	return ncclSuccess;
}

ncclResult_t tp_cuda_kernels_load(const struct tp_gpu *gpu, struct tp_cuda_kernels **out)
{
	pthread_mutex_lock(&lock);
	struct tp_cuda_kernels *k = loaded;
	while (k && k->gpu != gpu) k = k->next;
	ncclResult_t result = ncclSuccess;
	if (!k) {
		enum tp_cuda_pipes wanted;
		result = find_all_wanted(gpu, &wanted);
		if (result == ncclSuccess) result = load_new(gpu, wanted, &k);
		if (result == ncclSuccess) {
			k->next = loaded;
			loaded = k;
		}
	}
	pthread_mutex_unlock(&lock);
	if (result == ncclSuccess) *out = k;
	return result;
}

int tp_cuda_kernels_resident(struct tp_cuda_kernels *kernels, int nranks)
{
	int wanted = (int)tp_cuda_pipes_wanted(kernels, nranks, false), used = atomic_load_explicit(&kernels->pipes_used, memory_order_relaxed);
	while (used < wanted && !atomic_compare_exchange_weak_explicit(&kernels->pipes_used, &used, wanted, memory_order_relaxed, memory_order_relaxed)) { }
	return kernels->resident[TP_MAX(used, wanted)];
}
