/* What the files of watch share; no other folder includes this. */
#ifndef TP_WATCH_INTERNAL_H
#define TP_WATCH_INTERNAL_H

#include "watch/watch.h"

const struct tp_watch_path *tp_watch_paths_at(const struct tp_watch_paths *paths, size_t index);

#endif
