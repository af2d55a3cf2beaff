/* What is said when something fails: both ends, what was under way, what the status means, where to look. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "net/ib/ib.h"

const char *tp_ib_path_text(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, char *text, size_t bytes)
{
	char remote[48], mtu[24] = "";
	const struct tp_ib_qp *qp = path->qps ? &path->qps[q] : NULL;

	tp_ib_gid_format(path->remote.gid, remote);
	/* Agreed on when the queue pairs are connected. */
	if (path->mtu) snprintf(mtu, sizeof(mtu), ", MTU %d", tp_verbs_mtu_bytes(path->mtu));
	snprintf(text, bytes, "%s (%s, GID %d %s %s, QP %u, lid %u) %s %s (%s:%u, GID %u %s %s, QP %u, lid %u)%s", tp_host_name(), path->port->text, path->gid.index, path->gid.text, tp_ib_gid_type_name(path->gid.type),
		qp && qp->ibv ? qp->ibv->qp_num : 0, path->port->attr.lid, comm->sending ? "->" : "<-", comm->peer_host, path->remote.device, path->remote.port, path->remote.gid_index,
		remote, tp_ib_gid_type_name(path->remote.gid_type), path->remote.qpns[q], path->remote.lid, mtu);
	return text;
}

const char *tp_ib_used_text(const struct tp_ib_comm *comm, char *text, size_t bytes)
{
	size_t used = 0;

	text[0] = 0;
	for (int i = 0; i < comm->nused && used < bytes; i++) used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? "+" : "", comm->used[i]->port->text);
	return text;
}

const char *tp_ib_name(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, char *text, size_t bytes)
{
	int used = snprintf(text, bytes, "rank %d %s rank %d, ", comm->sending ? comm->from : comm->to, comm->sending ? "->" : "<-", comm->sending ? comm->to : comm->from);

	tp_ib_path_text(comm, path, q, text + used, bytes - (size_t)used);
	return text;
}

/* Of a completion that failed only wr_id, status, the queue pair and the vendor's code mean anything. */
void tp_ib_explain(struct tp_ib_comm *comm, struct tp_ib_path *path, const struct ibv_wc *wc, char *text, size_t bytes)
{
	static const char *const kinds[] = { "?", "RDMA_WRITE of data", "RDMA_WRITE into the sender's FIFO", "RECV", "RDMA_WRITE of no bytes, to try the path" };
	unsigned kind = (unsigned)(wc->wr_id >> 56);
	int q = (int)(wc->wr_id >> 48 & 0xff);

	snprintf(text, bytes, "Got completion from peer %s with status=%s(%d) opcode=%s vendor_err=%u, queue pair %u: %s", comm->peer, tp_verbs_status_name((int)wc->status), (int)wc->status,
		kind < TP_ARRAY_LEN(kinds) ? kinds[kind] : "?", wc->vendor_err, path->qps[q].ibv->qp_num,
		tp_verbs_status_advice((int)wc->status));
}

ncclResult_t tp_ib_fail(struct tp_ib_comm *comm, ncclResult_t result, const char *format, ...)
{
	struct tp_ib_record goodbye;
	char text[1024];
	va_list args;

	if (comm->error != ncclSuccess) return comm->error;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	comm->error = result;
	if ((comm->leaving || comm->peer_left) && result == ncclRemoteError) {
		TP_INFO(TP_NET, "NET/IB : rank %d -> rank %d, at the end : %s", comm->from, comm->to, text);
		return result;
	}
	(void)TP_FAIL(result, "NET/IB : rank %d %s rank %d (%s, %s) : %s", comm->sending ? comm->from : comm->to, comm->sending ? "->" : "<-",
		comm->sending ? comm->to : comm->from, comm->peer_host, comm->peer, text);
	tp_ib_record_start(&goodbye, TP_IB_GOODBYE);
	snprintf(goodbye.as.text.text, sizeof(goodbye.as.text.text), "%.511s", text);
	if (comm->control.fd >= 0) tp_ib_control_send(&comm->control, &goodbye);
	return result;
}
