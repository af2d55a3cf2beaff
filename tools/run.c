/* `telpher run`: starts n ranks of a program on this machine, as k virtual hosts.
 *
 * Ranks find their place in the environment: TELPHER_*, and RANK, WORLD_SIZE, LOCAL_RANK for programs written for torchrun. Output
 * is read line by line and prefixed with the rank. The first rank that fails is reported by its rank, the others get a few
 * seconds to say what they saw, then the job is ended. */
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
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

struct rank {
	pid_t pid;                  /* 0: ended */
	int status;
	struct run_stream out, err;
};

struct job {
	int nranks, nhosts;
	int prefix;
	double grace_s, timeout_s;
	char **command;
	struct rank *ranks;
	int running;
	int first_failed;           /* -1: none yet */
	uint64_t stop_at_ms;        /* --timeout; 0: none */
	uint64_t end_at_ms;         /* when the rest is ended; 0: not decided */
	bool terminated;
	char name[33];
};

static int host_of(const struct job *job, int rank)
{
	/* Hosts get consecutive ranks; the first ones one more where it doesn't divide. */
	int base = job->nranks / job->nhosts, more = job->nranks % job->nhosts;
	int big = more * (base + 1);
	return rank < big ? rank / (base + 1) : more + (rank - big) / base;
}

static void set_number(const char *name, long value)
{
	char text[32];
	snprintf(text, sizeof(text), "%ld", value);
	setenv(name, text, 1);
}

static void set_rank_environment(const struct job *job, int rank)
{
	int host = host_of(job, rank), local = 0, local_size = 0;
	for (int r = 0; r < job->nranks; r++) {
		if (host_of(job, r) != host) continue;
		if (r < rank) local++;
		local_size++;
	}
	set_number("TELPHER_RANK", rank);
	set_number("TELPHER_NRANKS", job->nranks);
	set_number("TELPHER_LOCAL_RANK", local);
	set_number("TELPHER_LOCAL_NRANKS", local_size);
	setenv("TELPHER_JOB", job->name, 1);
	set_number("RANK", rank);
	set_number("WORLD_SIZE", job->nranks);
	set_number("LOCAL_RANK", local);
	set_number("LOCAL_WORLD_SIZE", local_size);
	if (job->nhosts > 1) {
		char name[96], machine[64] = "host";
		gethostname(machine, sizeof(machine) - 1);
		snprintf(name, sizeof(name), "%s-virtual-%d", machine, host);
		setenv("NCCL_HOSTID", name, 1);
	}
}

static void start_rank(struct job *job, int rank)
{
	struct rank *r = &job->ranks[rank];
	int out[2], err[2];
	if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) {
		fprintf(stderr, "telpher run: no pipe for rank %d: %s\n", rank, strerror(errno));
		exit(1);
	}
	fflush(NULL);
	pid_t launcher = getpid(), pid = fork();
	if (pid < 0) {
		fprintf(stderr, "telpher run: rank %d could not be started: %s\n", rank, strerror(errno));
		exit(1);
	}
	if (pid == 0) {
		sigset_t none;
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		setpgid(0, 0);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != launcher) _exit(1);
		dup2(out[1], 1);
		dup2(err[1], 2);
		if (rank != 0) {
			int null = open("/dev/null", O_RDONLY);
			if (null >= 0) dup2(null, 0);
		}
		set_rank_environment(job, rank);
		execvp(job->command[0], job->command);
		fprintf(stderr, "cannot start '%s': %s\n", job->command[0], strerror(errno));
		_exit(127);
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
}

