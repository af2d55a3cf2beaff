/* The logger. A line is composed in full and handed to the kernel in one write, so lines of several threads and
 * processes never mix; standard output is flushed before, so that our lines keep their place among the program's own.
 * The settings are read at the first line and live in atomics: a line that nobody wants costs two loads. A WARN met
 * while a thread reads the settings (a broken configuration file) waits in its `pending` until they are read. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/internal.h"

#define LINE_BYTES 2048
#define ERROR_BYTES 1024
#define PENDING_MAX 8

enum { P_DEBUG, P_SUBSYS, P_FILE, P_TIME_FORMAT, P_TIME_LEVELS, P_WARN_INFO };
static struct tp_param log_params[] = {
	[P_DEBUG] = { .name = "NCCL_DEBUG", .kind = TP_PARAM_STRING, .doc = "what is logged: VERSION, WARN, INFO, ABORT or TRACE" },
	[P_SUBSYS] = { .name = "NCCL_DEBUG_SUBSYS", .kind = TP_PARAM_STRING, .fallback = "INIT,BOOTSTRAP,ENV",
		.doc = "subsystems whose INFO lines are logged, ALL for all; a leading ^ takes the named ones out" },
	[P_FILE] = { .name = "NCCL_DEBUG_FILE", .kind = TP_PARAM_STRING,
		.doc = "file that the log is appended to (%h: host, %p: process); unset: standard output" },
	[P_TIME_FORMAT] = { .name = "NCCL_DEBUG_TIMESTAMP_FORMAT", .kind = TP_PARAM_STRING, .fallback = "[%F %T] ",
		.doc = "time before a line, in strftime's format; %3f is the fraction in 3 digits" },
	[P_TIME_LEVELS] = { .name = "NCCL_DEBUG_TIMESTAMP_LEVELS", .kind = TP_PARAM_STRING, .fallback = "WARN",
		.doc = "levels whose lines carry the time, ALL for all; a leading ^ takes the named ones out" },
	[P_WARN_INFO] = { .name = "NCCL_WARN_ENABLE_DEBUG_INFO", .kind = TP_PARAM_BOOL, .fallback = "0",
		.doc = "log INFO lines from the first WARN on" },
};
TP_PARAM_TABLE("log", log_params)

struct name_bit { const char *name; uint32_t bits; };
static const struct name_bit subsystems[] = {
	{ "INIT", TP_INIT }, { "COLL", TP_COLL }, { "P2P", TP_P2P }, { "SHM", TP_SHM }, { "NET", TP_NET }, { "GRAPH", TP_GRAPH },
	{ "TUNING", TP_TUNING }, { "ENV", TP_ENV }, { "ALLOC", TP_ALLOC }, { "CALL", TP_CALL }, { "PROXY", TP_PROXY },
	{ "NVLS", TP_NVLS }, { "BOOTSTRAP", TP_BOOTSTRAP }, { "REG", TP_REG }, { "PROFILE", TP_PROFILE }, { "RAS", TP_RAS },
	{ "ALL", ~0u },
};
static const struct name_bit levels[] = {
	{ "NONE", 1u << TP_LOG_NONE }, { "VERSION", 1u << TP_LOG_VERSION }, { "WARN", 1u << TP_LOG_WARN }, { "INFO", 1u << TP_LOG_INFO },
	{ "ABORT", 1u << TP_LOG_ABORT }, { "TRACE", 1u << TP_LOG_TRACE }, { "ALL", ~0u },
};

static struct {
	_Atomic int level;              /* -1: the settings are to be read; its release pairs with log_level's acquire */
	_Atomic uint32_t mask;
	_Atomic int fd;
	_Atomic bool warn_info;
	pthread_mutex_t lock;           /* guards what follows; of our locks only time_lock and error_lock are taken under it */
	uint32_t time_levels;
	char time_format[256];
	int file_fd;                    /* of NCCL_DEBUG_FILE, -1 before there is one; its number never changes */
	char path[4096];                /* of the open file; "": standard output */
	uint64_t start_ns;
} state = { .level = -1, .fd = STDOUT_FILENO, .file_fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER };

/* Around localtime_r, whose own lock a fork would leave held in the child. Taken after state.lock, before error_lock. */
static pthread_mutex_t time_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[ERROR_BYTES];
static _Thread_local char last_error_seen[ERROR_BYTES];
static _Thread_local int thread_device = -1;
/* While this thread reads the settings its warnings wait here. */
static _Thread_local bool reading_settings;
static _Thread_local int pending_count;
static _Thread_local char *pending[PENDING_MAX];

