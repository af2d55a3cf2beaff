/* Every rank of a host shows a piece of its memory to the others. Where it is, all learn from an all-gather; the descriptors that go with it
 * are passed by abstract Unix sockets: each rank listens, tells its socket's name in the gather, pushes its descriptor to
 * all who want it and then takes theirs. A message is small enough to lie in a socket's buffer, so nobody waits for anybody
 * while pushing. Who connects proves the communicator's secret. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mem/internal.h"

#define SLICE_MS 50
#define STRANGER_MS 2000

/* What a rank tells all others. */
struct card {
	struct tp_gpu_export export;
	uint64_t name;                      /* of its socket, random; 0: it has none */
	struct tp_gpu_memory memory;        /* for ranks of its process; to others its pointers mean nothing */
	uint32_t shows, has_fd;
};
/* What goes with a descriptor. */
struct token { int32_t from, to; uint8_t mac[TP_SECRET_BYTES]; };

static void socket_name(const struct tp_boot *boot, int rank, uint64_t name, char text[80])
{
	snprintf(text, 80, "telpher-mem-%016llx-%d-%016llx", (unsigned long long)boot->comm_hash, rank, (unsigned long long)name);
}

void tp_mem_sign(const struct tp_boot *boot, const char *what, int from, int to, uint64_t nonce, uint8_t mac[TP_SECRET_BYTES])
{
	struct { char what[16]; uint64_t nonce; int32_t from, to; } text;
	memset(&text, 0, sizeof(text));
	snprintf(text.what, sizeof(text.what), "%s", what);
	text.nonce = nonce;
	text.from = from;
	text.to = to;
	tp_secret_mac(boot->secret, &text, sizeof(text), mac);
}

static bool same_process(const struct tp_boot *boot, int rank)
{
	return boot->peers[rank].process_hash == boot->peers[boot->rank].process_hash;
}

/* Does the pair pass descriptors? Both sides find the same. */
static bool is_passed(const struct tp_boot *boot, const struct card *from, int rank, bool wanted)
{
	return wanted && rank != boot->rank && from->has_fd && !same_process(boot, rank);
}

static ncclResult_t push(const struct tp_boot *boot, const struct card *cards, int to, int fd)
{
	char name[80];
	struct token token = { boot->rank, to, { 0 } };
	int sock;
	socket_name(boot, to, cards[to].name, name);
	tp_mem_sign(boot, "exchange", boot->rank, to, cards[to].name, token.mac);
	TP_TRY(tp_unix_connect(name, 10000, &sock));
	ncclResult_t result = tp_unix_send_fd(sock, fd, &token, sizeof(token));
	close(sock);
	return result;
}

/* Somebody has connected. *from: whose descriptor it was, -1: nobody's that we know. */
static ncclResult_t take(const struct tp_boot *boot, uint64_t name, int sock, int *from, int *fd)
{
	struct token token;
	uint8_t mac[TP_SECRET_BYTES];
	int got = -1;
	*from = -1;
	/* A stranger that says nothing must not hold us long. */
	if (tp_unix_recv_fd(sock, &got, &token, sizeof(token), tp_clock_ms() + STRANGER_MS) != ncclSuccess) return ncclSuccess;
	bool known = token.from >= 0 && token.from < boot->nranks && token.to == boot->rank && boot->peers[token.from].host == boot->host;
	if (known) tp_mem_sign(boot, "exchange", token.from, token.to, name, mac);
	if (!known || !tp_secret_equal(mac, token.mac)) {
		close(got);
		TP_INFO(TP_ALLOC, "rank %d: a stranger passed a descriptor; it was closed", boot->rank);
		return ncclSuccess;
	}
	*from = token.from;
	*fd = got;
	return ncclSuccess;
}

static ncclResult_t check_events(struct tp_boot *boot, const char *what)
{
	struct tp_event event;
	if (boot->abort && atomic_load_explicit(boot->abort, memory_order_relaxed))
		return TP_FAIL(ncclInternalError, "rank %d: %s was aborted", boot->rank, what);
	if (tp_boot_first_event(boot, &event))
		return TP_FAIL(event.result == ncclSuccess ? ncclRemoteError : event.result, "rank %d: %s ended: %s", boot->rank, what, event.text);
	return ncclSuccess;
}

/* fds: [nlocal], -1 where none has come. Death and failure of others come as events. */
static ncclResult_t take_all(struct tp_boot *boot, int listener, uint64_t name, int missing, int *fds)
{
	while (missing > 0) {
		struct pollfd p = { .fd = listener, .events = POLLIN };
		TP_TRY(check_events(boot, "the exchange of GPU memory"));
		if (poll(&p, 1, SLICE_MS) <= 0) continue;
		int sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC), from = -1, fd = -1;
		if (sock < 0 && (errno == EMFILE || errno == ENFILE))
			return TP_FAIL(ncclSystemError, "rank %d has no descriptor left to take GPU memory of its peers: raise ulimit -n", boot->rank);
		if (sock < 0) continue;
		ncclResult_t result = take(boot, name, sock, &from, &fd);
		close(sock);
		TP_TRY(result);
		if (from < 0) continue;
		int *place = &fds[boot->peers[from].local];
		if (*place >= 0) close(*place);
		else missing--;
		*place = fd;
	}
	return ncclSuccess;
}

static ncclResult_t pass_all(struct tp_boot *boot, const struct card *cards, const bool *wanted, int listener, int own_fd, int *fds)
{
	int missing = 0;
	for (int l = 0; l < boot->nlocal; l++) {
		int rank = boot->local_ranks[l];
		if (is_passed(boot, &cards[boot->rank], rank, wanted[l])) TP_TRY(push(boot, cards, rank, own_fd));
		missing += is_passed(boot, &cards[rank], rank, wanted[l]);
	}
	return take_all(boot, listener, cards[boot->rank].name, missing, fds);
}

