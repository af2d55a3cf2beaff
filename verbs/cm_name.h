/* Who a message of the connection manager is for, as the name of a Unix socket: the process that owns the connection, whose
 * 16-bit name is the upper half of the connection's number, or whoever holds the port that a request names. A request's
 * transaction begins with the name of the process that made it, for refusals that don't bring its number. */
#ifndef TP_VERBS_CM_NAME_H
#define TP_VERBS_CM_NAME_H

#include <sys/socket.h>
#include <sys/un.h>
#include "verbs/cm_mad.h"

struct tp_cm_name { bool port; uint16_t space, number; };
static inline struct tp_cm_name tp_cm_name_of_number(uint32_t number) { return (struct tp_cm_name){ .number = (uint16_t)(number >> 16) }; }
/* False: a service that is no port, or a peer's number alone (tp_cm_rej_of_peer). */
bool tp_cm_name_of_mad(const struct tp_cm_mad *mad, struct tp_cm_name *out);
/* The socket's address, of this user; returns its length. */
socklen_t tp_cm_name_address(const struct tp_cm_name *name, struct sockaddr_un *out);

#endif
