/* Peers are told of registrations in the background. Each rank's socket is served by its process's service thread; every word is a
 * connection of its own, so there is nothing to keep open, and a rank that has gone is a connection that is refused. Where a receiver has
 * no room for another connection the word waits for a timer. What a word says is done by another thread (thread.c): it calls CUDA, and the service
 * thread, which hears of deaths, never does. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "mem/internal.h"

#define TALK_MS 1000
#define RETRY_NS 2000000

/* One word. A descriptor, where there is one, follows with one byte of its own. */
struct word {
	uint32_t word;                      /* enum tp_mem_word */
	uint32_t index, generation;
	uint8_t retired, mapped, has_fd, pad;
	int32_t from, to;                   /* ranks */
	struct tp_mem_record record;
	uint8_t mac[TP_SECRET_BYTES];       /* over what comes before, with the receiver's name */
};

static void sign(const struct tp_boot *boot, const struct word *word, uint64_t name, uint8_t mac[TP_SECRET_BYTES])
{
	tp_mem_sign(boot, "announce", word->from, word->to, tp_hash64(word, offsetof(struct word, mac), name), mac);
}

/* A word that waits until its receiver has room for another connection. */
struct tp_mem_pending { struct tp_mem_pending *next; int local, fd; struct word word; };

/* 0, EAGAIN: later, or why never. */
static int deliver(const struct tp_mem *mem, int local, const struct word *word, int fd)
{
	char text[80];
	int sock;
	tp_mem_socket_name(mem->boot, mem->boot->local_ranks[local], mem->names[local], text);
	int error = tp_unix_try_connect(text, 0, &sock);
	if (error) return error;
	/* Less than a new connection takes without waiting. */
	if (tp_socket_send(sock, word, sizeof(*word), tp_clock_ms() + TALK_MS, NULL) != ncclSuccess) error = EPIPE;
	if (!error && fd >= 0 && tp_unix_send_fd(sock, fd, NULL, 0) != ncclSuccess) error = EPIPE;
	close(sock);
	return error;
}

static void lose(const struct tp_mem *mem, int local, int error)
{
	/* A rank that has left its communicator, most likely. */
	if (error)
		TP_INFO(TP_REG, "rank %d can't tell rank %d of registered memory: %s", mem->boot->rank, mem->boot->local_ranks[local], strerror(error));
}

static void wake_later(struct tp_mem *mem)
{
	struct itimerspec soon = { .it_value = { 0, RETRY_NS } };
	timerfd_settime(mem->timer, 0, &soon, NULL);
}

/* say_lock is held. */
static void keep(struct tp_mem *mem, int local, const struct word *word, int fd)
{
	struct tp_mem_pending **at = &mem->pending, *p = tp_alloc(1, sizeof(*p), "a word of registered memory");
	if (!p) return;
	*p = (struct tp_mem_pending){ .local = local, .fd = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1, .word = *word };
	while (*at) at = &(*at)->next;
	*at = p;
	wake_later(mem);
}

/* Words to one rank stay in their order. Nobody waits: the receiver may be about to tell us something, too. */
static void say(struct tp_mem *mem, int local, struct word *word, int fd)
{
	word->from = mem->boot->rank;
	word->to = mem->boot->local_ranks[local];
	word->has_fd = fd >= 0;
	pthread_mutex_lock(&mem->say_lock);
	sign(mem->boot, word, mem->names[local], word->mac);
	const struct tp_mem_pending *p = mem->pending;
	while (p && p->local != local) p = p->next;
	int error = p ? EAGAIN : deliver(mem, local, word, fd);
	if (error == EAGAIN) keep(mem, local, word, fd);
	else lose(mem, local, error);
	pthread_mutex_unlock(&mem->say_lock);
}