/* ---- plain memory that others of this process use at its own address outlives its owner until they are done. */

struct shown { struct shown *next; void *ptr; struct tp_gpu_memory memory; int users; };
static pthread_mutex_t shown_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shown *all_shown;

static struct shown **find_shown(void *ptr)
{
	struct shown **at = &all_shown;
	while (*at && (*at)->ptr != ptr) at = &(*at)->next;
	return at;
}

static ncclResult_t borrow(void *ptr)
{
	pthread_mutex_lock(&shown_lock);
	struct shown *s = *find_shown(ptr);
	if (!s && (s = tp_alloc(1, sizeof(*s), "memory that ranks of a process share"))) {
		*s = (struct shown){ .next = all_shown, .ptr = ptr };
		all_shown = s;
	}
	if (s) s->users++;
	pthread_mutex_unlock(&shown_lock);
	return s ? ncclSuccess : ncclSystemError;
}

static void give_back(void *ptr)
{
	struct tp_gpu_memory last = { 0 };
	pthread_mutex_lock(&shown_lock);
	struct shown **at = find_shown(ptr), *s = *at;
	if (s && --s->users == 0) {
		last = s->memory;
		*at = s->next;
		free(s);
	}
	pthread_mutex_unlock(&shown_lock);
	tp_gpu_free(&last);
}

void tp_mem_free_shown(struct tp_gpu_memory *memory)
{
	if (!memory->ptr) return;
	pthread_mutex_lock(&shown_lock);
	struct shown *s = *find_shown(memory->ptr);
	if (s) s->memory = *memory;
	pthread_mutex_unlock(&shown_lock);
	if (s) memset(memory, 0, sizeof(*memory));
	else tp_gpu_free(memory);
}

/* Its error is already in the log; here it becomes the reason why a pair goes another way. */
static void map_peer(const struct tp_boot *boot, const struct tp_gpu *gpu, const struct card *card, int rank, int fd, struct tp_mem_map *map)
{
	ncclResult_t result;
	if (same_process(boot, rank)) {
		const struct tp_gpu_memory *memory = &card->memory;
		result = tp_gpu_map_again(gpu, memory, &map->imported);
		if (result == ncclSuccess && !map->imported.ptr) result = borrow(memory->ptr);
		if (result == ncclSuccess) map->ptr = map->imported.ptr ? map->imported.ptr : memory->ptr;
	} else {
		result = tp_gpu_import(gpu, &card->export, fd, &map->imported);
		if (result == ncclSuccess) map->ptr = map->imported.ptr;
	}
	if (result != ncclSuccess) snprintf(map->why, sizeof(map->why), "%.95s", tp_log_last_error());
}

static ncclResult_t show(struct tp_boot *boot, const struct tp_gpu_memory *own, struct card *card, int *listener, int *fd)
{
	char name[80];
	if (own) {
		TP_TRY(tp_gpu_export(own, &card->export, fd));
		card->shows = 1;
		card->has_fd = *fd >= 0;
		card->memory = *own;
	}
	do tp_secret_random(&card->name, sizeof(card->name)); while (!card->name);
	socket_name(boot, boot->rank, card->name, name);
	return tp_unix_listen(name, boot->nlocal + 16, listener);
}

ncclResult_t tp_mem_exchange(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_gpu_memory *own, const bool *wanted,
	struct tp_mem_map *maps)
{
	int listener = -1, own_fd = -1;
	struct card *cards = tp_alloc((size_t)boot->nranks, sizeof(*cards), "the ranks' GPU memory");
	int *fds = tp_alloc((size_t)boot->nlocal, sizeof(*fds), "descriptors of GPU memory");
	ncclResult_t result = cards && fds ? ncclSuccess : ncclSystemError;
	for (int l = 0; fds && l < boot->nlocal; l++) fds[l] = -1;
	if (result == ncclSuccess) result = show(boot, own, &cards[boot->rank], &listener, &own_fd);
	if (result == ncclSuccess) result = tp_boot_all_gather(boot, cards, sizeof(*cards));
	if (result == ncclSuccess) result = pass_all(boot, cards, wanted, listener, own_fd, fds);
	for (int l = 0; l < boot->nlocal && result == ncclSuccess; l++) {
		int rank = boot->local_ranks[l];
		if (rank == boot->rank) maps[l] = (struct tp_mem_map){ .ptr = own ? own->ptr : NULL, .own = true };
		else if (wanted[l] && cards[rank].shows) map_peer(boot, gpu, &cards[rank], rank, fds[l], &maps[l]);
	}
	/* Whoever leaves may free what others of its process still map by address, and close a listener that they push to. */
	if (result == ncclSuccess) result = tp_boot_barrier(boot);
	if (result != ncclSuccess) tp_mem_unmap(maps, boot->nlocal);
	for (int l = 0; fds && l < boot->nlocal; l++)
		if (fds[l] >= 0) close(fds[l]);
	if (listener >= 0) close(listener);
	if (own_fd >= 0) close(own_fd);
	free(fds);
	free(cards);
	return result;
}

void tp_mem_unmap(struct tp_mem_map *maps, int nlocal)
{
	for (int l = 0; maps && l < nlocal; l++) {
		if (maps[l].ptr && !maps[l].imported.ptr && !maps[l].own) give_back(maps[l].ptr);
		tp_gpu_free(&maps[l].imported);
		memset(&maps[l], 0, sizeof(maps[l]));
	}
}
