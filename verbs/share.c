/* The receiving socket of an address: this process's alone. */
#include <errno.h>
#include "verbs/engine.h"
#include "verbs/port.h"

int tp_share_socket(const union tp_addr *addr, int *fd)
{
	int error = tp_endpoint_bind(addr, false, fd);
	if (error)
		tp_endpoint_explain(addr, error);
	return error;
}
