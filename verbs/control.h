/* Orders to a running process: faults, and a capture of its packets. It listens at an abstract Unix socket with its number in the
 * name, and takes orders of its own user and of root. An order is one message with one descriptor, and so is its answer. */
#ifndef TP_VERBS_CONTROL_H
#define TP_VERBS_CONTROL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TP_CONTROL_MAGIC 0x54504331u
#define TP_CONTROL_VERSION 1u

enum tp_control_kind {
	TP_CONTROL_FAULTS,              /* text: the list of them (fault.h) */
	TP_CONTROL_SHOW,                /* the answer's text: those that strike */
	TP_CONTROL_CAPTURE              /* into the file that comes along, for as long as the connection lasts */
};
struct tp_control_order { uint32_t magic, version, kind, pad; char text[1024]; };
struct tp_control_answer { uint32_t magic, version; int32_t error; uint32_t pad; char text[1024]; };

/* The socket's name without the leading zero byte. A PID namespace is part of it: containers of one pod number their processes alike. */
void tp_control_name(uid_t uid, pid_t pid, char *out, size_t bytes);
/* Listens from now on; called when the process begins to use the card. */
void tp_control_start(void);

#endif
