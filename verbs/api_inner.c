/* What our other front ends use of the card: the node TELPHER_1. They must not link tp_verbs themselves: a process has one card. */
#include "verbs/api.h"
#include "verbs/engine.h"
#include "verbs/gsi.h"
#include "verbs/sysfs.h"

#define TP_INNER(type, name, arguments) \
	TP_EXPORT type tp_card_inner_##name arguments; \
	type tp_card_inner_##name arguments

TP_INNER(bool, sysfs_redirect, (const char *path, char *out, size_t bytes)) { return tp_sysfs_redirect(path, out, bytes); }
TP_INNER(void, sysfs_restore, (char *path)) { tp_sysfs_restore(path); }
TP_INNER(bool, sysfs_unreadable, (const char *real)) { return tp_sysfs_unreadable(real); }
TP_INNER(void, warn, (const char *text)) { TP_WARN("%s", text); }
TP_INNER(bool, wire_always, (void)) { return tp_engine_slot() >= 0 && tp_engine_wire_always; }
TP_INNER(void, gsi_catch_up, (void)) { tp_gsi_catch_up(); }
TP_INNER(int, gsi_listen, (const union ibv_gid *own)) { return tp_gsi_listen(own); }
TP_INNER(int, gsi_send, (const union ibv_gid *from, const union ibv_gid *to, uint8_t tos, const uint8_t *mad))
{
	return tp_gsi_send(from, to, tos, mad);
}
/* A queue pair by its number, which nobody frees until it is let go; NULL: there is none (any more). */
TP_INNER(struct ibv_qp *, qp_hold, (uint32_t qpn))
{
	struct tp_qp *qp = tp_qp_get(qpn);
	return qp ? &qp->ibv : NULL;
}
TP_INNER(void, qp_let_go, (struct ibv_qp *qp)) { tp_qp_put((struct tp_qp *)qp); }
TP_INNER(int, gsi_take, (const void *parcel, size_t bytes, uint8_t *mad, union ibv_gid *from, union ibv_gid *to))
{
	return tp_gsi_take(parcel, bytes, mad, from, to);
}
