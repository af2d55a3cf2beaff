/* How two processes of this machine come to a link, when the first QP needs it: one connects, or the other does.
 *
 * Whether a pair takes the short way is decided once for all its QPs, by the word `verdict` in the link's segment: who has probed
 * says yes, who can't or has waited too long says no, and the first counts. So the two never disagree. */
#include <errno.h>
#include <ifaddrs.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path_meet.h"

enum { VERDICT_MS = 2500, PAIRS_MAX = 64 };

const char *tp_path_reason_text(enum tp_path_reason reason)
{
	static const char *const texts[TP_PATH_REASONS] = {
		[TP_PATH_TAKEN] = "a process of this machine and user", [TP_PATH_OTHER_HOST] = "the address isn't this machine's",
		[TP_PATH_OTHER_NETNS] = "its process is in another network namespace", [TP_PATH_OTHER_UID] = "its process is another user's",
		[TP_PATH_NOT_DUMPABLE] = "one of the two processes isn't dumpable (PR_SET_DUMPABLE)",
		[TP_PATH_CMA_REFUSED] = "process_vm_readv and process_vm_writev are refused",
		[TP_PATH_SWITCHED_OFF] = "TELPHER_VERBS_CARRIER is wire in one of the two", [TP_PATH_OTHER_VERSION] = "its process has another version of this library",
		[TP_PATH_NOBODY] = "no process of this user in this network namespace has that QP", [TP_PATH_NO_ANSWER] = "its process doesn't answer",
		[TP_PATH_OTHER_PIDNS] = "its process is in another PID namespace", [TP_PATH_NO_MEMORY] = "there is no shared memory, or no descriptor, for it",
		[TP_PATH_FAULTS] = "one of the two has faults that strike packets",
	};
	return (unsigned)reason < TP_PATH_REASONS ? texts[reason] : "unknown";
}

/* ---- the verdict ---- */

/* The first word counts. Returns what counts. */
static enum tp_path_reason decide(struct tp_path_segment *segment, enum tp_path_reason reason)
{
	uint32_t none = 0;
	if (atomic_compare_exchange_strong_explicit(&segment->verdict, &none, 1 + (uint32_t)reason, memory_order_acq_rel, memory_order_acquire))
		return reason;
	return (enum tp_path_reason)(none - 1);
}

/* What was decided; waits for the other side where it is its turn. */
static enum tp_path_reason verdict_of(struct tp_path_link *link)
{
	uint64_t deadline = tp_clock_ms() + VERDICT_MS;
	uint32_t verdict;
	while (!(verdict = atomic_load_explicit(&link->segment->verdict, memory_order_acquire))) {
		if (atomic_load_explicit(&link->dead, memory_order_relaxed))
			return decide(link->segment, TP_PATH_NOBODY);
		if (tp_clock_ms() > deadline)
			return decide(link->segment, TP_PATH_NO_ANSWER);
		poll(NULL, 0, 1);
	}
	return (enum tp_path_reason)(verdict - 1);
}

/* ---- this process connects ---- */

static enum tp_path_reason await_other(int slot)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += VERDICT_MS / 1000;
	enum tp_path_reason reason = TP_PATH_TAKEN;
	pthread_mutex_lock(&tp_path_state.lock);
	while (!tp_path_state.by_slot[slot] || atomic_load_explicit(&tp_path_state.by_slot[slot]->dead, memory_order_relaxed))
		if (pthread_cond_timedwait(&tp_path_state.changed, &tp_path_state.lock, &until) != 0) {
			reason = TP_PATH_NO_ANSWER;
			break;
		}
	pthread_mutex_unlock(&tp_path_state.lock);
	return reason;
}

