/* What the tests of net share. */
#ifndef TP_TESTS_NET_HELPER_H
#define TP_TESTS_NET_HELPER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "net/net.h"

/* A connection inside one thread: both ends are non-blocking, so they can be moved in turn. */
struct net_pair { void *listener, *send_comm, *recv_comm; struct tp_net_hello who; };

extern const struct tp_net_hello net_hello;     /* rank 3 -> rank 5, channel 2, class 1 */
/* Sets variables ("NAME=value" or "NAME", which unsets), forgets what was read; ends with NULL. */
void net_set_environment(const char *first, ...) __attribute__((sentinel));
void net_pair_open(struct net_pair *pair);
void net_pair_close(struct net_pair *pair);
/* Fills bytes that depend on seed and place. */
void net_fill(unsigned char *data, size_t bytes, uint32_t seed);
void net_check(const unsigned char *data, size_t bytes, uint32_t seed);
/* Tests until it is done, moving other (may be NULL) too; the result of the last test. */
ncclResult_t net_wait(void *request, size_t *bytes);
void net_send_one(struct net_pair *pair, const void *data, size_t bytes, int tag, void **request);
void net_recv_one(struct net_pair *pair, void *data, size_t bytes, int tag, void **request);
/* Tests both until both are done (or one fails: that result). */
ncclResult_t net_wait_both(void *a, void *b, size_t *bytes_of_b);
/* The captured log of this process so far (INFO), NUL-terminated; caller frees. Needs net_log_capture first. */
void net_log_capture(void);
char *net_log_text(void);
void net_log_end(void);      /* removes the file */
int net_open_descriptors(void);
int net_threads(void);
uint32_t net_random(uint32_t *state);

#endif
