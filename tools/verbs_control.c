/* `telpher verbs fault` and `telpher verbs capture`: orders to processes that use the software card now (verbs/control.h). */
#include "tools.h"
#include "verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/base.h"
#include "verbs/control.h"
#include "verbs/fault.h"

enum { MAX_PROCESSES = 256, ANSWER_MS = 5000 };

struct choice { int pids[MAX_PROCESSES]; uid_t uids[MAX_PROCESSES]; int count; };

/* The processes of this user (root: of all) that take orders, in this network namespace, and that have a number here. */
static void find_processes(struct choice *out)
{
	char line[512], own[64];
	FILE *file = fopen("/proc/self/net/unix", "re");
	out->count = 0;
	while (file && out->count < MAX_PROCESSES && fgets(line, sizeof(line), file)) {
		const char *name = strstr(line, "@telpher-verbs/1/");
		unsigned uid;
		int pid;
		if (!name || sscanf(name, "@telpher-verbs/1/%u/control/%d", &uid, &pid) != 2 || (uid != geteuid() && geteuid() != 0))
			continue;
		line[strcspn(line, "\n")] = 0;
		tp_control_name(uid, pid, own, sizeof(own));
		if (strcmp(name + 1, own))
			continue;
		bool known = false;
		for (int i = 0; i < out->count; i++)
			known |= out->pids[i] == pid;
		if (known)
			continue;
		out->uids[out->count] = uid;
		out->pids[out->count++] = pid;
	}
	if (file)
		fclose(file);
}

static const char *program_of(int pid, char *out, size_t bytes)
{
	char path[64];
	snprintf(path, sizeof(path), "/proc/%d/comm", pid);
	FILE *file = fopen(path, "re");
	snprintf(out, bytes, "?");
	if (file && fgets(out, (int)bytes, file))
		out[strcspn(out, "\n")] = 0;
	if (file)
		fclose(file);
	return out;
}

static int connect_process(int pid)
{
	struct choice running;
	char name[64], unused[64];
	int fd, error = ECONNREFUSED;
	find_processes(&running);
	for (int i = 0; i < running.count; i++) {
		if (running.pids[i] != pid)
			continue;
		tp_control_name(running.uids[i], pid, name, sizeof(name));
		error = tp_unix_try_connect(name, 100, &fd);
		if (!error)
			return fd;
	}
	fprintf(stderr, "telpher verbs: process %d can't be reached (%s). It must use the card, in this network namespace, as this user.", pid, strerror(error));
	for (int i = 0; i < running.count; i++)
		fprintf(stderr, "%s %d (%s)", i ? "," : " There are:", running.pids[i], program_of(running.pids[i], unused, sizeof(unused)));
	fprintf(stderr, "\n");
	return -1;
}

/* One order; 0 and the answer's text, or an errno, said. */
static int ask(int pid, int s, enum tp_control_kind kind, const char *text, int with, struct tp_control_answer *answer)
{
	struct tp_control_order order = { .magic = TP_CONTROL_MAGIC, .version = TP_CONTROL_VERSION, .kind = kind };
	int unused = -1;
	snprintf(order.text, sizeof(order.text), "%s", text);
	if (tp_unix_send_fd(s, with, &order, sizeof(order)) != ncclSuccess ||
		tp_unix_recv_fd(s, &unused, answer, sizeof(*answer), tp_clock_ms() + ANSWER_MS) != ncclSuccess) {
		fprintf(stderr, "telpher verbs: process %d gives no answer\n", pid);
		return ECONNRESET;
	}
	close(unused);
	int error = answer->magic != TP_CONTROL_MAGIC || answer->version != TP_CONTROL_VERSION ? EPROTO : answer->error;
	if (error)
		fprintf(stderr, "telpher verbs: process %d says: %s\n", pid, error == EPROTO ? "it has another version of the library" : strerror(error));
	answer->text[sizeof(answer->text) - 1] = 0;
	return error;
}

