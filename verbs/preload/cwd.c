/* Working directories within what the card shows: `cd /sys/class/infiniband`, as shell scripts (ibstatus) do. Relative paths are the
 * kernel's to follow from there; only the name of where one is must be what a card's would be. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/preload/preload.h"

/* Fortified variants have no declaration to lean on. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

TP_NEXT(int, chdir, (const char *))
TP_WRAP int chdir(const char *path)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(AT_FDCWD, path, ours);
	return next_chdir() ? next_chdir()(real) : (int)syscall(SYS_chdir, real);
}

TP_NEXT(char *, getcwd, (char *, size_t))
TP_WRAP char *getcwd(char *out, size_t bytes)
{
	if (!next_getcwd()) {
		errno = EAGAIN;
		return NULL;
	}
	char *found = next_getcwd()(out, bytes);
	if (found)
		tp_preload_restore(found);
	return found;
}
TP_WRAP char *__getcwd_chk(char *out, size_t bytes, size_t room)
{
	if (bytes > room)
		abort();
	return getcwd(out, bytes);
}
TP_WRAP char *get_current_dir_name(void) { return getcwd(NULL, 0); }
