/* The exported plug-in as NCCL uses it: its tables, by version, behind one set of calls. */
#ifndef TP_TESTS_NET_HELPER_EXPORT_H
#define TP_TESTS_NET_HELPER_EXPORT_H

#include <stdbool.h>
#include "helper_net.h"
#include "net/plugin/abi.h"

struct export_pair { void *listener, *send_comm, *recv_comm, *send_memory, *recv_memory; unsigned char *from, *to; size_t bytes; };

extern int export_version;                  /* which table is used */
void export_open(int version);              /* opens the library, init; its log goes to export_log */
void export_close(void);
const char *export_log(void);               /* all lines so far: "WARN …\n", "INFO …\n" */
int export_max_recvs(void);
ncclResult_t export_listen(void *handle, void **listener);
ncclResult_t export_connect(void *handle, void **send_comm);
ncclResult_t export_accept(void *listener, void **recv_comm);
ncclResult_t export_isend(void *comm, void *data, size_t bytes, int tag, void *memory, void **request);
ncclResult_t export_irecv(void *comm, int n, void **data, size_t *bytes, int *tags, void **memory, void **request);
const struct tp_abi_v8 *export_v8(void);
const struct tp_abi_v11 *export_v11(void);
/* The functions that are the same in all versions. */
ncclResult_t export_test(void *request, int *done, int *sizes);
ncclResult_t export_reg(void *comm, void *data, size_t bytes, void **memory);
ncclResult_t export_dereg(void *comm, void *memory);
ncclResult_t export_close_comm(void *comm, bool sending);
ncclResult_t export_close_listen(void *listener);

void export_pair_open(struct export_pair *pair, size_t bytes);
void export_pair_close(struct export_pair *pair);
/* [n] pieces of each the same size as one grouped receive; sends come in the order given (places in the group). */
void export_exchange(struct export_pair *pair, int n, size_t bytes, size_t room, const int *order);
/* The tests that hold over every transport. */
void export_runs_every_version(void);
void export_groups(void);
void export_tags_may_come_in_any_order(void);
void export_keeps_many_requests(void);
void export_refuses_what_is_too_long(const char *says);
void export_closes_with_requests_in_flight(void);
void export_gives_up_connections_under_way(void);

#endif
