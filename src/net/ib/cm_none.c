/* In the place of cm.c and rdmacm_dl.c where <rdma/rdma_cma.h> wasn't there to build with: rdma_cm can be asked for, and isn't to be had, so
 * none of the others is ever called. */
#include <stdio.h>
#include <string.h>
#include "net/ib/ib.h"

bool tp_ib_cm_present(const struct tp_verbs *verbs, char *why, size_t bytes)
{
	(void)verbs;
	snprintf(why, bytes, "TELPHER_IB_CONNECT=rdma_cm: this library was built without rdma_cm (Debian and Ubuntu: build with librdmacm-dev)");
	return false;
}

ncclResult_t tp_ib_cm_create(struct tp_ib_comm *comm) { return TP_FAIL(ncclInternalError, "NET/IB : rank %d -> rank %d : there is no rdma_cm here", comm->from, comm->to); }
void tp_ib_cm_destroy(struct tp_ib_comm *comm) { comm->cm = NULL; }
void tp_ib_cm_abandon(struct tp_ib_comm *comm) { comm->cm = NULL; }
void tp_ib_cm_describe(const struct tp_ib_comm *comm, struct tp_ib_wire_meta *out) { out->connect = (uint8_t)comm->params.connect; }
void tp_ib_cm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer) { (void)comm, (void)peer; }
void tp_ib_cm_begin(struct tp_ib_comm *comm, struct tp_ib_path *path) { (void)comm, (void)path; }
bool tp_ib_cm_has_begun(const struct tp_ib_comm *comm, const struct tp_ib_path *path) { return (void)comm, (void)path, false; }
bool tp_ib_cm_is_up(const struct tp_ib_comm *comm, const struct tp_ib_path *path) { return (void)comm, (void)path, false; }
void tp_ib_cm_step(struct tp_ib_comm *comm) { (void)comm; }
void tp_ib_cm_look(struct tp_ib_comm *comm) { (void)comm; }
void tp_ib_cm_drop(struct tp_ib_comm *comm, struct tp_ib_path *path) { (void)comm, (void)path; }
const char *tp_ib_cm_waits_for(const struct tp_ib_comm *comm, const struct tp_ib_path *path, char *text, size_t bytes)
{
	(void)comm, (void)path;
	snprintf(text, bytes, "there is no rdma_cm here");
	return text;
}
int tp_ib_cm_fd(const struct tp_ib_comm *comm) { return (void)comm, -1; }