/* Over connection s, with the segment; takes s where a link comes of it. */
static enum tp_path_reason shake_hands(int s, int slot, int segment_fd)
{
	struct tp_path_hello hello, answer = { 0 };
	size_t key_bytes;
	int given[3] = { segment_fd, tp_path_state.yard_fd, tp_key_fd(&key_bytes) }, got[3];
	uid_t uid = (uid_t)-1;
	void *mapped;
	pid_t pid = tp_path_pid_behind(s, &uid);
	if (uid != geteuid())
		return TP_PATH_OTHER_UID;
	if (given[2] < 0 || tp_shm_map(segment_fd, sizeof(struct tp_path_segment), &mapped) != ncclSuccess)
		return TP_PATH_NO_MEMORY;
	struct tp_path_segment *segment = mapped;
	segment->magic = TP_PATH_MAGIC;
	segment->version = TP_PATH_VERSION;
	tp_path_introduce(&hello, TP_PATH_HELLO, tp_path_state.slot, slot);
	ssize_t bytes = -1;
	if (tp_path_send(s, &hello, sizeof(hello), given, 3) == 0)
		bytes = tp_path_receive(s, &answer, sizeof(answer), got, 0);
	enum tp_path_reason reason = TP_PATH_NO_ANSWER;
	struct tp_path_link *link = NULL;
	if (bytes == (ssize_t)sizeof(answer)) {
		reason = answer.yield ? TP_PATH_TAKEN : (enum tp_path_reason)answer.reason;
		int error = answer.error, fds[3] = { segment_fd, got[0], got[1] };
		if (!answer.yield && reason == TP_PATH_TAKEN)
			reason = tp_path_probe(pid, &answer, &error);
		if (!answer.yield && got[1] >= 0)
			link = tp_path_new_link(slot, pid, answer.process, fds, true);
		if (!answer.yield && !link && reason == TP_PATH_TAKEN)
			reason = TP_PATH_NO_MEMORY;
		if (link)
			link->error = error;
		tp_path_close_all(got, 3);
	}
	if (!answer.yield)
		reason = decide(segment, reason);
	tp_shm_unmap(segment);
	if (link) {
		link->socket = s;
		if (!tp_path_register_link(link))
			reason = TP_PATH_NO_MEMORY;
		return reason;
	}
	close(s);
	return bytes == (ssize_t)sizeof(answer) && answer.yield ? await_other(slot) : reason;
}

static enum tp_path_reason connect_to(int slot)
{
	int segment_fd;
	int s = tp_path_connect(slot);
	if (s < 0)
		return errno == EAGAIN || errno == ETIMEDOUT ? TP_PATH_NO_ANSWER : TP_PATH_NOBODY;
	if (tp_shm_create("telpher-verbs-link", sizeof(struct tp_path_segment), &segment_fd) != ncclSuccess) {
		close(s);
		return TP_PATH_NO_MEMORY;
	}
	enum tp_path_reason reason = shake_hands(s, slot, segment_fd);
	close(segment_fd);
	return reason;
}

/* A link to this process itself (TELPHER_VERBS_CARRIER=path). */
static enum tp_path_reason connect_self(void)
{
	int fds[3] = { -1, tp_path_state.yard_fd, -1 };
	size_t key_bytes;
	fds[2] = tp_key_fd(&key_bytes);
	if (fds[2] < 0 || tp_shm_create("telpher-verbs-link", sizeof(struct tp_path_segment), &fds[0]) != ncclSuccess)
		return TP_PATH_NO_MEMORY;
	struct tp_path_link *link = tp_path_new_link(tp_path_state.slot, getpid(), tp_process_hash(), fds, true);
	close(fds[0]);
	if (!link)
		return TP_PATH_NO_MEMORY;
	decide(link->segment, TP_PATH_TAKEN);
	return tp_path_register_link(link) ? TP_PATH_TAKEN : TP_PATH_NO_MEMORY;
}

