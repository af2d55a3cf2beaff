/* Configuration files: lines NAME=value, # comments. The user's file is NCCL_CONF_FILE where that is set, else
 * ~/.nccl.conf; the machine's is /etc/nccl.conf. The user's file wins over the machine's, the environment over both.
 * Values stay here and are never put in the environment: setenv beside threads that read it is undefined. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/internal.h"

#define FILE_MAX_BYTES (1u << 20)
#define NAME_MAX_BYTES 128
#define VALUE_MAX_BYTES 4096
#define ENTRIES_MAX 1024

/* A warning makes the logger read its own parameters, which looks here: so warnings wait until the lock is free. */
static void complain(struct tp_conf *into, const char *format, ...) __attribute__((format(printf, 2, 3)));
static pthread_mutex_t conf_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_conf conf;
static bool conf_loaded;

static void complain(struct tp_conf *into, const char *format, ...)
{
	if (into->nwarnings == TP_CONF_WARNINGS)
		return;
	va_list args;
	va_start(args, format);
	if (vasprintf(&into->warnings[into->nwarnings], format, args) >= 0)
		into->nwarnings++;
	va_end(args);
}

static bool add_entry(struct tp_conf *into, const char *name, size_t name_bytes, const char *value, size_t value_bytes, const char *file, int line)
{
	for (size_t i = 0; i < into->count; i++)
		if (strlen(into->entries[i].name) == name_bytes && memcmp(into->entries[i].name, name, name_bytes) == 0)
			return true;
	if (into->count == into->capacity) {
		size_t capacity = into->capacity ? into->capacity * 2 : 16;
		void *grown = realloc(into->entries, capacity * sizeof(*into->entries));
		if (!grown)
			return false;
		into->entries = grown;
		into->capacity = capacity;
	}
	struct tp_conf_entry entry = { strndup(name, name_bytes), strndup(value, value_bytes), file, line };
	if (!entry.name || !entry.value) {
		free(entry.name);
		free(entry.value);
		return false;
	}
	into->entries[into->count++] = entry;
	return true;
}

static void parse_line(struct tp_conf *into, const char *line, size_t bytes, const char *file, int number)
{
	const char *end = memchr(line, '#', bytes);
	end = end ? end : line + bytes;
	while (line < end && isspace((unsigned char)*line))
		line++;
	while (end > line && isspace((unsigned char)end[-1]))
		end--;
	if (line == end)
		return;
	const char *equals = memchr(line, '=', (size_t)(end - line));
	const char *name_end = equals ? equals : end;
	while (name_end > line && isspace((unsigned char)name_end[-1]))
		name_end--;
	size_t name_bytes = (size_t)(name_end - line), good = 0;
	while (good < name_bytes && (isalnum((unsigned char)line[good]) || line[good] == '_'))
		good++;
	if (!equals || name_bytes == 0 || good < name_bytes || name_bytes > NAME_MAX_BYTES) {
		complain(into, "%s:%d: expected NAME=value, found a line of %zu bytes that isn't; it is ignored", file, number, bytes);
		return;
	}
	const char *value = equals + 1;
	while (value < end && isspace((unsigned char)*value))
		value++;
	size_t value_bytes = (size_t)(end - value);
	if (value_bytes > VALUE_MAX_BYTES || memchr(value, 0, value_bytes)) {
		complain(into, "%s:%d: the value of %.*s has a zero byte or more than %d bytes; it is ignored", file, number, (int)name_bytes, line, VALUE_MAX_BYTES);
		return;
	}
	if (into->count >= ENTRIES_MAX || !add_entry(into, line, name_bytes, value, value_bytes, file, number))
		complain(into, "%s:%d: no room for %.*s (at most %d names); it is ignored", file, number, (int)name_bytes, line, ENTRIES_MAX);
}

