#include "verbs/stubs.h"
#include <errno.h>
#include "base/base.h"

static void say_once(_Atomic bool *said, const char *name, const char *why)
{
	if (!atomic_exchange_explicit(said, true, memory_order_relaxed))
		TP_WARN("%s was called: %s", name, why);
}

long tp_stub_old(const char *name)
{
	static _Atomic bool said;
	say_once(&said, name, "this program was built for the verbs ABI of before 2007 (IBVERBS_1.0), which the software card "
		"doesn't offer; build it against a current libibverbs");
	errno = ENOSYS;
	return 0;
}

long tp_stub_refuse(const char *name)
{
	static _Atomic bool said;
	say_once(&said, name, "only a driver of real hardware calls this, and the software card has none");
	errno = EOPNOTSUPP;
	return EOPNOTSUPP;
}