/* Reads -p PID (several), --all and what follows; false: said what is wrong. Without either there must be one process. */
static bool choose(const char *command, int argc, char **argv, struct choice *out, int *rest)
{
	bool all = false;
	int i = 1;
	out->count = 0;
	for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
		if (!strcmp(argv[i], "--")) {
			i++;
			break;
		}
		if (!strcmp(argv[i], "--all")) {
			all = true;
		} else if ((!strcmp(argv[i], "-p") || !strcmp(argv[i], "--pid")) && i + 1 < argc && out->count < MAX_PROCESSES) {
			char *end;
			long pid = strtol(argv[++i], &end, 10);
			if (*end || pid <= 0)
				return tool_usage_error(command, "'%s' is no process number", argv[i]), false;
			out->pids[out->count++] = (int)pid;
		} else {
			return tool_usage_error(command, "there is no option '%s'", argv[i]), false;
		}
	}
	*rest = i;
	if (out->count)
		return true;
	find_processes(out);
	if (out->count == 1 || (all && out->count))
		return true;
	if (!out->count) {
		fprintf(stderr, "telpher %s: no process of this user uses the software card in this network namespace\n", command);
		return false;
	}
	fprintf(stderr, "telpher %s: which process? -p PID, or --all of", command);
	for (int k = 0; k < out->count; k++) {
		char name[64];
		fprintf(stderr, "%s %d (%s)", k ? "," : "", out->pids[k], program_of(out->pids[k], name, sizeof(name)));
	}
	fprintf(stderr, "\n");
	return false;
}

static int fault_help(void)
{
	printf("usage: telpher verbs fault [-p PID]... [--all] [FAULTS|none]\n\n"
		"Has processes that use the software card meet faults, from now on and instead of those before; without FAULTS, shows them.\n"
		"A process may begin with them: TELPHER_VERBS_FAULT=FAULTS. A list, with commas:\n\n"
		"packets   drop=RATE duplicate=RATE reorder=RATE corrupt=RATE delay=RATE:TIME   RATE: 0 to 1; TIME: 50us, 2ms\n"
		"          dscp=DSCP:RATE    lost where they have that DSCP\n"
		"          mtu=BYTES         lost, without a word, where their IP packet is larger\n"
		"          unroute=ADDRESS   lost to and from there\n"
		"          dead              all lost\n"
		"          slow=TIME         the receiver sleeps before each batch\n"
		"          side=out|in|both  which packets (default: out)\n"
		"          scatter=RATE      a WRITE's packets land in another order, its immediate last\n"
		"objects   open=ERROR        devices can't be opened: EACCES, EPERM, ENODEV, ENOENT, ENOMEM, EMFILE, EIO, EBUSY\n"
		"          missing           devices aren't there\n"
		"          down              ports are down, and dead\n"
		"          memlock=BYTES     no more memory can be registered: ENOMEM (64K, 1M, 1G)\n"
		"          cq=COUNT          completion queues fail at the COUNT-th completion\n"
		"          protection=RATE   requests fail with a local protection error, as with ACS in the way of peer memory\n"
		"          of one device:    missing=DEVICE down=DEVICE open=ERROR:DEVICE memlock=BYTES:DEVICE …\n"
		"all       seed=NUMBER       the same seed gives the same faults again\n");
	return 0;
}

