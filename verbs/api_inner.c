/* What our other front ends use of the card: the node TELPHER_1. They must not link tp_verbs themselves: a process has one card. */
#include "verbs/api.h"
#include "verbs/sysfs.h"

#define TP_INNER(type, name, arguments) \
	TP_EXPORT type tp_card_inner_##name arguments; \
	type tp_card_inner_##name arguments

TP_INNER(bool, sysfs_redirect, (const char *path, char *out, size_t bytes)) { return tp_sysfs_redirect(path, out, bytes); }
TP_INNER(void, sysfs_restore, (char *path)) { tp_sysfs_restore(path); }
TP_INNER(bool, sysfs_unreadable, (const char *real)) { return tp_sysfs_unreadable(real); }
TP_INNER(void, warn, (const char *text)) { TP_WARN("%s", text); }