static void retry(struct tp_mem *mem)
{
	uint64_t full = 0;
	pthread_mutex_lock(&mem->say_lock);
	for (struct tp_mem_pending **at = &mem->pending; *at;) {
		struct tp_mem_pending *p = *at;
		int error = full >> p->local & 1 ? EAGAIN : deliver(mem, p->local, &p->word, p->fd);
		if (error == EAGAIN) {
			full |= 1ull << p->local;
			at = &p->next;
			continue;
		}
		lose(mem, p->local, error);
		*at = p->next;
		if (p->fd >= 0) close(p->fd);
		free(p);
	}
	if (mem->pending) wake_later(mem);
	pthread_mutex_unlock(&mem->say_lock);
}

void tp_mem_announce(struct tp_mem *mem, enum tp_mem_word what, const struct tp_mem_range *range, int fd)
{
	for (int l = 0; l < mem->boot->nlocal; l++) {
		struct word word;
		if (l == mem->boot->local) continue;
		memset(&word, 0, sizeof(word));
		word.word = what;
		word.index = range->index;
		word.generation = range->generation;
		word.record = range->record;
		say(mem, l, &word, fd);
	}
}

void tp_mem_answer(struct tp_mem *mem, int to, uint32_t index, uint32_t generation, bool retired, bool mapped)
{
	struct word word;
	memset(&word, 0, sizeof(word));
	word.word = TP_MEM_ANSWER;
	word.index = index;
	word.generation = generation;
	word.retired = retired;
	word.mapped = mapped;
	say(mem, to, &word, -1);
}

/* ---- obeying, on a thread of its own */

/* A word that was heard. */
struct heard { struct tp_mem_task task; struct word word; int fd; };

static void discard(struct tp_mem_task *task)
{
	struct heard *heard = (struct heard *)task;
	if (heard->fd >= 0) close(heard->fd);
	free(heard);
}

static void obey(struct tp_mem_task *task)
{
	const struct heard *heard = (struct heard *)task;
	const struct word *word = &heard->word;
	struct tp_mem *mem = task->mem;
	int from = mem->boot->peers[word->from].local;
	switch (word->word) {
	case TP_MEM_ANNOUNCE: tp_mem_peer_announced(mem, from, word->index, word->generation, &word->record, heard->fd); break;
	case TP_MEM_RETIRE: tp_mem_peer_retired(mem, from, word->index, word->generation); break;
	default: tp_mem_peer_answered(mem, from, word->index, word->generation, word->retired != 0, word->mapped != 0); break;
	}
	discard(task);
}

/* ---- hearing, on the service thread */

static bool is_ours(const struct tp_mem *mem, const struct word *word)
{
	const struct tp_boot *boot = mem->boot;
	uint8_t mac[TP_SECRET_BYTES];
	if (word->from < 0 || word->from >= boot->nranks || word->from == boot->rank || word->to != boot->rank || boot->peers[word->from].host != boot->host)
		return false;
	sign(boot, word, mem->names[boot->local], mac);
	return tp_secret_equal(mac, word->mac) && word->index < TP_MEM_BUFFERS && word->word >= TP_MEM_ANNOUNCE && word->word <= TP_MEM_ANSWER;
}

static void hear(struct tp_mem *mem, int sock)
{
	struct word word;
	int fd = -1;
	uint64_t deadline_ms = tp_clock_ms() + TALK_MS;
	if (tp_socket_recv(sock, &word, sizeof(word), deadline_ms, NULL) != ncclSuccess) return;
	if (!is_ours(mem, &word)) {
		TP_INFO(TP_REG, "rank %d: a stranger spoke of registered memory; it was ignored", mem->boot->rank);
		return;
	}
	if (word.has_fd && tp_unix_recv_fd(sock, &fd, NULL, 0, deadline_ms) != ncclSuccess) fd = -1;
	struct heard *heard = tp_alloc(1, sizeof(*heard), "a peer's word");
	if (heard) {
		*heard = (struct heard){ .task = { .mem = mem, .run = obey, .discard = discard }, .word = word, .fd = fd };
		tp_mem_thread_add(&heard->task);
	} else if (fd >= 0) {
		close(fd);
	}
}

