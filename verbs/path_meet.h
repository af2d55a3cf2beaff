/* The parts of meeting a process of this machine that path_link.c puts together. */
#ifndef TP_VERBS_PATH_MEET_H
#define TP_VERBS_PATH_MEET_H

#include "verbs/path.h"

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

#endif
