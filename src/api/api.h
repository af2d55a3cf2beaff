/* How an entry point is exported: the code is pncclX; ncclX is the same place under a weak name, so that a profiler can
 * put its own in front of it. */
#ifndef TP_API_API_H
#define TP_API_API_H

#include "comm/comm.h"

#define TP_API_EXPORT __attribute__((visibility("default")))
#define TP_API(ret, name, args) \
	TP_API_EXPORT __attribute__((weak, alias("p" #name))) ret name args; \
	TP_API_EXPORT ret p##name args

#endif