void tp_conf_parse(struct tp_conf *into, const char *text, size_t bytes, const char *file)
{
	for (int number = 1; bytes > 0; number++) {
		const char *newline = memchr(text, '\n', bytes);
		size_t length = newline ? (size_t)(newline - text) : bytes;
		parse_line(into, text, length, file, number);
		length += newline != NULL;
		text += length;
		bytes -= length;
	}
}

void tp_conf_free(struct tp_conf *what)
{
	for (size_t i = 0; i < what->count; i++) {
		free(what->entries[i].name);
		free(what->entries[i].value);
	}
	for (int i = 0; i < what->nwarnings; i++)
		free(what->warnings[i]);
	free(what->entries);
	memset(what, 0, sizeof(*what));
}

static void load_file(const char *path, bool named)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		if (named || (errno != ENOENT && errno != ENOTDIR && errno != EACCES))
			complain(&conf, "can't read the configuration file %s%s: %s", path, named ? " (NCCL_CONF_FILE)" : "", strerror(errno));
		return;
	}
	struct stat st;
	char *text = NULL;
	const char *name = NULL;
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > FILE_MAX_BYTES) {
		complain(&conf, "the configuration file %s isn't a plain file of at most %u bytes; it is ignored", path, FILE_MAX_BYTES);
	} else if ((text = malloc((size_t)st.st_size + 1)) && (name = tp_intern(path))) {
		size_t used = 0;
		ssize_t n;
		while (used < (size_t)st.st_size && ((n = read(fd, text + used, (size_t)st.st_size - used)) > 0 || (n < 0 && errno == EINTR)))
			used += n > 0 ? (size_t)n : 0;
		tp_conf_parse(&conf, text, used, name);
	}
	free(text);
	close(fd);
}

void tp_conf_before_fork(void) { pthread_mutex_lock(&conf_lock); }
void tp_conf_after_fork(void) { pthread_mutex_unlock(&conf_lock); }

static void load_locked(void)
{
	const char *user = getenv("NCCL_CONF_FILE"), *home = getenv("HOME");
	char path[4096];
	if (user && *user)
		load_file(user, true);
	else if (home && *home && snprintf(path, sizeof(path), "%s/.nccl.conf", home) < (int)sizeof(path))
		load_file(path, false);
	load_file("/etc/nccl.conf", false);
}

/* Returns with the lock held and the files read. */
static void lock_loaded(void)
{
	char *warnings[TP_CONF_WARNINGS];
	int count = 0;
	pthread_mutex_lock(&conf_lock);
	if (!conf_loaded) {
		load_locked();
		conf_loaded = true;
		count = conf.nwarnings;
		memcpy(warnings, conf.warnings, sizeof(warnings));
		conf.nwarnings = 0;
	}
	if (count == 0)
		return;
	pthread_mutex_unlock(&conf_lock);
	for (int i = 0; i < count; i++) {
		TP_WARN("%s", warnings[i]);
		free(warnings[i]);
	}
	pthread_mutex_lock(&conf_lock);
}

bool tp_conf_find(const char *name, const char **value, const char **file)
{
	bool found = false;
	lock_loaded();
	for (size_t i = 0; i < conf.count && !found; i++) {
		if (strcmp(conf.entries[i].name, name) == 0) {
			*value = tp_intern(conf.entries[i].value);
			*file = conf.entries[i].file;
			found = *value != NULL;
		}
	}
	pthread_mutex_unlock(&conf_lock);
	return found;
}

bool tp_conf_name_at(size_t index, const char **name, const char **file)
{
	lock_loaded();
	bool there = index < conf.count;
	if (there) {
		*name = tp_intern(conf.entries[index].name);
		*file = conf.entries[index].file;
		there = *name != NULL;
	}
	pthread_mutex_unlock(&conf_lock);
	return there;
}

void tp_conf_reload(void)
{
	pthread_mutex_lock(&conf_lock);
	tp_conf_free(&conf);
	conf_loaded = false;
	pthread_mutex_unlock(&conf_lock);
}
