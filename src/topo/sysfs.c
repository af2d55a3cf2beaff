/* Files of /sys and /proc, below a root. Nothing here is an error: what can't be read isn't known. */
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "topo/discover.h"

static bool make_path(const struct tp_discovery *d, char out[PATH_MAX], const char *format, va_list list)
{
	int used = snprintf(out, PATH_MAX, "%s", d->root);
	if (used < 0 || used >= PATH_MAX) return false;
	int more = vsnprintf(out + used, (size_t)(PATH_MAX - used), format, list);
	return more >= 0 && more < PATH_MAX - used;
}

#define MAKE_PATH(path, d, format) \
	va_list list_; \
	va_start(list_, format); \
	bool fits_ = make_path(d, path, format, list_); \
	va_end(list_)

bool tp_sys_text(const struct tp_discovery *d, char *text, size_t bytes, const char *format, ...)
{
	char path[PATH_MAX];
	MAKE_PATH(path, d, format);
	FILE *file = fits_ ? fopen(path, "re") : NULL;
	if (!file) return false;
	bool got = fgets(text, (int)bytes, file);
	fclose(file);
	if (!got) return false;
	size_t end = strlen(text);
	while (end && isspace((unsigned char)text[end - 1])) text[--end] = 0;
	return true;
}

bool tp_sys_number(const struct tp_discovery *d, int64_t *out, const char *format, ...)
{
	char path[PATH_MAX], text[64], *end;
	MAKE_PATH(path, d, format);
	struct tp_discovery plain = { .root = "" };
	if (!fits_ || !tp_sys_text(&plain, text, sizeof(text), "%s", path)) return false;
	long long value = strtoll(text, &end, 0);
	if (end == text) return false;
	*out = value;
	return true;
}

bool tp_sys_exists(const struct tp_discovery *d, const char *format, ...)
{
	char path[PATH_MAX];
	MAKE_PATH(path, d, format);
	return fits_ && access(path, F_OK) == 0;
}

/* No more than is asked for, which a FILE would read: of a device's configuration each word may take 20 us in a virtual machine. */
size_t tp_sys_bytes_at(const struct tp_discovery *d, size_t offset, uint8_t *out, size_t bytes, const char *format, ...)
{
	char path[PATH_MAX];
	MAKE_PATH(path, d, format);
	int fd = fits_ ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	size_t got = 0;
	if (fd < 0) return 0;
	for (ssize_t n = 1; n > 0 && got < bytes; got += n > 0 ? (size_t)n : 0) n = pread(fd, out + got, bytes - got, (off_t)(offset + got));
	close(fd);
	return got;
}

bool tp_sys_real(const struct tp_discovery *d, char out[TP_PATH_BYTES], const char *format, ...)
{
	char path[PATH_MAX], real[PATH_MAX], root[PATH_MAX];
	MAKE_PATH(path, d, format);
	if (!fits_ || !realpath(path, real)) return false;
	size_t skip = 0;
	if (*d->root && realpath(d->root, root)) skip = strncmp(real, root, strlen(root)) == 0 ? strlen(root) : 0;
	return snprintf(out, TP_PATH_BYTES, "%s", real + skip) < TP_PATH_BYTES;
}

/* mlx5_2 before mlx5_10. */
static int by_name(const void *a, const void *b)
{
	return strverscmp(a, b);
}

int tp_sys_list(const struct tp_discovery *d, char (*names)[TP_TOPO_NAME_BYTES], int max, const char *format, ...)
{
	char path[PATH_MAX];
	MAKE_PATH(path, d, format);
	DIR *folder = fits_ ? opendir(path) : NULL;
	int count = 0;
	if (!folder) return 0;
	for (struct dirent *entry; count < max && (entry = readdir(folder));)
		if (entry->d_name[0] != '.' && strlen(entry->d_name) < TP_TOPO_NAME_BYTES) strcpy(names[count++], entry->d_name);
	closedir(folder);
	qsort(names, (size_t)count, sizeof(names[0]), by_name);
	return count;
}

void tp_sys_cpu_list(const char *text, uint64_t mask[TP_CPU_WORDS])
{
	(void)tp_cpu_list_read(text, mask);
}

ncclResult_t tp_sys_set_mask(struct tp_topo_doc *doc, struct tp_element *e, const char *name, const uint64_t mask[TP_CPU_WORDS])
{
	char text[TP_CPU_WORDS * 2 * 9 + 1] = "";
	int last = TP_CPU_WORDS * 2 - 1;
	while (last > 0 && (uint32_t)(mask[last / 2] >> (last % 2 * 32)) == 0) last--;
	for (int w = last; w >= 0; w--)
		snprintf(text + strlen(text), 10, "%s%08x", w == last ? "" : ",", (unsigned)(uint32_t)(mask[w / 2] >> (w % 2 * 32)));
	return tp_doc_set(doc, e, name, text);
}