/* Whoever has connected and not yet said a whole word; in the order in which they came, which is that of each peer's words. */
struct tp_mem_guest { struct tp_mem_guest *next; int sock; uint64_t since_ms; };

static bool has_spoken(int sock)
{
	int bytes = 0;
	return ioctl(sock, FIONREAD, &bytes) == 0 && bytes >= (int)sizeof(struct word);
}

/* A guest that says nothing holds nobody up. */
static void attend(struct tp_mem *mem)
{
	uint64_t now_ms = tp_clock_ms();
	for (struct tp_mem_guest **at = &mem->guests; *at;) {
		struct tp_mem_guest *guest = *at;
		bool speaks = has_spoken(guest->sock);
		if (!speaks && now_ms - guest->since_ms < TALK_MS) {
			at = &guest->next;
			continue;
		}
		*at = guest->next;
		if (speaks) hear(mem, guest->sock);
		close(guest->sock);
		free(guest);
	}
	if (mem->guests) wake_later(mem);
}

static void come(void *arg, uint32_t events)
{
	struct tp_mem *mem = arg;
	struct tp_mem_guest **last = &mem->guests;
	pid_t pid;
	uid_t uid;
	(void)events;
	while (*last) last = &(*last)->next;
	for (;;) {
		int sock = accept4(mem->listener, NULL, NULL, SOCK_CLOEXEC);
		if (sock < 0 && errno == EINTR) continue;
		if (sock < 0) break;
		struct tp_mem_guest *guest = tp_unix_peer(sock, &pid, &uid) == ncclSuccess && uid == geteuid() ? tp_alloc(1, sizeof(*guest), "a peer's word") : NULL;
		if (!guest) {
			close(sock);
			continue;
		}
		*guest = (struct tp_mem_guest){ NULL, sock, tp_clock_ms() };
		*last = guest;
		last = &guest->next;
	}
	attend(mem);
}

/* On the service thread: words that wait for room at their receivers, guests that have not spoken. */
static void tick(void *arg, uint32_t events)
{
	struct tp_mem *mem = arg;
	uint64_t expired;
	(void)events;
	if (read(mem->timer, &expired, sizeof(expired)) < 0) return;
	retry(mem);
	attend(mem);
}

ncclResult_t tp_mem_announce_open(struct tp_mem *mem)
{
	mem->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (mem->timer < 0) return TP_FAIL(ncclSystemError, "rank %d: no timer for registered memory: %s", mem->boot->rank, strerror(errno));
	TP_TRY(tp_mem_thread_start());
	TP_TRY(tp_service_watch_fd(mem->timer, EPOLLIN, tick, mem, &mem->timer_watch));
	TP_TRY(tp_mem_listen(mem->boot, &mem->listener, &mem->names[mem->boot->local]));
	TP_TRY(tp_socket_set_nonblocking(mem->listener, true));
	return tp_service_watch_fd(mem->listener, EPOLLIN, come, mem, &mem->watch);
}

void tp_mem_announce_close(struct tp_mem *mem)
{
	if (mem->watch) tp_service_unwatch(mem->watch);
	if (mem->timer_watch) tp_service_unwatch(mem->timer_watch);
	tp_mem_thread_forget(mem);
	if (mem->listener >= 0) close(mem->listener);
	if (mem->timer >= 0) close(mem->timer);
	while (mem->pending) {
		struct tp_mem_pending *p = mem->pending;
		mem->pending = p->next;
		if (p->fd >= 0) close(p->fd);
		free(p);
	}
	while (mem->guests) {
		struct tp_mem_guest *guest = mem->guests;
		mem->guests = guest->next;
		close(guest->sock);
		free(guest);
	}
	mem->watch = mem->timer_watch = NULL;
	mem->listener = mem->timer = -1;
}
