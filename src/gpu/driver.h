/* CUDA's driver interface: our own text of the types, constants and functions that we use, so that no CUDA header is needed
 * to build. Names and values are the driver's (12.0 and newer); tests/gpu compares them with cuda.h where there is one. A file that
 * includes cuda.h before this one gets only the table. */
#ifndef TP_GPU_DRIVER_H
#define TP_GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifndef __cuda_cuda_h__

typedef enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_DEINITIALIZED = 4,
	CUDA_ERROR_STUB_LIBRARY = 34,
	CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_IMAGE = 200,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_MAP_FAILED = 205,
	CUDA_ERROR_UNMAP_FAILED = 206,
	CUDA_ERROR_ALREADY_MAPPED = 208,
	CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
	CUDA_ERROR_NOT_MAPPED = 211,
	CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
	CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
	CUDA_ERROR_FILE_NOT_FOUND = 301,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_LOSSY_QUERY = 402,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
	CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
	CUDA_ERROR_LAUNCH_TIMEOUT = 702,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
	CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
	CUDA_ERROR_TOO_MANY_PEERS = 711,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CUDA_ERROR_MISALIGNED_ADDRESS = 716,
	CUDA_ERROR_LAUNCH_FAILED = 719,
	CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
	CUDA_ERROR_NOT_PERMITTED = 800,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CUDA_ERROR_SYSTEM_NOT_READY = 802,
	CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
	CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
	CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
	CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
	CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
	CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
	CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
	CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
	CUDA_ERROR_TIMEOUT = 909,
	CUDA_ERROR_FUNCTION_NOT_LOADED = 913,
	CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUuserObject_st *CUuserObject;
typedef struct CUgraphDeviceUpdatableNode_st *CUgraphDeviceNode;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef void (*CUhostFn)(void *data);

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

/* Devices and contexts. */
typedef struct { char bytes[16]; } CUuuid;
typedef enum {
	CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
	CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
	CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
	CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
	CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
	CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS = 31,
	CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
	CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
	CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
	CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
	CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
	CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
	CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
	CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
	CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
	CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
	CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
	CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
	CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
	CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
	CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
	CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
	CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
	CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
	CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH = 120,
	CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
	CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
	CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED = 125,
	CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT = 126,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
	CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133,
	CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134
} CUdevice_attribute;
typedef enum {
	CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1,
	CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2,
	CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3
} CUdevice_P2PAttribute;
typedef enum {
	CU_CTX_SCHED_AUTO = 0,
	CU_CTX_SCHED_SPIN = 1,
	CU_CTX_SCHED_YIELD = 2,
	CU_CTX_SCHED_BLOCKING_SYNC = 4,
	CU_CTX_MAP_HOST = 8
} CUctx_flags;
typedef enum {
	CU_LIMIT_STACK_SIZE = 0,
	CU_LIMIT_PRINTF_FIFO_SIZE = 1,
	CU_LIMIT_MALLOC_HEAP_SIZE = 2
} CUlimit;
typedef enum {
	CU_GET_PROC_ADDRESS_SUCCESS = 0,
	CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
	CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
} CUdriverProcAddressQueryResult;
enum { CU_GET_PROC_ADDRESS_DEFAULT = 0 };

