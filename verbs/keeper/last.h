/* What processes that have ended still owe (verbs/last.h): their sockets are heard, and repeats of what they took in are answered. */
#ifndef TP_VERBS_KEEPER_LAST_H
#define TP_VERBS_KEEPER_LAST_H

#include <stdbool.h>
#include <stdint.h>
#include "base/base.h"

/* A member's pipe: what it leaves. */
void tp_keeper_last_read(int pipe, int slot);
/* The slot has a new process. */
void tp_keeper_last_drop(int slot);
/* Does anybody who had that slot owe something? Then packets for it may be taken in. */
bool tp_keeper_last_any(int slot);
/* Takes in what has come to such a slot's socket, bound to own. */
void tp_keeper_last_serve(int fd, const union tp_addr *own);

#endif