static void before_fork(void)
{
	tp_param_before_fork();
	pthread_mutex_lock(&state.lock);
	pthread_mutex_lock(&time_lock);
	pthread_mutex_lock(&error_lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&error_lock);
	pthread_mutex_unlock(&time_lock);
	pthread_mutex_unlock(&state.lock);
	tp_param_after_fork();
}

/* A child forked while another thread writes a line, or reads a parameter, must be able to do so too: a data loader, for one. */
TP_FORK_HOOK(TP_FORK_LOG, before_fork, after_fork, after_fork)

void tp_log_set_device(int device) { thread_device = device; }

static const char *parse_names(const char *text, const struct name_bit *names, size_t count, uint32_t *bits, char bad[32])
{
	bool invert = *text == '^';
	uint32_t named = 0;
	bad[0] = 0;
	for (text += invert; *text; text += *text == ',') {
		size_t length = strcspn(text, ",");
		bool known = length == 0;
		for (size_t i = 0; i < count; i++) {
			if (strlen(names[i].name) == length && strncasecmp(names[i].name, text, length) == 0) {
				named |= names[i].bits;
				known = true;
			}
		}
		if (!known && !bad[0])
			snprintf(bad, 32, "%.*s", (int)TP_MIN(length, 31), text);
		text += length;
	}
	*bits = invert ? ~named : named;
	return bad[0] ? bad : NULL;
}

static void expand_path(const char *pattern, char *out, size_t bytes)
{
	size_t used = 0;
	for (const char *p = pattern; *p && used + 1 < bytes; p++) {
		int n = 1;
		if (p[0] == '%' && p[1] == 'h')
			n = snprintf(out + used, bytes - used, "%s", tp_host_name()), p++;
		else if (p[0] == '%' && p[1] == 'p')
			n = snprintf(out + used, bytes - used, "%d", getpid()), p++;
		else {
			out[used] = *p;
			p += p[0] == '%' && p[1] == '%';
		}
		used = TP_MIN(used + (size_t)n, bytes - 1);
	}
	out[used] = 0;
}

static void open_file_locked(int level)
{
	const char *pattern = tp_param_string(&log_params[P_FILE]);
	char path[sizeof(state.path)] = "";
	if (pattern && *pattern && level > TP_LOG_VERSION)
		expand_path(pattern, path, sizeof(path));
	if (strcmp(path, state.path) == 0)
		return;
	int fd = path[0] ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
	if (path[0] && fd < 0) {
		TP_WARN("NCCL_DEBUG_FILE=%s: can't open %s: %s; logging to standard output", pattern, path, strerror(errno));
		path[0] = 0;
	}
	/* A thread may be about to write to the former file: what is behind its descriptor changes, never the number. */
	if (fd >= 0 && state.file_fd >= 0) {
		dup3(fd, state.file_fd, O_CLOEXEC);
		close(fd);
	} else if (fd >= 0) {
		state.file_fd = fd;
	}
	atomic_store_explicit(&state.fd, fd >= 0 ? state.file_fd : STDOUT_FILENO, memory_order_relaxed);
	memcpy(state.path, path, sizeof(path));
}

static int parse_level(const char *text)
{
	if (!text || !*text)
		return TP_LOG_NONE;
	for (int i = TP_LOG_NONE; i <= TP_LOG_TRACE; i++)
		if (strcasecmp(text, levels[i].name) == 0)
			return i;
	TP_WARN("NCCL_DEBUG=%.64s is no log level; known are VERSION, WARN, INFO, ABORT and TRACE: using WARN", text);
	return TP_LOG_WARN;
}

static void apply_settings_locked(void)
{
	char bad[32];
	uint32_t bits;
	int level = parse_level(tp_param_string(&log_params[P_DEBUG]));
	if (parse_names(tp_param_string(&log_params[P_SUBSYS]), subsystems, TP_ARRAY_LEN(subsystems), &bits, bad))
		TP_WARN("NCCL_DEBUG_SUBSYS: there is no subsystem '%s'; known are INIT, COLL, P2P, SHM, NET, GRAPH, TUNING, ENV, ALLOC, CALL, "
			"PROXY, NVLS, BOOTSTRAP, REG, PROFILE, RAS and ALL", bad);
	atomic_store_explicit(&state.mask, bits, memory_order_relaxed);
	if (parse_names(tp_param_string(&log_params[P_TIME_LEVELS]), levels, TP_ARRAY_LEN(levels), &state.time_levels, bad))
		TP_WARN("NCCL_DEBUG_TIMESTAMP_LEVELS: there is no level '%s'; known are VERSION, WARN, INFO, ABORT, TRACE and ALL", bad);
	snprintf(state.time_format, sizeof(state.time_format), "%s", tp_param_string(&log_params[P_TIME_FORMAT]));
	atomic_store_explicit(&state.warn_info, tp_param_int(&log_params[P_WARN_INFO]) != 0, memory_order_relaxed);
	if (!state.start_ns)
		state.start_ns = tp_clock_ns();
	open_file_locked(level);
	/* Pairs with the acquire in log_level. */
	atomic_store_explicit(&state.level, level, memory_order_release);
}

