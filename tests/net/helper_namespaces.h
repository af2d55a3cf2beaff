/* Network namespaces as machines, for tests that run as root and have ip and nsenter. Nothing has a name, so nothing is left behind. */
#ifndef TP_TESTS_NET_HELPER_NAMESPACES_H
#define TP_TESTS_NET_HELPER_NAMESPACES_H

#include <stdbool.h>
#include <sys/types.h>

bool shell(const char *format, ...) __attribute__((format(printf, 1, 2)));     /* did it end well? */
/* This process moves to a namespace of its own with interfaces tp0 and tp1, which are up, at 10.NETWORK.0.1 and 10.NETWORK.1.1. */
bool namespaces_enter_own(int network);
/* The namespaces of two processes get an interface of this name each, joined; the first has address 1 of each network ("10.1.2."; v6, as "fd12::", may
 * be NULL, and is left out where there is no IPv6), the second address 2. */
bool namespaces_join(const pid_t sides[2], const char *name, const char *v4, const char *v6);
/* Until both are up. Linux looks at them once a second: so join all, then wait. */
bool namespaces_await(const pid_t sides[2], const char *name);

#endif