/* The link to a slot, with a user more. */
static enum tp_path_reason find_link(int slot, struct tp_path_link **out)
{
	enum tp_path_reason reason = TP_PATH_TAKEN;
	struct tp_path_link *link = NULL;
	pthread_mutex_lock(&tp_path_state.lock);
	while (reason == TP_PATH_TAKEN) {
		link = tp_path_state.by_slot[slot];
		if (link && !atomic_load_explicit(&link->dead, memory_order_acquire))
			break;
		link = NULL;
		if (tp_path_state.connecting[slot] || tp_path_state.serving[slot]) {
			pthread_cond_wait(&tp_path_state.changed, &tp_path_state.lock);
			continue;
		}
		tp_path_state.connecting[slot] = true;
		pthread_mutex_unlock(&tp_path_state.lock);
		reason = slot == tp_path_state.slot ? connect_self() : connect_to(slot);
		pthread_mutex_lock(&tp_path_state.lock);
		tp_path_state.connecting[slot] = false;
		pthread_cond_broadcast(&tp_path_state.changed);
		/* A refusal is a link too. */
		link = tp_path_state.by_slot[slot];
		if (link && !atomic_load_explicit(&link->dead, memory_order_acquire))
			break;
		link = NULL;
		if (reason == TP_PATH_TAKEN)
			reason = TP_PATH_NOBODY;
	}
	if (link)
		atomic_fetch_add_explicit(&link->users, 1, memory_order_relaxed);
	pthread_mutex_unlock(&tp_path_state.lock);
	*out = link;
	return reason;
}

/* ---- another process connects ---- */

static void meet(int s, const struct tp_path_hello *hello, int fds[3])
{
	struct tp_path_hello answer;
	struct tp_path_link *link = NULL;
	uid_t uid = (uid_t)-1;
	size_t key_bytes;
	pid_t pid = tp_path_pid_behind(s, &uid);
	int slot = hello->slot, given[2] = { tp_path_state.yard_fd, tp_key_fd(&key_bytes) }, error = 0;
	if (slot < 0 || slot >= TP_PATH_SLOTS || uid != geteuid()) {
		close(s);
		return;
	}
	tp_path_introduce(&answer, TP_PATH_ANSWER, tp_path_state.slot, slot);
	pthread_mutex_lock(&tp_path_state.lock);
	struct tp_path_link *old = tp_path_state.by_slot[slot];
	answer.yield = (tp_path_state.connecting[slot] && tp_path_state.slot < slot) ||
		(old && !atomic_load_explicit(&old->dead, memory_order_relaxed) && old->process == hello->process);
	enum tp_path_reason reason = tp_path_state.off;
	/* Whoever wants this link from now on waits for what comes of it. */
	tp_path_state.serving[slot] = !answer.yield;
	pthread_mutex_unlock(&tp_path_state.lock);
	if (!answer.yield && reason == TP_PATH_TAKEN)
		reason = tp_path_probe(pid, hello, &error);
	if (!answer.yield && fds[2] >= 0 && given[1] >= 0)
		link = tp_path_new_link(slot, pid, hello->process, fds, false);
	if (link && (link->segment->magic != TP_PATH_MAGIC || link->segment->version != TP_PATH_VERSION))
		reason = TP_PATH_OTHER_VERSION;
	if (!answer.yield && !link && reason == TP_PATH_TAKEN)
		reason = TP_PATH_NO_MEMORY;
	answer.reason = reason;
	answer.error = error;
	if (link) {
		link->error = error;
		link->socket = s;
		if (reason != TP_PATH_TAKEN)
			decide(link->segment, reason);
		if (!tp_path_register_link(link))
			return;
		if (tp_path_send(s, &answer, sizeof(answer), given, 2) != 0)
			decide(link->segment, TP_PATH_NO_ANSWER);
		return;
	}
	tp_path_send(s, &answer, sizeof(answer), NULL, 0);
	close(s);
}

static void serve_hello(int s, const struct tp_path_hello *hello, int fds[3])
{
	meet(s, hello, fds);
	if (hello->slot < 0 || hello->slot >= TP_PATH_SLOTS)
		return;
	pthread_mutex_lock(&tp_path_state.lock);
	tp_path_state.serving[hello->slot] = false;
	pthread_cond_broadcast(&tp_path_state.changed);
	pthread_mutex_unlock(&tp_path_state.lock);
}

