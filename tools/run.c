/* `telpher run`: starts n ranks of a program on this machine, as k virtual hosts.
 *
 * Ranks find their place in the environment: TELPHER_*, and RANK, WORLD_SIZE, LOCAL_RANK for programs written for torchrun. Output
 * is read line by line and prefixed with the rank. The first rank that fails is reported by its rank, the others get a few
 * seconds to say what they saw, then the job is ended.
 *
 * Each rank leads a process group, which is signalled as a whole. A rank that ended stays a zombie until the job is over: so its
 * number, and that of its group, belongs to nobody else, and what it left running can be ended too. */
#include "tools.h"
#include "run_output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <popt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

#define KILL_AFTER_MS 2000      /* from SIGTERM to SIGKILL */
#define LEFT_BEHIND_MS 200      /* what a job's processes leave running may go on writing for so long */
#define LONGEST_S 1e9

struct rank {
	pid_t pid;                  /* 0: not started */
	bool ended;
	struct run_stream out, err;
};

struct job {
	int nranks, nhosts;
	int prefix;
	double grace_s, timeout_s;
	char **command;
	struct rank *ranks;
	int running;
	int result;                 /* exit status of the job; 0: no rank failed yet and nobody ended it */
	uint64_t stop_at_ms;        /* --timeout; 0: none */
	uint64_t end_at_ms;         /* when the rest is ended; 0: not decided */
	bool terminated;
	struct rlimit files;        /* RLIMIT_NOFILE as the ranks get it */
	char name[33];
};

static void set_number(const char *name, long value)
{
	char text[32];
	snprintf(text, sizeof(text), "%ld", value);
	setenv(name, text, 1);
}

static void set_rank_environment(const struct job *job, int rank)
{
	struct tool_place place = tool_place_of(rank, job->nranks, job->nhosts);
	set_number("TELPHER_RANK", rank);
	set_number("TELPHER_NRANKS", job->nranks);
	set_number("TELPHER_LOCAL_RANK", place.local);
	set_number("TELPHER_LOCAL_NRANKS", place.local_size);
	setenv("TELPHER_JOB", job->name, 1);
	set_number("RANK", rank);
	set_number("WORLD_SIZE", job->nranks);
	set_number("LOCAL_RANK", place.local);
	set_number("LOCAL_WORLD_SIZE", place.local_size);
	if (job->nhosts > 1) {
		char name[96], machine[64] = "host";
		gethostname(machine, sizeof(machine) - 1);
		snprintf(name, sizeof(name), "%s-virtual-%d", machine, place.host);
		setenv("NCCL_HOSTID", name, 1);
	}
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...)
{
	va_list args;
	fflush(stdout);
	fputs("telpher run: ", stderr);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

static void signal_all(struct job *job, int sig)
{
	for (int r = 0; r < job->nranks; r++)
		if (job->ranks[r].pid > 0) kill(-job->ranks[r].pid, sig);
}

static void become_rank(const struct job *job, int rank, int out, int err)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setrlimit(RLIMIT_NOFILE, &job->files);
	dup2(out, 1);
	dup2(err, 2);
	/* A terminal stops a process outside its foreground group that reads from it. */
	if (rank != 0 || isatty(0)) {
		int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
		if (null >= 0) dup2(null, 0);
	}
	set_rank_environment(job, rank);
	execvp(job->command[0], job->command);
	int error = errno;
	fprintf(stderr, "cannot start '%s': %s\n", job->command[0], strerror(error));
	_exit(error == ENOENT ? 127 : 126);
}

static bool start_rank(struct job *job, int rank)
{
	struct rank *r = &job->ranks[rank];
	int out[2], err[2];
	if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) {
		say("no pipe for the output of rank %d: %s (each rank needs two descriptors here; ulimit -n is %llu)", rank, strerror(errno),
			(unsigned long long)job->files.rlim_max);
		return false;
	}
	pid_t launcher = getpid(), pid = fork();
	if (pid < 0) {
		say("rank %d could not be started: %s", rank, strerror(errno));
		return false;
	}
	if (pid == 0) {
		setpgid(0, 0);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != launcher) _exit(1);
		become_rank(job, rank, out[1], err[1]);
	}
	setpgid(pid, pid);
	close(out[1]);
	close(err[1]);
	r->pid = pid;
	run_stream_open(&r->out, out[0], stdout);
	run_stream_open(&r->err, err[0], stderr);
	if (job->prefix) {
		run_stream_prefix(&r->out, rank, job->nranks);
		run_stream_prefix(&r->err, rank, job->nranks);
	}
	job->running++;
	return true;
}

