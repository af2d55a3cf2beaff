/* The software card must never take a real card's place unnoticed: a warning names the device that it hides. The kernel is asked
 * directly, past libc, because our own preload shows programs a made-up /sys/class/infiniband. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/internal.h"

struct tp_dirent { uint64_t ino; int64_t off; uint16_t reclen; uint8_t type; char name[]; };

void tp_real_warn(void)
{
	static const char place[] = "/sys/class/infiniband";
	long fd = syscall(SYS_openat, AT_FDCWD, place, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	if (fd < 0)
		return;
	_Alignas(struct tp_dirent) char entries[4096];
	long bytes = syscall(SYS_getdents64, (int)fd, entries, sizeof(entries));
	char names[256] = "";
	for (long at = 0; at < bytes;) {
		const struct tp_dirent *entry = (const struct tp_dirent *)(const void *)(entries + at);
		at += entry->reclen;
		if (entry->name[0] == '.')
			continue;
		size_t used = strlen(names);
		snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "", entry->name);
	}
	syscall(SYS_close, (int)fd);
	if (!names[0])
		return;
	char text[768];
	snprintf(text, sizeof(text), "this machine has real RDMA devices (%s in %s), but this process uses Telpher's software card instead, "
		"which is far slower: take its folder out of LD_LIBRARY_PATH to use the real ones, or set TELPHER_VERBS_HIDE_REAL=1 if this is "
		"what you want", names, place);
	TP_WARN("%s", text);
	/* Whoever set nothing to see warnings must see this one. */
	if (!tp_log_wants(TP_LOG_WARN, ~0u))
		fprintf(stderr, "telpher: %s\n", text);
}