static void signal_all(struct job *job, int sig)
{
	for (int r = 0; r < job->nranks; r++)
		if (job->ranks[r].pid > 0) kill(-job->ranks[r].pid, sig);
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

static void reap(struct job *job)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		int r = 0;
		while (r < job->nranks && job->ranks[r].pid != pid) r++;
		if (r == job->nranks) continue;
		job->ranks[r].pid = 0;
		job->ranks[r].status = status;
		job->running--;
		bool failed = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
		if (!failed || job->first_failed >= 0) continue;
		job->first_failed = r;
		if (WIFSIGNALED(status))
			say("rank %d (pid %d) was the first to fail: signal %d (%s)", r, (int)pid, WTERMSIG(status), strsignal(WTERMSIG(status)));
		else
			say("rank %d (pid %d) was the first to fail: exit status %d", r, (int)pid, WEXITSTATUS(status));
		if (job->running > 0 && !job->end_at_ms) job->end_at_ms = tp_clock_ms() + (uint64_t)(job->grace_s * 1000);
	}
}

/* Ends the job in two steps when its time has come: SIGTERM, two seconds later SIGKILL. */
static void end_when_due(struct job *job)
{
	if (!job->end_at_ms || job->running == 0 || tp_clock_ms() < job->end_at_ms) return;
	if (!job->terminated) {
		say("ending the %d other rank(s)", job->running);
		signal_all(job, SIGTERM);
		job->terminated = true;
		job->end_at_ms = tp_clock_ms() + 2000;
	} else {
		signal_all(job, SIGKILL);
		job->end_at_ms = tp_clock_ms() + 2000;
	}
}

static int poll_timeout(const struct job *job)
{
	uint64_t now = tp_clock_ms(), due = job->end_at_ms ? job->end_at_ms : job->stop_at_ms;
	if (!due) return -1;
	return due > now ? (int)TP_MIN(due - now, 3600000) : 0;
}

static void watch(struct job *job, int signals)
{
	int nstreams = 2 * job->nranks;
	struct pollfd *fds = calloc((size_t)nstreams + 1, sizeof(*fds));
	struct run_stream **streams = calloc((size_t)nstreams, sizeof(*streams));
	if (!fds || !streams) { say("out of memory"); exit(1); }
	bool open_streams = true;
	while (job->running > 0 || open_streams) {
		int n = 0;
		for (int r = 0; r < job->nranks; r++) {
			struct run_stream *pair[2] = { &job->ranks[r].out, &job->ranks[r].err };
			for (int k = 0; k < 2; k++)
				if (pair[k]->fd >= 0) { streams[n] = pair[k]; fds[n++] = (struct pollfd){ pair[k]->fd, POLLIN, 0 }; }
		}
		open_streams = n > 0;
		fds[n] = (struct pollfd){ signals, POLLIN, 0 };
		/* A grandchild may keep a pipe open after all ranks ended: then don't wait for it. */
		int timeout = job->running > 0 ? poll_timeout(job) : 200;
		int ready = poll(fds, (nfds_t)n + 1, timeout);
		if (ready == 0 && job->running == 0) break;
		for (int i = 0; i < n; i++)
			if (fds[i].revents) run_stream_read(streams[i]);
		if (fds[n].revents) {
			struct signalfd_siginfo info;
			if (read(signals, &info, sizeof(info)) == sizeof(info) && info.ssi_signo != SIGCHLD) {
				say("%s: ending the job", strsignal((int)info.ssi_signo));
				if (job->first_failed < 0) job->first_failed = job->nranks;
				job->end_at_ms = tp_clock_ms();
			}
		}
		reap(job);
		if (job->stop_at_ms && !job->end_at_ms && tp_clock_ms() >= job->stop_at_ms) {
			say("the job's time is over");
			if (job->first_failed < 0) job->first_failed = job->nranks;
			job->end_at_ms = tp_clock_ms();
		}
		end_when_due(job);
	}
	for (int r = 0; r < job->nranks; r++) {
		run_stream_close(&job->ranks[r].out);
		run_stream_close(&job->ranks[r].err);
	}
	free(fds);
	free(streams);
}

/* By this name the ranks find each other. */
static void name_job(struct job *job)
{
	unsigned char random[16];
	tp_secret_random(random, sizeof(random));
	for (size_t i = 0; i < sizeof(random); i++) snprintf(job->name + 2 * i, 3, "%02x", random[i]);
}

