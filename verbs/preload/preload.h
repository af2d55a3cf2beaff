/* What the files of the preload share. */
#ifndef TP_VERBS_PRELOAD_H
#define TP_VERBS_PRELOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "verbs/sysfs.h"

/* The next function of that name, behind us; NULL while it is being looked for by this thread. */
void *tp_preload_next(void *_Atomic *place, const char *name);
/* The path to go on with: path itself, or out (TP_SYSFS_PATH bytes) where the card shows something there. */
const char *tp_preload_path(int dirfd, const char *path, char *out);
bool tp_preload_unreadable(const char *real);
void tp_preload_restore(char *path);
bool tp_preload_is_device(const char *real);
uint64_t tp_preload_device_number(const char *real);

/* `TP_CALL(type, name, (types), fallback)(arguments)`: NEXT(name) is the real one, typed. */
#define TP_WRAP __attribute__((visibility("default")))
#define TP_NEXT(type, name, types) \
	static void *_Atomic next_##name##_place; \
	static type (*next_##name(void)) types { return (type (*) types)tp_preload_next(&next_##name##_place, #name); }

#endif