static void read_settings(void)
{
	reading_settings = true;
	/* All parameters are read before the lock is taken: a thread that reads a parameter may be on its way to a warning. */
	for (size_t i = 0; i < TP_ARRAY_LEN(log_params); i++)
		tp_param_string(&log_params[i]);
	pthread_mutex_lock(&state.lock);
	if (atomic_load_explicit(&state.level, memory_order_relaxed) < 0)
		apply_settings_locked();
	pthread_mutex_unlock(&state.lock);
	reading_settings = false;
}

static void write_line(const char *line, size_t bytes)
{
	int fd = atomic_load_explicit(&state.fd, memory_order_relaxed);
	int saved = errno;
	if (fd == STDOUT_FILENO)
		fflush(stdout);
	while (bytes > 0) {
		ssize_t n = write(fd, line, bytes);
		struct pollfd p = { .fd = fd, .events = POLLOUT };
		if (n < 0 && (errno == EINTR || (errno == EAGAIN && poll(&p, 1, 1000) > 0)))
			continue;
		if (n <= 0)
			break;
		line += n;
		bytes -= (size_t)n;
	}
	errno = saved;
}

static int log_level(void)
{
	int level = atomic_load_explicit(&state.level, memory_order_acquire);
	if (__builtin_expect(level >= 0 || reading_settings, 1))
		return level;
	read_settings();
	level = atomic_load_explicit(&state.level, memory_order_acquire);
	for (int i = 0; i < pending_count; i++) {
		if (level >= TP_LOG_WARN)
			write_line(pending[i], strlen(pending[i]));
		free(pending[i]);
	}
	pending_count = 0;
	return level;
}

bool tp_log_wants(enum tp_log_level level, uint32_t subsys)
{
	return log_level() >= (int)level && (atomic_load_explicit(&state.mask, memory_order_relaxed) & subsys);
}

void tp_log_reset(void)
{
	pthread_mutex_lock(&state.lock);
	tp_param_forget(log_params, TP_ARRAY_LEN(log_params));
	atomic_store_explicit(&state.level, -1, memory_order_release);
	pthread_mutex_unlock(&state.lock);
}

const char *tp_log_last_error(void)
{
	pthread_mutex_lock(&error_lock);
	memcpy(last_error_seen, last_error, sizeof(last_error));
	pthread_mutex_unlock(&error_lock);
	return last_error_seen;
}

const char *tp_log_short_file(const char *file)
{
	for (const char *p = file; (p = strstr(p, "src/")) != NULL; p += 4)
		file = p + 4;
	return file;
}

/* strftime's format, with %1f … %9f replaced by the fraction of the second. */
static size_t format_time(const char *pattern, char *out, size_t bytes)
{
	struct timespec now;
	struct tm local;
	char format[320];
	size_t used = 0;
	clock_gettime(CLOCK_REALTIME, &now);
	localtime_r(&now.tv_sec, &local);
	for (const char *p = pattern; *p && used + 12 < sizeof(format); p++) {
		if (p[0] == '%' && p[1] >= '1' && p[1] <= '9' && p[2] == 'f') {
			char digits[16];
			snprintf(digits, sizeof(digits), "%09ld", now.tv_nsec);
			memcpy(format + used, digits, (size_t)(p[1] - '0'));
			used += (size_t)(p[1] - '0');
			p += 2;
		} else {
			format[used++] = *p;
			if (p[0] == '%' && p[1])
				format[used++] = *++p;
		}
	}
	format[used] = 0;
	used = used ? strftime(out, bytes, format, &local) : 0;
	out[used] = 0;
	return used;
}

static size_t prefix_time(enum tp_log_level level, char *out, size_t bytes)
{
	char pattern[sizeof(state.time_format)] = "[%F %T] ";
	bool wanted = level == TP_LOG_WARN;
	if (!reading_settings) {
		pthread_mutex_lock(&state.lock);
		wanted = state.time_levels & (1u << level);
		memcpy(pattern, state.time_format, sizeof(pattern));
		pthread_mutex_unlock(&state.lock);
	}
	if (!wanted)
		return 0;
	pthread_mutex_lock(&time_lock);
	size_t used = format_time(pattern, out, bytes);
	pthread_mutex_unlock(&time_lock);
	return used;
}