static void serve_question(int s)
{
	struct tp_path_pair pairs[PAIRS_MAX];
	int count = 0;
	pthread_mutex_lock(&tp_path_state.lock);
	for (struct tp_path_link *l = tp_path_first_link(); l && count < PAIRS_MAX; l = atomic_load_explicit(&l->next, memory_order_relaxed)) {
		if (atomic_load_explicit(&l->dead, memory_order_relaxed))
			continue;
		uint32_t verdict = atomic_load_explicit(&l->segment->verdict, memory_order_relaxed);
		pairs[count++] = (struct tp_path_pair){ .slot = tp_path_state.slot, .pid = getpid(), .peer_slot = l->slot, .peer_pid = l->pid,
			.reason = verdict ? (int32_t)verdict - 1 : TP_PATH_NO_ANSWER, .qps = atomic_load_explicit(&l->users, memory_order_relaxed),
			.direct = atomic_load_explicit(&l->direct_ops, memory_order_relaxed), .ring = atomic_load_explicit(&l->ring_ops, memory_order_relaxed),
			.mapped = atomic_load_explicit(&l->mapped_ops, memory_order_relaxed) };
	}
	pthread_mutex_unlock(&tp_path_state.lock);
	tp_path_send(s, pairs, (size_t)count * sizeof(pairs[0]), NULL, 0);
	close(s);
}

static int on_hello(int s, void *arg)
{
	struct tp_path_hello hello;
	int fds[3];
	(void)arg;
	ssize_t bytes = tp_path_receive(s, &hello, sizeof(hello), fds, MSG_DONTWAIT);
	if (bytes < 0 && errno == EAGAIN)
		return 0;
	tp_progress_unwatch(s);
	if (bytes != (ssize_t)sizeof(hello) || hello.magic != TP_PATH_MAGIC)
		close(s);
	else if (hello.kind == TP_PATH_QUESTION)
		serve_question(s);
	else if (hello.kind == TP_PATH_HELLO)
		serve_hello(s, &hello, fds);
	else
		close(s);
	tp_path_close_all(fds, 3);
	return 1;
}

