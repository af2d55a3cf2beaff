/* Configuration files: lines NAME=value, # comments. The user's file is NCCL_CONF_FILE where that is set, else
 * ~/.nccl.conf; the machine's is /etc/nccl.conf. The user's file wins over the machine's, the environment over both.
 * Values stay here and are never put in the environment: setenv beside threads that read it is undefined. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
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

static pthread_mutex_t conf_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_conf conf;
static bool conf_loaded;

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
		TP_WARN("%s:%d: expected NAME=value, found a line of %zu bytes that isn't; it is ignored", file, number, bytes);
		return;
	}
	const char *value = equals + 1;
	while (value < end && isspace((unsigned char)*value))
		value++;
	size_t value_bytes = (size_t)(end - value);
	if (value_bytes > VALUE_MAX_BYTES || memchr(value, 0, value_bytes)) {
		TP_WARN("%s:%d: the value of %.*s has a zero byte or more than %d bytes; it is ignored", file, number, (int)name_bytes, line, VALUE_MAX_BYTES);
		return;
	}
	if (into->count >= ENTRIES_MAX || !add_entry(into, line, name_bytes, value, value_bytes, file, number))
		TP_WARN("%s:%d: no room for %.*s (at most %d names); it is ignored", file, number, (int)name_bytes, line, ENTRIES_MAX);
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
	free(what->entries);
	memset(what, 0, sizeof(*what));
}

static void load_file(const char *path, bool named)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		if (named || (errno != ENOENT && errno != ENOTDIR && errno != EACCES))
			TP_WARN("can't read the configuration file %s%s: %s", path, named ? " (NCCL_CONF_FILE)" : "", strerror(errno));
		return;
	}
	struct stat st;
	char *text = NULL, *name = NULL;
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > FILE_MAX_BYTES) {
		TP_WARN("the configuration file %s isn't a plain file of at most %u bytes; it is ignored", path, FILE_MAX_BYTES);
	} else if ((text = malloc((size_t)st.st_size + 1)) && (name = strdup(path))) {
		size_t used = 0;
		ssize_t n;
		while (used < (size_t)st.st_size && ((n = read(fd, text + used, (size_t)st.st_size - used)) > 0 || (n < 0 && errno == EINTR)))
			used += n > 0 ? (size_t)n : 0;
		/* name stays for the process's life: entries and parameters point at it. */
		tp_conf_parse(&conf, text, used, name);
	}
	free(text);
	close(fd);
}

static void load_locked(void)
{
	if (conf_loaded)
		return;
	conf_loaded = true;
	const char *user = getenv("NCCL_CONF_FILE"), *home = getenv("HOME");
	char path[4096];
	if (user && *user) {
		load_file(user, true);
	} else if (home && *home && snprintf(path, sizeof(path), "%s/.nccl.conf", home) < (int)sizeof(path)) {
		load_file(path, false);
	}
	load_file("/etc/nccl.conf", false);
}

const struct tp_conf_entry *tp_conf_find(const char *name)
{
	const struct tp_conf_entry *found = NULL;
	pthread_mutex_lock(&conf_lock);
	load_locked();
	for (size_t i = 0; i < conf.count && !found; i++)
		if (strcmp(conf.entries[i].name, name) == 0)
			found = &conf.entries[i];
	pthread_mutex_unlock(&conf_lock);
	return found;
}

const struct tp_conf_entry *tp_conf_entry_at(size_t index)
{
	pthread_mutex_lock(&conf_lock);
	load_locked();
	const struct tp_conf_entry *entry = index < conf.count ? &conf.entries[index] : NULL;
	pthread_mutex_unlock(&conf_lock);
	return entry;
}

void tp_conf_reload(void)
{
	pthread_mutex_lock(&conf_lock);
	tp_conf_free(&conf);
	conf_loaded = false;
	pthread_mutex_unlock(&conf_lock);
}