static size_t format_prefix(char *out, size_t bytes, enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *func)
{
	size_t used = 0;
	int current = atomic_load_explicit(&state.level, memory_order_relaxed);
	if (level == TP_LOG_VERSION && current < TP_LOG_INFO)
		return 0;
	used = prefix_time(level, out, bytes / 2);
	int n;
	int pid = getpid(), tid = (int)syscall(SYS_gettid);
	const char *host = tp_host_name();
	if (level == TP_LOG_WARN)
		n = snprintf(out + used, bytes - used, "%s:%d:%d [%d] %s:%d (%s) NCCL WARN ", host, pid, tid, thread_device, tp_log_short_file(file), line, func);
	else if (level == TP_LOG_TRACE && subsys == TP_CALL)
		n = snprintf(out + used, bytes - used, "%s:%d:%d NCCL CALL ", host, pid, tid);
	else if (level == TP_LOG_TRACE)
		n = snprintf(out + used, bytes - used, "%s:%d:%d [%d] %f %s:%d NCCL TRACE ", host, pid, tid, thread_device,
			(double)(tp_clock_ns() - state.start_ns) / 1e6, func, line);
	else
		n = snprintf(out + used, bytes - used, "%s:%d:%d [%d] NCCL %s ", host, pid, tid, thread_device, level == TP_LOG_ABORT ? "ABORT" : "INFO");
	return TP_MIN(used + (size_t)n, bytes - 1);
}

static void set_last_error(const char *format, va_list args)
{
	char text[ERROR_BYTES];
	vsnprintf(text, sizeof(text), format, args);
	pthread_mutex_lock(&error_lock);
	memcpy(last_error, text, sizeof(text));
	pthread_mutex_unlock(&error_lock);
}

static void log_line(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *func, const char *format, va_list args)
{
	char fixed[LINE_BYTES], *text = fixed;
	size_t prefix = format_prefix(fixed, sizeof(fixed), level, subsys, file, line, func);
	va_list again;
	va_copy(again, args);
	int n = vsnprintf(fixed + prefix, sizeof(fixed) - prefix, format, args);
	size_t bytes = prefix + (size_t)TP_MAX(n, 0);
	if (bytes + 1 >= sizeof(fixed)) {
		text = malloc(bytes + 2);
		if (text) {
			memcpy(text, fixed, prefix);
			vsnprintf(text + prefix, bytes + 1 - prefix, format, again);
		} else {
			text = fixed;
			bytes = sizeof(fixed) - 2;
		}
	}
	va_end(again);
	text[bytes++] = '\n';
	if (!reading_settings) {
		write_line(text, bytes);
	} else if (pending_count < PENDING_MAX) {
		char *copy = strndup(text, bytes);
		if (copy)
			pending[pending_count++] = copy;
	}
	if (text != fixed)
		free(text);
}

static void log_args(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *func, const char *format, va_list args)
{
	int saved = errno;
	/* Asked first: it may read the settings, and a warning met there is older than this one. */
	bool wanted = reading_settings ? level == TP_LOG_WARN : tp_log_wants(level, subsys);
	errno = saved;
	if (level == TP_LOG_WARN) {
		va_list again;
		va_copy(again, args);
		set_last_error(format, again);
		va_end(again);
	}
	errno = saved;
	if (wanted)
		log_line(level, subsys, file, line, func, format, args);
	if (level == TP_LOG_WARN && !reading_settings && atomic_load_explicit(&state.warn_info, memory_order_relaxed)) {
		int expected = TP_LOG_WARN;
		atomic_compare_exchange_strong_explicit(&state.level, &expected, TP_LOG_INFO, memory_order_relaxed, memory_order_relaxed);
	}
	errno = saved;
}

void tp_log_write(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *func, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	log_args(level, subsys, file, line, func, format, args);
	va_end(args);
}

void tp_log_note(const char *format, ...)
{
	if (!tp_log_wants(TP_LOG_WARN, ~0u))
		return;
	va_list args;
	va_start(args, format);
	log_line(TP_LOG_INFO, ~0u, "", 0, "", format, args);
	va_end(args);
}

ncclResult_t tp_log_fail(ncclResult_t result, const char *file, int line, const char *func, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	log_args(TP_LOG_WARN, ~0u, file, line, func, format, args);
	va_end(args);
	return result;
}