/* Finds the ranks that ended, and leaves them zombies. */
static void note_ended(struct job *job)
{
	siginfo_t failed = { 0 };
	int first = -1;
	for (int r = 0; r < job->nranks; r++) {
		siginfo_t info = { 0 };
		struct rank *rank = &job->ranks[r];
		if (rank->ended || waitid(P_PID, (id_t)rank->pid, &info, WEXITED | WNOHANG | WNOWAIT) || info.si_pid == 0) continue;
		rank->ended = true;
		job->running--;
		run_stream_drain(&rank->out);
		run_stream_drain(&rank->err);
		bool signalled = info.si_code != CLD_EXITED;
		/* Of several that are found together, one that a signal ended is the likelier cause of the others' failures. */
		if ((signalled || info.si_status != 0) && (first < 0 || (signalled && failed.si_code == CLD_EXITED))) { first = r; failed = info; }
	}
	if (first < 0 || job->result) return;
	bool signalled = failed.si_code != CLD_EXITED;
	job->result = signalled ? 128 + failed.si_status : failed.si_status;
	say("rank %d (pid %d) was the first to fail: %s %d%s%s%s", first, (int)failed.si_pid, signalled ? "signal" : "exit status",
		failed.si_status, signalled ? " (" : "", signalled ? strsignal(failed.si_status) : "", signalled ? ")" : "");
	if (job->running > 0 && !job->end_at_ms) job->end_at_ms = tp_clock_ms() + (uint64_t)(job->grace_s * 1000);
}

static void end_now(struct job *job, int result)
{
	if (!job->result) job->result = result;
	job->end_at_ms = tp_clock_ms();
}

/* Ends the job in two steps when its time has come: SIGTERM, later SIGKILL. */
static void end_when_due(struct job *job)
{
	uint64_t now = tp_clock_ms();
	if (job->stop_at_ms && !job->end_at_ms && now >= job->stop_at_ms) {
		say("the job's time is over");
		end_now(job, 124);
	}
	if (!job->end_at_ms || now < job->end_at_ms) return;
	if (!job->terminated) say("ending the %d rank(s) that still run", job->running);
	signal_all(job, job->terminated ? SIGKILL : SIGTERM);
	job->terminated = true;
	job->end_at_ms = now + KILL_AFTER_MS;
}

static int poll_timeout(uint64_t due_ms)
{
	uint64_t now = tp_clock_ms();
	if (!due_ms) return -1;
	return due_ms > now ? (int)TP_MIN(due_ms - now, 3600000u) : 0;
}

static void take_signals(struct job *job, int signals)
{
	struct signalfd_siginfo info;
	while (read(signals, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGCHLD) continue;
		say("%s: ending the job", strsignal((int)info.ssi_signo));
		end_now(job, 128 + (int)info.ssi_signo);
	}
}

/* Waits for output or signals, until due_ms at most, and deals with them; false where no stream is open any more. */
static bool serve(struct job *job, int signals, struct pollfd *fds, struct run_stream **streams, uint64_t due_ms)
{
	int n = 0;
	for (int r = 0; r < job->nranks; r++) {
		struct run_stream *pair[2] = { &job->ranks[r].out, &job->ranks[r].err };
		for (int k = 0; k < 2; k++)
			if (pair[k]->fd >= 0) { streams[n] = pair[k]; fds[n++] = (struct pollfd){ pair[k]->fd, POLLIN, 0 }; }
	}
	if (n == 0 && job->running == 0) return false;
	fds[n] = (struct pollfd){ signals, POLLIN, 0 };
	poll(fds, (nfds_t)n + 1, poll_timeout(due_ms));
	for (int i = 0; i < n; i++)
		if (fds[i].revents) run_stream_read(streams[i]);
	if (fds[n].revents) {
		take_signals(job, signals);
		note_ended(job);
	}
	return true;
}