static int parse(struct job *job, int argc, char **argv)
{
	int no_prefix = 0;
	char *assignment = NULL;
	struct poptOption options[] = {
		{ "ranks", 'n', POPT_ARG_INT, &job->nranks, 0, "number of ranks (1)", "N" },
		{ "np", 0, POPT_ARG_INT | POPT_ARGFLAG_DOC_HIDDEN, &job->nranks, 0, NULL, NULL },
		{ "hosts", 'H', POPT_ARG_INT, &job->nhosts, 0, "virtual hosts that the ranks are dealt to, consecutive ranks together (1)", "K" },
		{ "env", 'x', POPT_ARG_STRING, &assignment, 'x', "set a variable for all ranks", "NAME=VALUE" },
		{ "no-prefix", 0, POPT_ARG_NONE, &no_prefix, 0, "don't put [rank] before each line", NULL },
		{ "grace", 0, POPT_ARG_DOUBLE, &job->grace_s, 0, "seconds that the others get after the first failure (5)", "S" },
		{ "timeout", 0, POPT_ARG_DOUBLE, &job->timeout_s, 0, "end the job after so many seconds", "S" },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher run", argc, (const char **)argv, options, POPT_CONTEXT_POSIXMEHARDER);
	poptSetOtherOptionHelp(context, "[OPTIONS] [--] PROGRAM [ARGUMENTS]");
	int rc;
	while ((rc = poptGetNextOpt(context)) > 0) {
		if (rc != 'x') continue;
		char *equals = strchr(assignment, '=');
		if (!equals || equals == assignment) return tool_usage_error("run", "-x takes NAME=VALUE, got '%s'", assignment);
		*equals = 0;
		setenv(assignment, equals + 1, 1);
		free(assignment);
	}
	if (rc < -1) return tool_usage_error("run", "%s: %s", poptBadOption(context, 0), poptStrerror(rc));
	const char **rest = poptGetArgs(context);
	if (!rest || !rest[0]) return tool_usage_error("run", "no program given");
	if (job->nranks < 1 || job->nranks > 65536) return tool_usage_error("run", "-n takes 1 to 65536, got %d", job->nranks);
	if (job->nhosts < 1 || job->nhosts > job->nranks)
		return tool_usage_error("run", "--hosts takes 1 to the number of ranks (%d), got %d", job->nranks, job->nhosts);
	job->prefix = !no_prefix;
	int count = 0;
	while (rest[count]) count++;
	job->command = calloc((size_t)count + 1, sizeof(char *));
	for (int i = 0; job->command && i < count; i++) job->command[i] = strdup(rest[i]);
	poptFreeContext(context);
	return job->command ? 0 : 1;
}

int tool_run(int argc, char **argv)
{
	struct job job = { .nranks = 1, .nhosts = 1, .grace_s = 5, .first_failed = -1 };
	int rc = parse(&job, argc, argv);
	if (rc) return rc;
	if (job.timeout_s > 0) job.stop_at_ms = tp_clock_ms() + (uint64_t)(job.timeout_s * 1000);
	name_job(&job);

	sigset_t signals;
	sigemptyset(&signals);
	sigaddset(&signals, SIGCHLD);
	sigaddset(&signals, SIGINT);
	sigaddset(&signals, SIGTERM);
	sigaddset(&signals, SIGHUP);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	int fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
	job.ranks = calloc((size_t)job.nranks, sizeof(*job.ranks));
	if (fd < 0 || !job.ranks) { say("cannot watch the ranks: %s", strerror(errno)); return 1; }
	for (int r = 0; r < job.nranks; r++) start_rank(&job, r);
	watch(&job, fd);

	int result = 0;
	if (job.first_failed >= job.nranks) {
		result = 124;
	} else if (job.first_failed >= 0) {
		int status = job.ranks[job.first_failed].status;
		result = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	}
	for (char **word = job.command; *word; word++) free(*word);
	free(job.command);
	free(job.ranks);
	close(fd);
	return result;
}
