/* What /sys and /dev would show of the software card, for programs that look there past libibverbs: a small real tree of files,
 * made from the card's tables, and the rule that says which path lies in it. */
#ifndef TP_VERBS_SYSFS_H
#define TP_VERBS_SYSFS_H

#include <stdbool.h>
#include <stddef.h>

#define TP_SYSFS_PATH 4096

/* Where the file really lies: true, and the path in the tree, if path (absolute) names something that the card shows. Brings
 * the tree up to date first: another one where ports or GIDs changed, counters where the path leads to some. */
bool tp_sysfs_redirect(const char *path, char *out, size_t bytes);
/* A path in the tree becomes the one that it stands for; others stay as they are. */
void tp_sysfs_restore(char *path);
/* True for an entry that exists but can't be read (EINVAL): the type and interface of an empty GID. */
bool tp_sysfs_unreadable(const char *real);
/* True if path can't be one of the card's, whatever follows: cheap, and safe anywhere. */
static inline bool tp_sysfs_foreign(const char *path)
{
	return !path || path[0] != '/' || (path[1] != 's' && path[1] != 'd' && path[1] != '/' && path[1] != '.');
}

#endif
