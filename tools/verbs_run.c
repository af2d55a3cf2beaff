/* `telpher verbs run`: a program with the software card under it.
 *
 * The card's libraries come in by LD_LIBRARY_PATH, for programs that open libibverbs.so by name, and by LD_PRELOAD, which beats a
 * path built into the program. What can't work is refused before it starts; and if nobody opened the card by the end, that is
 * said too: a test that ran without it would prove nothing. */
#include "tools.h"
#include "verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "verbs/program.h"

#define CANNOT_RUN 126

static volatile sig_atomic_t child_pid;

/* A terminal's signals reach the program by themselves; what is sent to us alone is handed on. */
static void hand_on(int sig)
{
	if (child_pid > 0)
		kill((pid_t)child_pid, sig);
}

static bool find_program(const char *name, char *out)
{
	if (strchr(name, '/'))
		return snprintf(out, PATH_MAX, "%s", name) < PATH_MAX && access(out, X_OK) == 0;
	const char *path = getenv("PATH");
	for (const char *at = path ? path : "/usr/local/bin:/usr/bin:/bin"; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
		int length = (int)strcspn(at, ":");
		struct stat info;
		if (snprintf(out, PATH_MAX, "%.*s%s%s", length, at, length ? "/" : "./", name) < PATH_MAX && access(out, X_OK) == 0 &&
			stat(out, &info) == 0 && S_ISREG(info.st_mode))
			return true;
	}
	errno = ENOENT;
	return false;
}

/* The folder of the card's libraries, beside this program. */
static bool find_folder(char *out)
{
	static const char *const places[] = { "../lib/telpher-verbs", TELPHER_VERBS_FOLDER };
	char self[PATH_MAX], path[2 * PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (length <= 0)
		return false;
	self[length] = 0;
	*strrchr(self, '/') = 0;
	for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
		snprintf(path, sizeof(path), "%s/%s", self, places[i]);
		if (!realpath(path, out))
			continue;
		snprintf(path, sizeof(path), "%s/libibverbs.so.1", out);
		if (access(path, R_OK) == 0)
			return true;
	}
	fprintf(stderr, "telpher verbs run: the card's libraries are neither in %s/%s nor in %s/%s\n", self, places[0], self, places[1]);
	return false;
}

/* The real devices' names, as the kernel says; past libc, in which a preload of ours may be (a run inside a run). */
static bool find_real(char *names, size_t bytes)
{
	struct entry { uint64_t ino; int64_t off; uint16_t length; uint8_t type; char name[]; };
	_Alignas(struct entry) char entries[4096];
	names[0] = 0;
	long fd = syscall(SYS_openat, AT_FDCWD, "/sys/class/infiniband", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	if (fd < 0)
		return false;
	long got = syscall(SYS_getdents64, (int)fd, entries, sizeof(entries));
	for (long at = 0; at < got;) {
		const struct entry *entry = (const struct entry *)(const void *)(entries + at);
		size_t used = strlen(names);
		if (entry->name[0] != '.')
			snprintf(names + used, bytes - used, "%s%s", used ? ", " : "", entry->name);
		at += entry->length;
	}
	close((int)fd);
	return names[0] != 0;
}

/* Puts value in front of what the variable holds. */
static void set_front(const char *name, const char *value)
{
	const char *old = getenv(name);
	char *text;
	if (!old || !old[0]) {
		setenv(name, value, 1);
	} else if (asprintf(&text, "%s:%s", value, old) >= 0) {
		setenv(name, text, 1);
		free(text);
	}
}

static bool set_libraries(const char *folder, bool shared_alloc)
{
	static const char *const libraries[] = { "libtelpher-verbs-alloc.so", "libtelpher-verbs-preload.so", "libibverbs.so.1", "librdmacm.so.1" };
	char list[4 * PATH_MAX] = "";
	if (strpbrk(folder, ": \t")) {
		fprintf(stderr, "telpher verbs run: the card's libraries are in '%s', and LD_PRELOAD takes no path with a space or colon\n", folder);
		return false;
	}
	for (size_t i = shared_alloc ? 0 : 1; i < sizeof(libraries) / sizeof(libraries[0]); i++) {
		char path[PATH_MAX + 64];
		size_t used = strlen(list);
		snprintf(path, sizeof(path), "%s/%s", folder, libraries[i]);
		if (access(path, R_OK) == 0)
			snprintf(list + used, sizeof(list) - used, "%s%s", used ? ":" : "", path);
	}
	set_front("LD_LIBRARY_PATH", folder);
	set_front("LD_PRELOAD", list);
	return true;
}

static int run_program(const char *path, char **argv, int note)
{
	static const int handed_on[] = { SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 };
	struct sigaction hand = { .sa_handler = hand_on, .sa_flags = SA_RESTART }, ignore = { .sa_handler = SIG_IGN }, old_int, old_quit;
	sigset_t all, before;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &before);
	pid_t pid = fork();
	if (pid < 0) {
		fprintf(stderr, "telpher verbs run: no process can be started: %s\n", strerror(errno));
		return 1;
	}
	if (pid == 0) {
		sigprocmask(SIG_SETMASK, &before, NULL);
		execv(path, argv);
		int error = errno;
		if (error == ENOEXEC) {
			/* A script without a first line: the shell's, as everywhere. */
			execl("/bin/sh", "sh", path, (char *)NULL);
			error = errno;
		}
		fprintf(stderr, "telpher verbs run: %s can't be started: %s\n", path, strerror(error));
		_exit(error == ENOENT ? 127 : CANNOT_RUN);
	}
	child_pid = pid;
	for (size_t i = 0; i < sizeof(handed_on) / sizeof(handed_on[0]); i++)
		sigaction(handed_on[i], &hand, NULL);
	sigaction(SIGINT, &ignore, &old_int);
	sigaction(SIGQUIT, &ignore, &old_quit);
	sigprocmask(SIG_SETMASK, &before, NULL);
	int status = 0;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
	}
	child_pid = 0;
	int result = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	struct stat info;
	if (result != 127 && result != CANNOT_RUN && note >= 0 && fstat(note, &info) == 0 && info.st_size == 0)
		fprintf(stderr, "telpher verbs run: %s ended, and neither it nor what it started had opened the software card\n", path);
	return result;
}

