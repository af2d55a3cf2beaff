/* The control connection as its owner uses it. Records are small and rare, and the peer's watch thread always reads: what can't be
 * sent at once means a network that is stuck, which life signs find out. */
#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include "net/ib/ib.h"

#define SEND_MS 100

int tp_ib_control_send(struct tp_ib_control *control, const struct tp_ib_record *record)
{
	size_t done = 0;
	int error = 0;

	/* Both the owner and the watch thread send: whole records, one after the other. */
	pthread_mutex_lock(&control->lock);
	while (done < record->head.bytes && error == 0) {
		ssize_t n = send(control->fd, (const char *)record + done, record->head.bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL);
		struct pollfd p = { .fd = control->fd, .events = POLLOUT };
		if (n > 0) done += (size_t)n;
		else if (n < 0 && errno == EINTR) continue;
		else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) error = done == 0 || poll(&p, 1, SEND_MS) <= 0 ? EAGAIN : 0;
		else error = errno ? errno : EPIPE;
	}
	pthread_mutex_unlock(&control->lock);
	return error;
}

bool tp_ib_control_take(struct tp_ib_control *control, struct tp_ib_note *out)
{
	pthread_mutex_lock(&control->lock);
	bool any = control->count > 0;
	if (any) {
		memcpy(out, &control->inbox[control->first], control->inbox[control->first].head.bytes);
		control->first = (control->first + 1) % TP_IB_INBOX;
		control->count--;
		atomic_store_explicit(&control->waiting, control->count, memory_order_release);
	}
	pthread_mutex_unlock(&control->lock);
	return any;
}

int tp_ib_control_unacknowledged(const struct tp_ib_control *control)
{
	int bytes = 0;

	return ioctl(control->fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}