static void watch(struct job *job, int signals)
{
	struct pollfd *fds = calloc(2 * (size_t)job->nranks + 1, sizeof(*fds));
	struct run_stream **streams = calloc(2 * (size_t)job->nranks, sizeof(*streams));
	if (!fds || !streams) { say("out of memory"); exit(1); }
	while (job->running > 0) {
		serve(job, signals, fds, streams, job->end_at_ms ? job->end_at_ms : job->stop_at_ms);
		if (job->running > 0) end_when_due(job);
	}
	/* The pipes may hold more, and what a rank left running may keep them open. */
	uint64_t until = tp_clock_ms() + (job->terminated ? KILL_AFTER_MS : LEFT_BEHIND_MS);
	while (serve(job, signals, fds, streams, until) && tp_clock_ms() < until) { }
	free(fds);
	free(streams);
}

/* Kills what is left, so that nothing outlives the job, and lets go of all ranks. */
static void bury(struct job *job)
{
	signal_all(job, SIGKILL);
	for (int r = 0; r < job->nranks; r++) {
		struct rank *rank = &job->ranks[r];
		if (rank->pid == 0) continue;
		while (waitpid(rank->pid, NULL, 0) < 0 && errno == EINTR) { }
		struct run_stream *pair[2] = { &rank->out, &rank->err };
		for (int k = 0; k < 2; k++) { run_stream_drain(pair[k]); run_stream_close(pair[k]); }
	}
	free(job->ranks);
}

/* The launcher holds two descriptors a rank; the ranks get the limit that it was given. */
static void raise_file_limit(struct job *job)
{
	getrlimit(RLIMIT_NOFILE, &job->files);
	struct rlimit most = { job->files.rlim_max, job->files.rlim_max };
	setrlimit(RLIMIT_NOFILE, &most);
}

/* A descriptor on which ended ranks and requests to end the job arrive; -1 on failure. What whoever started us wants ignored
 * (nohup: SIGHUP) stays so. */