static int run_help(void)
{
	printf("usage: telpher verbs run [--hide-real] [--shared-alloc] [--] PROGRAM [ARGUMENTS]\n\n"
		"Runs PROGRAM, and what it starts, on the software card. Its exit status is PROGRAM's; 126: the card can't be put under it.\n\n"
		"  --hide-real      even where the machine has real RDMA devices, which PROGRAM won't see\n"
		"  --shared-alloc   what PROGRAM allocates in pieces of a page and more is shared memory: other processes of this machine write there\n"
		"                   by a store, once it is registered\n");
	return 0;
}

int tool_verbs_run(int argc, char **argv)
{
	bool hide_real = false, shared_alloc = false;
	int first = 1;
	for (; first < argc && argv[first][0] == '-'; first++) {
		if (!strcmp(argv[first], "--")) {
			first++;
			break;
		}
		if (!strcmp(argv[first], "--help") || !strcmp(argv[first], "-h")) {
			return run_help();
		}
		if (!strcmp(argv[first], "--shared-alloc")) {
			shared_alloc = true;
			continue;
		}
		if (strcmp(argv[first], "--hide-real"))
			return tool_usage_error("verbs run", "there is no option '%s'", argv[first]);
		hide_real = true;
	}
	char path[PATH_MAX], folder[PATH_MAX], text[512];
	if (first >= argc)
		return tool_usage_error("verbs run", "which program?");
	const char *says = getenv("TELPHER_VERBS_HIDE_REAL");
	if (!hide_real && !(says && !strcmp(says, "1")) && find_real(text, sizeof(text))) {
		fprintf(stderr, "telpher verbs run: this machine has real RDMA devices (%s), which the program would not see; run it without "
			"`telpher verbs run` to use them, or with --hide-real to use the software card all the same\n", text);
		return CANNOT_RUN;
	}
	if (!find_program(argv[first], path)) {
		fprintf(stderr, "telpher verbs run: there is no program '%s': %s\n", argv[first], strerror(errno));
		return errno == ENOENT ? 127 : CANNOT_RUN;
	}
	if (!tp_program_check(path, text, sizeof(text))) {
		fprintf(stderr, "telpher verbs run: '%s' can't be run on the software card: %s\n", path, text);
		return CANNOT_RUN;
	}
	if (!find_folder(folder) || !set_libraries(folder, shared_alloc))
		return CANNOT_RUN;
	if (hide_real)
		setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	int note = memfd_create("telpher-verbs-note", MFD_CLOEXEC);
	snprintf(text, sizeof(text), "/proc/%d/fd/%d", getpid(), note);
	if (note >= 0)
		setenv("TELPHER_VERBS_NOTE", text, 1);
	return run_program(path, argv + first, note);
}
