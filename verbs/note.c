/* `telpher verbs run` wants to know whether anybody under it opened the card: it leaves a file for a word from us. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#include "verbs/internal.h"

void tp_note_opened(void)
{
	static _Atomic bool said;
	const char *place = getenv("TELPHER_VERBS_NOTE");
	if (!place || !place[0] || atomic_exchange_explicit(&said, true, memory_order_relaxed))
		return;
	int fd = open(place, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (write(fd, "opened", 6) != 6)
		TP_INFO(TP_NET, "telpher verbs run couldn't be told that the card was opened: %m");
	close(fd);
}