/* Memory. */
typedef enum {
	CU_MEMORYTYPE_HOST = 1,
	CU_MEMORYTYPE_DEVICE = 2,
	CU_MEMORYTYPE_ARRAY = 3,
	CU_MEMORYTYPE_UNIFIED = 4
} CUmemorytype;
typedef enum {
	CU_POINTER_ATTRIBUTE_CONTEXT = 1,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
	CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
	CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
	CU_POINTER_ATTRIBUTE_MAPPED = 13,
	CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
	CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
	CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
	CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
	CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
	CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20
} CUpointer_attribute;
enum { CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2, CU_MEMHOSTALLOC_WRITECOMBINED = 4 };
enum { CU_MEMHOSTREGISTER_PORTABLE = 1, CU_MEMHOSTREGISTER_DEVICEMAP = 2, CU_MEMHOSTREGISTER_IOMEMORY = 4, CU_MEMHOSTREGISTER_READ_ONLY = 8 };
typedef enum { CU_MEM_ATTACH_GLOBAL = 1, CU_MEM_ATTACH_HOST = 2, CU_MEM_ATTACH_SINGLE = 4 } CUmemAttach_flags;
typedef enum { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 } CUipcMem_flags;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char reserved[64]; } CUipcEventHandle;
typedef enum {
	CU_MEM_LOCATION_TYPE_INVALID = 0,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_LOCATION_TYPE_HOST = 2,
	CU_MEM_LOCATION_TYPE_HOST_NUMA = 3
} CUmemLocationType;
typedef enum { CU_MEM_ALLOCATION_TYPE_INVALID = 0, CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum {
	CU_MEM_HANDLE_TYPE_NONE = 0,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_HANDLE_TYPE_FABRIC = 8
} CUmemAllocationHandleType;
typedef enum {
	CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
} CUmemAccess_flags;
typedef enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 } CUmemAllocationGranularity_flags;
typedef enum { CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1 } CUmemRangeHandleType;
enum { CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE = 1 };
typedef struct { CUmemLocationType type; int id; } CUmemLocation;
typedef struct { CUmemLocation location; CUmemAccess_flags flags; } CUmemAccessDesc;
typedef struct {
	CUmemAllocationType type;
	CUmemAllocationHandleType requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType, gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;
typedef enum {
	CU_MEMCPY_SRC_ACCESS_ORDER_INVALID = 0,
	CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
	CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
	CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3
} CUmemcpySrcAccessOrder;
enum { CU_MEMCPY_FLAG_DEFAULT = 0, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1 };
typedef struct {
	CUmemcpySrcAccessOrder srcAccessOrder;
	CUmemLocation srcLocHint, dstLocHint;
	unsigned int flags;
} CUmemcpyAttributes;

/* Streams, events, captures. */
typedef enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 } CUstream_flags;
typedef enum { CU_EVENT_DEFAULT = 0, CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 } CUevent_flags;
typedef enum { CU_EVENT_RECORD_DEFAULT = 0, CU_EVENT_RECORD_EXTERNAL = 1 } CUevent_record_flags;
typedef enum { CU_EVENT_WAIT_DEFAULT = 0, CU_EVENT_WAIT_EXTERNAL = 1 } CUevent_wait_flags;
typedef enum {
	CU_STREAM_CAPTURE_STATUS_NONE = 0,
	CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
	CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;
typedef enum {
	CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
	CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
	CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;
typedef enum { CU_STREAM_ADD_CAPTURE_DEPENDENCIES = 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1 } CUstreamUpdateCaptureDependencies_flags;
typedef enum {
	CU_STREAM_WAIT_VALUE_GEQ = 0,
	CU_STREAM_WAIT_VALUE_EQ = 1,
	CU_STREAM_WAIT_VALUE_AND = 2,
	CU_STREAM_WAIT_VALUE_NOR = 3,
	CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30
} CUstreamWaitValue_flags;
typedef enum { CU_STREAM_WRITE_VALUE_DEFAULT = 0, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1 } CUstreamWriteValue_flags;

/* Graphs. */
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } CUgraphEdgeData;
typedef enum {
	CU_GRAPH_NODE_TYPE_KERNEL = 0,
	CU_GRAPH_NODE_TYPE_MEMCPY = 1,
	CU_GRAPH_NODE_TYPE_MEMSET = 2,
	CU_GRAPH_NODE_TYPE_HOST = 3,
	CU_GRAPH_NODE_TYPE_GRAPH = 4,
	CU_GRAPH_NODE_TYPE_EMPTY = 5,
	CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6,
	CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7
} CUgraphNodeType;
typedef struct { CUhostFn fn; void *userData; } CUDA_HOST_NODE_PARAMS;
typedef struct {
	CUfunction func;
	unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
	void **kernelParams, **extra;
	CUkernel kern;
	CUcontext ctx;
} CUDA_KERNEL_NODE_PARAMS;
typedef enum {
	CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH = 1,
	CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD = 2,
	CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY = 8
} CUgraphInstantiate_flags;
typedef enum { CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1 } CUuserObject_flags;
typedef enum { CU_GRAPH_USER_OBJECT_MOVE = 1 } CUuserObjectRetain_flags;

/* Modules and launches. */
typedef enum { CU_MODULE_EAGER_LOADING = 1, CU_MODULE_LAZY_LOADING = 2 } CUmoduleLoadingMode;
typedef enum { CU_FUNCTION_LOADING_STATE_UNLOADED = 0, CU_FUNCTION_LOADING_STATE_LOADED = 1 } CUfunctionLoadingState;
typedef enum {
	CU_JIT_MAX_REGISTERS = 0,
	CU_JIT_INFO_LOG_BUFFER = 3,
	CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6
} CUjit_option;
typedef enum { CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE = 0, CU_LIBRARY_BINARY_IS_PRESERVED = 1 } CUlibraryOption;
typedef enum {
	CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
	CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
	CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
	CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
	CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
	CU_FUNC_ATTRIBUTE_PTX_VERSION = 5,
	CU_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
	CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
	CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
} CUfunction_attribute;
typedef enum { CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT = 0, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE = 1 } CUlaunchMemSyncDomain;
typedef struct { unsigned char default_, remote; } CUlaunchMemSyncDomainMap;
typedef enum {
	CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
	CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
	CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
	CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
	CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT = 7,
	CU_LAUNCH_ATTRIBUTE_PRIORITY = 8,
	CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP = 9,
	CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN = 10,
	CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT = 12,
	CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING = 16
} CUlaunchAttributeID;
typedef union {
	char pad[64];
	int cooperative;
	struct { unsigned int x, y, z; } clusterDim;
	int programmaticStreamSerializationAllowed;
	struct { CUevent event; int flags, triggerAtBlockStart; } programmaticEvent;
	struct { CUevent event; int flags; } launchCompletionEvent;
	int priority;
	CUlaunchMemSyncDomainMap memSyncDomainMap;
	CUlaunchMemSyncDomain memSyncDomain;
	struct { int deviceUpdatable; CUgraphDeviceNode devNode; } deviceUpdatableKernelNode;
	unsigned int nvlinkUtilCentricScheduling;
} CUlaunchAttributeValue;
typedef struct {
	CUlaunchAttributeID id;
	char pad[4];
	CUlaunchAttributeValue value;
} CUlaunchAttribute;
typedef struct {
	unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
	CUstream hStream;
	CUlaunchAttribute *attrs;
	unsigned int numAttrs;
} CUlaunchConfig;

#endif

/* Every function that we use: (our name, the library's symbol, parameters). must: every driver that we support has it; a
 * driver without is an error at open. may: NULL where the driver is too old. */
#define TP_CUDA_FUNCTIONS(must, may) \
	must(Init, cuInit, (unsigned int flags)) \
	must(DriverGetVersion, cuDriverGetVersion, (int *version)) \
	must(GetErrorName, cuGetErrorName, (CUresult error, const char **out)) \
	must(GetErrorString, cuGetErrorString, (CUresult error, const char **out)) \
	must(DeviceGet, cuDeviceGet, (CUdevice *out, int ordinal)) \
	must(DeviceGetCount, cuDeviceGetCount, (int *out)) \
	must(DeviceGetName, cuDeviceGetName, (char *name, int bytes, CUdevice device)) \
	must(DeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid *out, CUdevice device)) \
	must(DeviceTotalMem, cuDeviceTotalMem_v2, (size_t *out, CUdevice device)) \
	must(DeviceGetAttribute, cuDeviceGetAttribute, (int *out, CUdevice_attribute attribute, CUdevice device)) \
	must(DeviceGetByPCIBusId, cuDeviceGetByPCIBusId, (CUdevice *out, const char *bus_id)) \
	must(DeviceGetPCIBusId, cuDeviceGetPCIBusId, (char *bus_id, int bytes, CUdevice device)) \
	must(DeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *out, CUdevice device, CUdevice peer)) \
	must(DeviceGetP2PAttribute, cuDeviceGetP2PAttribute, (int *out, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to)) \
	must(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice device)) \
	must(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device)) \
	must(DevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active)) \
	must(CtxCreate, cuCtxCreate_v2, (CUcontext *out, unsigned int flags, CUdevice device)) \
	must(CtxDestroy, cuCtxDestroy_v2, (CUcontext context)) \
	must(CtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context)) \
	must(CtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext *out)) \
	must(CtxSetCurrent, cuCtxSetCurrent, (CUcontext context)) \
	must(CtxGetCurrent, cuCtxGetCurrent, (CUcontext *out)) \
	must(CtxGetDevice, cuCtxGetDevice, (CUdevice *out)) \
	must(CtxGetId, cuCtxGetId, (CUcontext context, unsigned long long *out)) \
	must(CtxSynchronize, cuCtxSynchronize, (void)) \
	must(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest)) \
	must(CtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext peer, unsigned int flags)) \
	must(CtxGetLimit, cuCtxGetLimit, (size_t *out, CUlimit limit)) \
	must(MemAlloc, cuMemAlloc_v2, (CUdeviceptr *out, size_t bytes)) \
	must(MemFree, cuMemFree_v2, (CUdeviceptr ptr)) \
	must(MemGetInfo, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes)) \
	must(MemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr)) \
	must(MemHostAlloc, cuMemHostAlloc, (void **out, size_t bytes, unsigned int flags)) \
	must(MemFreeHost, cuMemFreeHost, (void *ptr)) \
	must(MemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *ptr, unsigned int flags)) \
	must(MemHostRegister, cuMemHostRegister_v2, (void *ptr, size_t bytes, unsigned int flags)) \
	must(MemHostUnregister, cuMemHostUnregister, (void *ptr)) \
	must(MemAllocManaged, cuMemAllocManaged, (CUdeviceptr *out, size_t bytes, unsigned int flags)) \
	may(MemAllocAsync, cuMemAllocAsync, (CUdeviceptr *out, size_t bytes, CUstream stream)) \
	may(MemFreeAsync, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream)) \
	must(Memcpy, cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes)) \
	must(MemcpyAsync, cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)) \
	must(MemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes)) \
	must(MemcpyDtoH, cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes)) \
	must(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream)) \
	must(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream)) \
	must(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)) \
	may(MemcpyBatchAsync, cuMemcpyBatchAsync_v2, (CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, \
		CUmemcpyAttributes *attributes, size_t *attribute_starts, size_t nattributes, CUstream stream)) \
	must(MemsetD8, cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count)) \
	must(MemsetD8Async, cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream)) \
	must(MemsetD32Async, cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream)) \
	must(PointerGetAttribute, cuPointerGetAttribute, (void *out, CUpointer_attribute attribute, CUdeviceptr ptr)) \
	must(PointerGetAttributes, cuPointerGetAttributes, (unsigned int count, CUpointer_attribute *attributes, void **out, CUdeviceptr ptr)) \
	must(PointerSetAttribute, cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)) \
	must(MemAddressReserve, cuMemAddressReserve, (CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags)) \
	must(MemAddressFree, cuMemAddressFree, (CUdeviceptr ptr, size_t bytes)) \
	must(MemCreate, cuMemCreate, (CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)) \
	must(MemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle)) \
	must(MemMap, cuMemMap, (CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
	must(MemUnmap, cuMemUnmap, (CUdeviceptr ptr, size_t bytes)) \
	must(MemSetAccess, cuMemSetAccess, (CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *access, size_t count)) \
	must(MemGetAccess, cuMemGetAccess, (unsigned long long *out, const CUmemLocation *location, CUdeviceptr ptr)) \
	must(MemExportToShareableHandle, cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle handle, \
		CUmemAllocationHandleType type, unsigned long long flags)) \
	must(MemImportFromShareableHandle, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *out, void *handle, \
		CUmemAllocationHandleType type)) \
	must(MemGetAllocationGranularity, cuMemGetAllocationGranularity, (size_t *out, const CUmemAllocationProp *properties, \
		CUmemAllocationGranularity_flags option)) \
	must(MemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *out, CUmemGenericAllocationHandle handle)) \
	must(MemRetainAllocationHandle, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *out, void *ptr)) \
	may(MemGetHandleForAddressRange, cuMemGetHandleForAddressRange, (void *out, CUdeviceptr ptr, size_t bytes, CUmemRangeHandleType type, \
		unsigned long long flags)) \
	must(IpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle *out, CUdeviceptr ptr)) \
	must(IpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)) \
	must(IpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr ptr)) \
	must(StreamCreate, cuStreamCreate, (CUstream *out, unsigned int flags)) \
	must(StreamCreateWithPriority, cuStreamCreateWithPriority, (CUstream *out, unsigned int flags, int priority)) \
	must(StreamDestroy, cuStreamDestroy_v2, (CUstream stream)) \
	must(StreamSynchronize, cuStreamSynchronize, (CUstream stream)) \
	must(StreamQuery, cuStreamQuery, (CUstream stream)) \
	must(StreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags)) \
	must(StreamGetCtx, cuStreamGetCtx, (CUstream stream, CUcontext *out)) \
	must(StreamGetId, cuStreamGetId, (CUstream stream, unsigned long long *out)) \
	must(StreamGetFlags, cuStreamGetFlags, (CUstream stream, unsigned int *out)) \
	must(StreamGetPriority, cuStreamGetPriority, (CUstream stream, int *out)) \
	must(StreamBeginCapture, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode)) \
	must(StreamEndCapture, cuStreamEndCapture, (CUstream stream, CUgraph *out)) \
	must(StreamIsCapturing, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *out)) \
	must(StreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, \
		const CUgraphNode **dependencies, size_t *count)) \
	may(StreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, \
		const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)) \
	must(StreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies, (CUstream stream, CUgraphNode *dependencies, size_t count, \
		unsigned int flags)) \
	may(StreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2, (CUstream stream, CUgraphNode *dependencies, \
		const CUgraphEdgeData *edges, size_t count, unsigned int flags)) \
	must(ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode)) \
	may(StreamWaitValue32, cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr ptr, cuuint32_t value, unsigned int flags)) \
	may(StreamWriteValue32, cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr ptr, cuuint32_t value, unsigned int flags)) \
	must(LaunchHostFunc, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data)) \
	must(EventCreate, cuEventCreate, (CUevent *out, unsigned int flags)) \
	must(EventDestroy, cuEventDestroy_v2, (CUevent event)) \
	must(EventRecord, cuEventRecord, (CUevent event, CUstream stream)) \
	must(EventRecordWithFlags, cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags)) \
	must(EventQuery, cuEventQuery, (CUevent event)) \
	must(EventSynchronize, cuEventSynchronize, (CUevent event)) \
	must(EventElapsedTime, cuEventElapsedTime, (float *ms, CUevent start, CUevent end)) \
	must(ModuleLoadData, cuModuleLoadData, (CUmodule *out, const void *image)) \
	must(ModuleLoadDataEx, cuModuleLoadDataEx, (CUmodule *out, const void *image, unsigned int count, CUjit_option *options, void **values)) \
	must(ModuleUnload, cuModuleUnload, (CUmodule module)) \
	must(ModuleGetFunction, cuModuleGetFunction, (CUfunction *out, CUmodule module, const char *name)) \
	must(ModuleGetGlobal, cuModuleGetGlobal_v2, (CUdeviceptr *out, size_t *bytes, CUmodule module, const char *name)) \
	may(ModuleGetLoadingMode, cuModuleGetLoadingMode, (CUmoduleLoadingMode *out)) \
	may(ModuleGetFunctionCount, cuModuleGetFunctionCount, (unsigned int *out, CUmodule module)) \
	may(ModuleEnumerateFunctions, cuModuleEnumerateFunctions, (CUfunction *out, unsigned int count, CUmodule module)) \
	may(FuncLoad, cuFuncLoad, (CUfunction function)) \
	may(FuncIsLoaded, cuFuncIsLoaded, (CUfunctionLoadingState *out, CUfunction function)) \
	may(FuncGetName, cuFuncGetName, (const char **out, CUfunction function)) \
	must(FuncGetAttribute, cuFuncGetAttribute, (int *out, CUfunction_attribute attribute, CUfunction function)) \
	must(FuncSetAttribute, cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value)) \
	may(LibraryLoadData, cuLibraryLoadData, (CUlibrary *out, const void *code, CUjit_option *jit_options, void **jit_values, \
		unsigned int njit, CUlibraryOption *options, void **values, unsigned int noptions)) \
	may(LibraryUnload, cuLibraryUnload, (CUlibrary library)) \
	may(LibraryGetKernel, cuLibraryGetKernel, (CUkernel *out, CUlibrary library, const char *name)) \
	may(LibraryGetModule, cuLibraryGetModule, (CUmodule *out, CUlibrary library)) \
	may(KernelGetFunction, cuKernelGetFunction, (CUfunction *out, CUkernel kernel)) \
	must(OccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *out, CUfunction function, \
		int threads, size_t shared_bytes)) \
	must(LaunchKernel, cuLaunchKernel, (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, \
		unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters, void **extra)) \
	must(LaunchKernelEx, cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)) \
	must(GraphCreate, cuGraphCreate, (CUgraph *out, unsigned int flags)) \
	must(GraphDestroy, cuGraphDestroy, (CUgraph graph)) \
	must(GraphInstantiate, cuGraphInstantiateWithFlags, (CUgraphExec *out, CUgraph graph, unsigned long long flags)) \
	must(GraphExecDestroy, cuGraphExecDestroy, (CUgraphExec exec)) \
	must(GraphLaunch, cuGraphLaunch, (CUgraphExec exec, CUstream stream)) \
	must(GraphUpload, cuGraphUpload, (CUgraphExec exec, CUstream stream)) \
	must(GraphGetNodes, cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count)) \
	must(GraphNodeGetType, cuGraphNodeGetType, (CUgraphNode node, CUgraphNodeType *out)) \
	must(GraphNodeGetDependencies, cuGraphNodeGetDependencies, (CUgraphNode node, CUgraphNode *dependencies, size_t *count)) \
	must(GraphAddDependencies, cuGraphAddDependencies, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)) \
	must(GraphRemoveDependencies, cuGraphRemoveDependencies, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)) \
	must(GraphDestroyNode, cuGraphDestroyNode, (CUgraphNode node)) \
	must(GraphAddKernelNode, cuGraphAddKernelNode_v2, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, \
		const CUDA_KERNEL_NODE_PARAMS *parameters)) \
	must(GraphAddHostNode, cuGraphAddHostNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, \
		const CUDA_HOST_NODE_PARAMS *parameters)) \
	must(GraphAddEmptyNode, cuGraphAddEmptyNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count)) \
	must(GraphAddEventRecordNode, cuGraphAddEventRecordNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, \
		CUevent event)) \
	must(GraphAddEventWaitNode, cuGraphAddEventWaitNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, \
		CUevent event)) \
	must(UserObjectCreate, cuUserObjectCreate, (CUuserObject *out, void *ptr, CUhostFn destroy, unsigned int count, unsigned int flags)) \
	must(UserObjectRelease, cuUserObjectRelease, (CUuserObject object, unsigned int count)) \
	must(GraphRetainUserObject, cuGraphRetainUserObject, (CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags))

#define TP_CUDA_MEMBER(name, symbol, parameters) CUresult (*name) parameters;
struct tp_cuda {
	TP_CUDA_FUNCTIONS(TP_CUDA_MEMBER, TP_CUDA_MEMBER)
};
#undef TP_CUDA_MEMBER

#endif
