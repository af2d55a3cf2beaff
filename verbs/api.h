/* How the exported functions are written: TP_API(type, name, arguments) is the C function tp_api_<name>, whose real name is
 * ibv_<name>. The headers of rdma-core may declare that name too, or make it a macro, or be too old to know it: all the same. */
#ifndef TP_VERBS_API_H
#define TP_VERBS_API_H

#include <errno.h>
#include "verbs/internal.h"

#define TP_EXPORT __attribute__((visibility("default")))
#define TP_API_NAMED(type, name, symbol, arguments) \
	TP_EXPORT type tp_api_##name arguments __asm__(symbol); \
	type tp_api_##name arguments
#define TP_API(type, name, arguments) TP_API_NAMED(type, name, "ibv_" #name, arguments)

#endif
