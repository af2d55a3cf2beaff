/* What the tests of the IB transport share: it runs on Telpher's software card. */
#ifndef TP_TESTS_NET_HELPER_IB_H
#define TP_TESTS_NET_HELPER_IB_H

#include "helper_net.h"
#include "net/ib/ib.h"

struct ib_pair { void *listener, *send_comm, *recv_comm; struct tp_net_hello who; void *send_memory, *recv_memory; unsigned char *from, *to; size_t bytes; };

/* One port of the card unless cards says otherwise ("2", "a,b"); then a list of variables as for net_set_environment. */
void ib_use_card(const char *devices);
void ib_pair_open(struct ib_pair *pair, size_t bytes);     /* both ends in this thread, a registered buffer each */
void ib_pair_open_on(struct ib_pair *pair, size_t bytes, int from, int to);       /* between these devices */
void ib_pair_close(struct ib_pair *pair);
/* Sends and receives one message at this offset; the result of whichever fails. Checks size and content. */
ncclResult_t ib_exchange(struct ib_pair *pair, size_t offset, size_t bytes, int tag);
void *ib_send(struct ib_pair *pair, size_t offset, size_t bytes, int tag);     /* waits until there is room; NULL: failed */
void *ib_recv(struct ib_pair *pair, size_t offset, size_t bytes, int tag);
ncclResult_t ib_wait_both(void *a, void *b, size_t *bytes_of_b);

/* Twenty receivers that leave as soon as they have all; their senders end well. */
void ib_receiver_leaves(void);

#endif
