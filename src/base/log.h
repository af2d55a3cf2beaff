/* The one logger: NCCL's line formats and variables (NCCL_DEBUG, _SUBSYS, _FILE, _TIMESTAMP_FORMAT, _TIMESTAMP_LEVELS).
 * INFO: "host:pid:tid [dev] NCCL INFO text"; WARN: "[time] host:pid:tid [dev] file:line (func) NCCL WARN text".
 * Every WARN also becomes the text of ncclGetLastError, whatever NCCL_DEBUG says. */
#ifndef TP_BASE_LOG_H
#define TP_BASE_LOG_H

#include <stdbool.h>
#include <stdint.h>
#include "nccl.h"

enum tp_log_level { TP_LOG_NONE, TP_LOG_VERSION, TP_LOG_WARN, TP_LOG_INFO, TP_LOG_ABORT, TP_LOG_TRACE };

enum tp_subsys {                    /* NCCL_DEBUG_SUBSYS names, NCCL's own bits */
	TP_INIT = 0x1, TP_COLL = 0x2, TP_P2P = 0x4, TP_SHM = 0x8, TP_NET = 0x10, TP_GRAPH = 0x20, TP_TUNING = 0x40,
	TP_ENV = 0x80, TP_ALLOC = 0x100, TP_CALL = 0x200, TP_PROXY = 0x400, TP_NVLS = 0x800, TP_BOOTSTRAP = 0x1000,
	TP_REG = 0x2000, TP_PROFILE = 0x4000, TP_RAS = 0x8000
};

/* True where such a line would be written: lets a caller skip the work of making it. */
bool tp_log_wants(enum tp_log_level level, uint32_t subsys);
void tp_log_write(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *func,
	const char *format, ...) __attribute__((format(printf, 6, 7)));
/* An INFO line that is written wherever WARN lines are, and leaves the last error alone: what explains a warning. */
void tp_log_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Logs at WARN, sets the last error, returns result: `return TP_FAIL(ncclInvalidArgument, "…", …)`. */
ncclResult_t tp_log_fail(ncclResult_t result, const char *file, int line, const char *func, const char *format, ...)
	__attribute__((format(printf, 5, 6)));
/* From now on lines go to sink instead (WARN and INFO, whatever NCCL_DEBUG says: the sink decides), without prefix and line end;
 * for a library that logs through its host's logger. NULL: as usual. */
typedef void (*tp_log_sink)(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *text);
void tp_log_divert(tp_log_sink sink);
/* The device number in brackets in this thread's lines; -1 where no communicator is concerned. */
void tp_log_set_device(int device);
/* The last WARN of the process (1,024 bytes at most); never NULL; the text is the calling thread's until its next call. */
const char *tp_log_last_error(void);
/* Reads the variables anew at the next line (ncclResetDebugInit; tests). */
void tp_log_reset(void);

#define TP_WARN(...) tp_log_write(TP_LOG_WARN, ~0u, __FILE__, __LINE__, __func__, __VA_ARGS__)
#define TP_INFO(subsys, ...) do { \
	if (tp_log_wants(TP_LOG_INFO, (subsys))) \
		tp_log_write(TP_LOG_INFO, (subsys), __FILE__, __LINE__, __func__, __VA_ARGS__); \
} while (0)
#define TP_FAIL(result, ...) tp_log_fail((result), __FILE__, __LINE__, __func__, __VA_ARGS__)
/* Passes an error on without logging it again. */
#define TP_TRY(call) do { \
	ncclResult_t tp_try_ = (call); \
	if (tp_try_ != ncclSuccess) return tp_try_; \
} while (0)

#endif