int tp_path_on_connect(int fd, void *arg)
{
	int s, done = 0;
	(void)arg;
	while ((s = accept4(fd, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		uid_t uid = (uid_t)-1;
		tp_path_pid_behind(s, &uid);
		/* Another user has no business here, and must not hold a place by saying nothing. */
		if ((uid != geteuid() && uid != 0) || tp_progress_watch(s, on_hello, NULL) != 0)
			close(s);
		done++;
	}
	return done;
}

int tp_path_ask(int slot, struct tp_path_pair *pairs, int max)
{
	struct tp_path_hello hello;
	int s = tp_path_connect(slot), fds[3];
	if (s < 0)
		return -1;
	tp_path_introduce(&hello, TP_PATH_QUESTION, -1, 0);
	ssize_t bytes = -1;
	if (tp_path_send(s, &hello, sizeof(hello), NULL, 0) == 0)
		bytes = tp_path_receive(s, pairs, (size_t)max * sizeof(*pairs), fds, 0);
	close(s);
	return bytes < 0 ? -1 : (int)((size_t)bytes / sizeof(*pairs));
}

/* ---- who is reached ---- */

bool tp_path_is_here(const struct tp_av *av)
{
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	for (int i = 0; i < count; i++)
		for (int p = 0; p < devices[i].nports; p++)
			if (tp_port_find_gid(&devices[i].ports[p], &av->dgid, -1) >= 0)
				return true;
	/* An address of this machine that no device of this process shows. */
	struct ifaddrs *all = NULL;
	bool here = false;
	if (getifaddrs(&all) != 0)
		return false;
	for (struct ifaddrs *entry = all; entry && !here; entry = entry->ifa_next) {
		union ibv_gid gid;
		if (!entry->ifa_addr || (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6))
			continue;
		tp_gid_from_addr((const union tp_addr *)(const void *)entry->ifa_addr, &gid);
		here = !memcmp(&gid, &av->dgid, sizeof(gid));
	}
	freeifaddrs(all);
	return here;
}

static bool has_qp(struct tp_path_link *link, uint32_t qpn)
{
	return atomic_load_explicit(&link->yard->doors[TP_PATH_PLACE(qpn)].qpn, memory_order_acquire) == qpn;
}

enum tp_path_reason tp_path_reach(struct tp_qp *qp, struct tp_path_link **out)
{
	uint32_t qpn = qp->attr.dest_qp_num;
	int slot = (int)tp_qpn_slot(qpn) & (TP_PATH_SLOTS - 1);
	struct tp_path_link *link = NULL;
	*out = NULL;
	if (!tp_path_is_here(&qp->av))
		return TP_PATH_OTHER_HOST;
	if (tp_path_state.off != TP_PATH_TAKEN)
		return tp_path_state.off;
	enum tp_path_reason reason = find_link(slot, &link);
	if (link && !has_qp(link, qpn) && tp_path_is_over(link)) {
		/* The slot's next process, and nobody has told us yet. */
		tp_path_lose(link);
		tp_path_release(link);
		reason = find_link(slot, &link);
	}
	if (!link)
		return reason;
	reason = verdict_of(link);
	if (reason == TP_PATH_TAKEN && !has_qp(link, qpn))
		reason = TP_PATH_NOBODY;
	if (reason == TP_PATH_TAKEN)
		*out = link;
	else
		tp_path_release(link);
	return reason;
}

/* Slots that refused, or where nobody was, aren't asked for each datagram. */
enum { ASK_AGAIN_MS = 1000 };
static struct { _Atomic uint64_t until_ms; _Atomic int reason; } refusals[TP_PATH_SLOTS];

static struct tp_path_link *find_living(int slot)
{
	pthread_mutex_lock(&tp_path_state.lock);
	struct tp_path_link *link = tp_path_state.by_slot[slot];
	if (link && atomic_load_explicit(&link->dead, memory_order_acquire))
		link = NULL;
	if (link)
		atomic_fetch_add_explicit(&link->users, 1, memory_order_relaxed);
	pthread_mutex_unlock(&tp_path_state.lock);
	return link;
}

static enum tp_path_reason join_slot(int slot, struct tp_path_link **link)
{
	if (tp_clock_ms() < atomic_load_explicit(&refusals[slot].until_ms, memory_order_relaxed))
		return (enum tp_path_reason)atomic_load_explicit(&refusals[slot].reason, memory_order_relaxed);
	enum tp_path_reason reason = find_link(slot, link);
	if (*link)
		return verdict_of(*link);
	atomic_store_explicit(&refusals[slot].reason, (int)reason, memory_order_relaxed);
	atomic_store_explicit(&refusals[slot].until_ms, tp_clock_ms() + ASK_AGAIN_MS, memory_order_relaxed);
	return reason;
}

enum tp_path_reason tp_path_reach_slot(int slot, bool join, struct tp_path_link **out)
{
	*out = NULL;
	if (tp_path_state.off != TP_PATH_TAKEN)
		return tp_path_state.off;
	struct tp_path_link *link = find_living(slot);
	uint32_t verdict = link ? atomic_load_explicit(&link->segment->verdict, memory_order_acquire) : 0;
	enum tp_path_reason reason = verdict ? (enum tp_path_reason)(verdict - 1) : TP_PATH_NO_ANSWER;
	if (link && !verdict && join)
		reason = verdict_of(link);
	else if (!link && join)
		reason = join_slot(slot, &link);
	if (reason == TP_PATH_TAKEN)
		*out = link;
	else if (link)
		tp_path_release(link);
	return reason;
}
