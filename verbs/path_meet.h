/* The parts of meeting a process of this machine that path_join.c puts together, and what it shares with path_link.c. */
#ifndef TP_VERBS_PATH_MEET_H
#define TP_VERBS_PATH_MEET_H

#include "verbs/path.h"

/* ---- path_meet.c ---- */

enum tp_path_hello_kind { TP_PATH_HELLO, TP_PATH_ANSWER, TP_PATH_QUESTION };
struct tp_path_hello {
	uint32_t magic, version, kind;
	int32_t slot;
	uint32_t uid, dumpable;
	uint32_t reason;                /* ANSWER */
	int32_t error;
	uint32_t yield;                 /* ANSWER: another connection between the two is under way, or there */
	uint32_t faults;                /* some strike packets: the wire, where they are real */
	uint64_t netns, process;
	uint64_t nonce, nonce_addr, token_addr;
};
/* Messages with up to 3 descriptors. tp_path_send gives 0 or an errno. */
int tp_path_send(int s, const void *data, size_t bytes, const int *fds, int count);
ssize_t tp_path_receive(int s, void *data, size_t bytes, int fds[3], int flags);
void tp_path_close_all(int *fds, int count);
void tp_path_introduce(struct tp_path_hello *hello, enum tp_path_hello_kind kind, int slot, int peer_slot);
/* May and can this process act on the memory of the one that said hello? *error: the errno of a refusal. */
enum tp_path_reason tp_path_probe(pid_t pid, const struct tp_path_hello *hello, int *error);
pid_t tp_path_pid_behind(int s, uid_t *uid);
int tp_path_connect(int slot);      /* -1 with errno */
int tp_path_listen(int slot);       /* -1 with errno */
void tp_path_meet_forget(void);
int tp_path_open_pidfd(pid_t pid);
bool tp_path_has_ended(int s, int pidfd);

/* ---- path_link.c ---- */

extern struct tp_path_state {
	pthread_mutex_t lock;           /* of links and of each link's QPs */
	pthread_cond_t changed;
	struct tp_path_link *by_slot[TP_PATH_SLOTS];
	bool connecting[TP_PATH_SLOTS], serving[TP_PATH_SLOTS];
	int slot, listener, yard_fd;
	enum tp_path_reason off;        /* why this process takes no short way; TAKEN: it does */
} tp_path_state;
/* The segments behind the descriptors (segment, yard, keys); in a link to this process the last two are its own. */
struct tp_path_link *tp_path_new_link(int slot, pid_t pid, uint64_t process, const int fds[3], bool connector);
/* Others see it from now on. false: it can't be watched, and is freed. */
bool tp_path_register_link(struct tp_path_link *link);

/* ---- path_join.c ---- */

/* For tp_progress_watch: others connect. */
int tp_path_on_connect(int fd, void *arg);

#endif
