/* Calls that this library has by name only: sockets over RDMA. They fail with ENOTSUP. */
#include <errno.h>
#include "verbs/rdmacm/missing.h"

#define MISSING(name) long name(void) { errno = ENOTSUP; return -1; }
CM_MISSING(MISSING)
