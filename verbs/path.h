/* The short way between processes of one machine and user: what both ends agree on.
 * The carrier itself (tp_path in engine.h) chooses, probes and moves; this header holds what lies in shared memory. */
#ifndef TP_VERBS_PATH_H
#define TP_VERBS_PATH_H

#include "verbs/card.h"

/* Why a pair of processes goes by the wire, or which mechanism it uses: shown by `telpher verbs`. */
enum tp_path_reason {
	TP_PATH_TAKEN, TP_PATH_OTHER_HOST, TP_PATH_OTHER_NETNS, TP_PATH_OTHER_UID, TP_PATH_NOT_DUMPABLE, TP_PATH_CMA_REFUSED,
	TP_PATH_SWITCHED_OFF, TP_PATH_OTHER_VERSION
};
const char *tp_path_reason_text(enum tp_path_reason reason);

#endif