static int open_signals(void)
{
	static const int wanted[] = { SIGINT, SIGTERM, SIGHUP };
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	signal(SIGCHLD, SIG_DFL);       /* ignored, children would vanish unseen */
	for (size_t i = 0; i < TP_ARRAY_LEN(wanted); i++) {
		struct sigaction action;
		if (!sigaction(wanted[i], NULL, &action) && action.sa_handler != SIG_IGN) sigaddset(&set, wanted[i]);
	}
	sigprocmask(SIG_BLOCK, &set, NULL);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* By this name the ranks find each other. */
static void name_job(struct job *job)
{
	unsigned char random[16];
	tp_secret_random(random, sizeof(random));
	for (size_t i = 0; i < sizeof(random); i++) snprintf(job->name + 2 * i, 3, "%02x", random[i]);
}

static int check_options(const struct job *job)
{
	if (job->nranks < 1 || job->nranks > 65536) return tool_usage_error("run", "-n takes 1 to 65536, got %d", job->nranks);
	if (job->nhosts < 1 || job->nhosts > job->nranks)
		return tool_usage_error("run", "--hosts takes 1 to the number of ranks (%d), got %d", job->nranks, job->nhosts);
	if (!(job->grace_s >= 0 && job->grace_s <= LONGEST_S)) return tool_usage_error("run", "--grace takes seconds from 0, got %g", job->grace_s);
	if (!(job->timeout_s >= 0 && job->timeout_s <= LONGEST_S)) return tool_usage_error("run", "--timeout takes seconds from 0 (none), got %g", job->timeout_s);
	return 0;
}

static char **copy_words(const char *const *words)
{
	size_t count = 0;
	while (words[count]) count++;
	char **copy = calloc(count + 1, sizeof(char *));
	for (size_t i = 0; copy && i < count; i++) copy[i] = strdup(words[i]);
	return copy;
}

static void free_words(char **words)
{
	for (char **word = words; word && *word; word++) free(*word);
	free(words);
}

/* The ranks add to it, so an earlier job's must not be there. A pipe nobody reads is an error, not a wait. */
static int begin_paths(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
	if (fd < 0) return tool_usage_error("run", "--paths: %s can't be written: %s", path, strerror(errno));
	close(fd);
	setenv("TELPHER_PATHS_FILE", path, 1);
	return 0;
}

static int parse(struct job *job, int argc, char **argv)
{
	int no_prefix = 0;
	char *assignment = NULL, *paths = NULL;
	struct poptOption options[] = {
		{ "ranks", 'n', POPT_ARG_INT, &job->nranks, 0, "number of ranks (1)", "N" },
		{ "np", 0, POPT_ARG_INT | POPT_ARGFLAG_DOC_HIDDEN, &job->nranks, 0, NULL, NULL },
		{ "hosts", 'H', POPT_ARG_INT, &job->nhosts, 0, "virtual hosts that the ranks are dealt to, consecutive ranks together (1)", "K" },
		{ "env", 'x', POPT_ARG_STRING, &assignment, 'x', "set a variable for all ranks", "NAME=VALUE" },
		{ "paths", 0, POPT_ARG_STRING, &paths, 0, "write the paths between ranks to a file, as JSON", "FILE" },
		{ "no-prefix", 0, POPT_ARG_NONE, &no_prefix, 0, "don't put [rank] before each line", NULL },
		{ "grace", 0, POPT_ARG_DOUBLE, &job->grace_s, 0, "seconds that the others get after the first failure (5)", "S" },
		{ "timeout", 0, POPT_ARG_DOUBLE, &job->timeout_s, 0, "end the job after so many seconds", "S" },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher run", argc, (const char **)argv, options, POPT_CONTEXT_POSIXMEHARDER);
	poptSetOtherOptionHelp(context, "[OPTIONS] [--] PROGRAM [ARGUMENTS]");
	int rc, bad = 0;
	while (!bad && (rc = tool_next_option(context, options)) > 0) {
		char *equals = strchr(assignment, '=');
		if (!equals || equals == assignment) bad = tool_usage_error("run", "-x takes NAME=VALUE, got '%s'", assignment);
		else { *equals = 0; setenv(assignment, equals + 1, 1); }
		free(assignment);
		assignment = NULL;
	}
	if (!bad && rc < -1) bad = tool_usage_error("run", "%s: %s", poptBadOption(context, 0), poptStrerror(rc));
	if (!bad) bad = check_options(job);
	if (!bad) {
		const char **rest = poptGetArgs(context);
		job->command = rest && rest[0] ? copy_words(rest) : NULL;
		if (!job->command) bad = tool_usage_error("run", "no program given");
	}
	if (!bad && paths) bad = begin_paths(paths);
	free(paths);
	job->prefix = !no_prefix;
	poptFreeContext(context);
	return bad;
}

int tool_run(int argc, char **argv)
{
	struct job job = { .nranks = 1, .nhosts = 1, .grace_s = 5 };
	int bad = parse(&job, argc, argv);
	if (bad) {
		free_words(job.command);
		return bad;
	}
	if (job.timeout_s > 0) job.stop_at_ms = tp_clock_ms() + (uint64_t)(job.timeout_s * 1000);
	name_job(&job);
	raise_file_limit(&job);
	int signals = open_signals(), started = 0;
	job.ranks = calloc((size_t)job.nranks, sizeof(*job.ranks));
	if (signals < 0 || !job.ranks) { say("cannot watch the ranks: %s", strerror(errno)); return 1; }
	while (started < job.nranks && start_rank(&job, started)) started++;
	if (started == job.nranks) watch(&job, signals);
	else job.result = 1;
	bury(&job);
	free_words(job.command);
	close(signals);
	if ((ferror(stdout) || fflush(stdout)) && !job.result) {
		say("the ranks' output could not be written");
		job.result = 1;
	}
	return job.result;
}