static bool wants_help(int argc, char **argv) { return argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")); }

int tool_verbs_fault(int argc, char **argv)
{
	struct choice choice;
	int rest, result = 0;
	if (wants_help(argc, argv))
		return fault_help();
	if (!choose("verbs fault", argc, argv, &choice, &rest))
		return TOOL_USAGE;
	if (argc - rest > 1)
		return tool_usage_error("verbs fault", "one list of faults, with commas, please");
	const char *text = rest < argc ? argv[rest] : NULL;
	/* Read here first: whoever has a wrong list is to hear of it, not the process. */
	if (text && tp_fault_text_set(text))
		return tool_usage_error("verbs fault", "'%s' can't be read", text);
	for (int i = 0; i < choice.count; i++) {
		struct tp_control_answer answer;
		int s = connect_process(choice.pids[i]);
		int error = s < 0 ? ESRCH : ask(choice.pids[i], s, text ? TP_CONTROL_FAULTS : TP_CONTROL_SHOW, text ? text : "", s, &answer);
		if (!error && !text)
			printf("%d\t%s\n", choice.pids[i], answer.text);
		if (s >= 0)
			close(s);
		result |= error != 0;
	}
	return result;
}

/* "%p" in the name becomes the process's number. */
static bool make_name(const char *name, int pid, char *out, size_t bytes)
{
	const char *at = strstr(name, "%p");
	int length = at ? snprintf(out, bytes, "%.*s%d%s", (int)(at - name), name, pid, at + 2) : snprintf(out, bytes, "%s", name);
	return length < (int)bytes;
}

static int start_capture(int pid, const char *name)
{
	struct tp_control_answer answer;
	char path[4096];
	int file = make_name(name, pid, path, sizeof(path)) ? open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
	if (file < 0) {
		fprintf(stderr, "telpher verbs capture: %s can't be written: %s\n", path, strerror(errno));
		return -1;
	}
	int s = connect_process(pid);
	if (s >= 0 && ask(pid, s, TP_CONTROL_CAPTURE, "", file, &answer)) {
		close(s);
		s = -1;
	}
	close(file);
	return s;
}

/* Until a signal comes, time is over or all processes have ended. */
static void wait_for_end(int *sockets, int count, int milliseconds)
{
	struct pollfd polls[1 + MAX_PROCESSES];
	sigset_t ends;
	sigemptyset(&ends);
	sigaddset(&ends, SIGINT);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGHUP);
	uint64_t end_ms = tp_clock_ms() + (uint64_t)milliseconds;
	polls[0] = (struct pollfd){ .fd = signalfd(-1, &ends, SFD_CLOEXEC), .events = POLLIN };
	for (;;) {
		int alive = 0;
		for (int i = 0; i < count; i++) {
			polls[1 + i] = (struct pollfd){ .fd = sockets[i], .events = POLLIN };
			alive += sockets[i] >= 0;
		}
		uint64_t now_ms = tp_clock_ms();
		if (!alive || (milliseconds && now_ms >= end_ms))
			return;
		if (poll(polls, (nfds_t)count + 1, milliseconds ? (int)(end_ms - now_ms) : -1) > 0 && polls[0].revents)
			return;
		for (int i = 0; i < count; i++)
			if (sockets[i] >= 0 && polls[1 + i].revents) {
				close(sockets[i]);
				sockets[i] = -1;
			}
	}
}

int tool_verbs_capture(int argc, char **argv)
{
	struct choice choice;
	int rest, sockets[MAX_PROCESSES], started = 0, milliseconds = 0;
	if (wants_help(argc, argv)) {
		printf("usage: telpher verbs capture [-p PID]... [--all] FILE.pcapng [SECONDS]\n\n"
			"Writes the packets of processes that use the software card into a file that Wireshark and scapy read, until it is interrupted,\n"
			"SECONDS are over, or they have ended. %%p in FILE becomes the process's number, and must be there for several processes.\n"
			"A process may begin with it: TELPHER_VERBS_CAPTURE=FILE.\n");
		return 0;
	}
	if (!choose("verbs capture", argc, argv, &choice, &rest))
		return TOOL_USAGE;
	if (rest >= argc || argc - rest > 2)
		return tool_usage_error("verbs capture", "into which file?");
	if (choice.count > 1 && !strstr(argv[rest], "%p"))
		return tool_usage_error("verbs capture", "%d processes need a file each: put %%p, their number, into its name", choice.count);
	if (argc - rest == 2) {
		char *end;
		double seconds = strtod(argv[rest + 1], &end);
		if (*end || seconds <= 0 || seconds > 1e6)
			return tool_usage_error("verbs capture", "'%s' is no number of seconds", argv[rest + 1]);
		milliseconds = (int)(seconds * 1000);
	}
	sigset_t ends;
	sigemptyset(&ends);
	sigaddset(&ends, SIGINT);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGHUP);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	for (int i = 0; i < choice.count; i++)
		if ((sockets[started] = start_capture(choice.pids[i], argv[rest])) >= 0)
			started++;
	if (!started)
		return 1;
	wait_for_end(sockets, started, milliseconds);
	return started == choice.count ? 0 : 1;
}
