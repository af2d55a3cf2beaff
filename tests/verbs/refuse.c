/* refuse LIST PROGRAM [ARGUMENTS]: runs a program to which the kernel refuses what it refuses in many containers, on old kernels or
 * where an administrator was careful (a seccomp filter, which children inherit). LIST, with commas:
 *
 *     peers     other processes' memory and descriptors: EPERM
 *     kernel    system calls that came after Linux 3.15, or that containers' profiles leave out: ENOSYS (pidfd_open excepted)
 *     pidfd     pidfd_open: ENOSYS
 *     buffers   wishes for other socket buffers than the default: granted, with no effect
 *     offload   UDP segmentation and coalescing: ENOPROTOOPT
 *
 * refuse --check LIST: status 0 where these, and only these, are refused. Where the kernel has no seccomp: status 77. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined __x86_64__
#define ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "which architecture is this?"
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

enum { PEERS = 1, KERNEL = 2, PIDFD = 4, BUFFERS = 8, OFFLOAD = 16, MOST = 160 };
static const struct { const char *name; int flag; } names[] = {
	{ "peers", PEERS }, { "kernel", KERNEL }, { "pidfd", PIDFD }, { "buffers", BUFFERS }, { "offload", OFFLOAD },
};
static const int peers[] = { SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_getfd, SYS_ptrace };
static const int kernel[] = { SYS_memfd_create, SYS_memfd_secret, SYS_io_uring_setup, SYS_perf_event_open, SYS_userfaultfd, SYS_bpf, SYS_membarrier,
	SYS_close_range, SYS_clone3, SYS_openat2, SYS_kcmp, SYS_sched_setattr, SYS_mlock2 };
static const struct { int option, error; } buffers[] = {
	{ SO_RCVBUF, 0 }, { SO_SNDBUF, 0 }, { SO_RCVBUFFORCE, EPERM }, { SO_SNDBUFFORCE, EPERM },
};
enum { OPTION_SEGMENT = 103, OPTION_GRO = 104 };

static struct sock_filter code[MOST];
static unsigned short length;

static void add(uint16_t what, uint32_t value, uint8_t yes, uint8_t no)
{
	if (length == MOST)
		abort();
	code[length++] = (struct sock_filter){ what, yes, no, value };
}
static void load(size_t offset) { add(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
static void give(int error) { add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error, 0, 0); }
static void refuse_call(int number, int error)
{
	add(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 1);
	give(error);
}
/* With the number loaded; leaves it so. The low half of an argument comes first: both architectures are little-endian. */
static void refuse_option(int number, int level, int option, int error)
{
	add(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 5);
	load(offsetof(struct seccomp_data, args[1]));
	add(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)level, 0, 3);
	load(offsetof(struct seccomp_data, args[2]));
	add(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)option, 0, 1);
	give(error);
	load(offsetof(struct seccomp_data, nr));
}

static int apply(int what)
{
	load(offsetof(struct seccomp_data, arch));
	add(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
	add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	load(offsetof(struct seccomp_data, nr));
	for (size_t i = 0; what & PEERS && i < sizeof(peers) / sizeof(peers[0]); i++)
		refuse_call(peers[i], EPERM);
	for (size_t i = 0; what & KERNEL && i < sizeof(kernel) / sizeof(kernel[0]); i++)
		refuse_call(kernel[i], ENOSYS);
	if (what & PIDFD)
		refuse_call(SYS_pidfd_open, ENOSYS);
	for (size_t i = 0; what & BUFFERS && i < sizeof(buffers) / sizeof(buffers[0]); i++)
		refuse_option(SYS_setsockopt, SOL_SOCKET, buffers[i].option, buffers[i].error);
	for (int option = OPTION_SEGMENT; what & OFFLOAD && option <= OPTION_GRO; option++) {
		refuse_option(SYS_setsockopt, IPPROTO_UDP, option, ENOPROTOOPT);
		refuse_option(SYS_getsockopt, IPPROTO_UDP, option, ENOPROTOOPT);
	}
	add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	struct sock_fprog program = { .len = length, .filter = code };
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) ? errno : 0;
}

static bool check(const char *name, bool refused, bool wanted)
{
	if (refused != wanted)
		fprintf(stderr, "refuse: %s: %s\n", name, refused ? "refused" : "not refused");
	return refused == wanted;
}

/* Its option, asked for, then read: do both go through? */
static bool option_works(int level, int option, int value)
{
	int got = 0, fd = socket(AF_INET, SOCK_DGRAM, 0);
	socklen_t bytes = sizeof(got);
	bool works = fd >= 0 && setsockopt(fd, level, option, &value, sizeof(value)) == 0 && getsockopt(fd, level, option, &got, &bytes) == 0;
	/* The kernel doubles the size of a buffer. */
	if (works && level == SOL_SOCKET)
		works = got == 2 * value;
	if (fd >= 0)
		close(fd);
	return works;
}

static int check_all(int what)
{
	char from = 1, to = 0;
	struct iovec local = { &to, 1 }, remote = { &from, 1 };
	long copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
	bool good = check("process_vm_readv", copied != 1, what & PEERS);
	remote.iov_base = &to, local.iov_base = &from;
	copied = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
	good &= check("process_vm_writev", copied != 1, what & PEERS);
	int fd = (int)syscall(SYS_memfd_create, "x", 0);
	good &= check("memfd_create", fd < 0 && errno == ENOSYS, what & KERNEL);
	fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	good &= check("pidfd_open", fd < 0 && errno == ENOSYS, what & PIDFD);
	good &= check("SO_RCVBUF", !option_works(SOL_SOCKET, SO_RCVBUF, 30000), what & BUFFERS);
	good &= check("SO_SNDBUF", !option_works(SOL_SOCKET, SO_SNDBUF, 30000), what & BUFFERS);
	good &= check("UDP_SEGMENT", !option_works(IPPROTO_UDP, OPTION_SEGMENT, 1000), what & OFFLOAD);
	good &= check("UDP_GRO", !option_works(IPPROTO_UDP, OPTION_GRO, 1), what & OFFLOAD);
	return good ? 0 : 1;
}

int main(int argc, char **argv)
{
	bool checks = argc == 3 && !strcmp(argv[1], "--check");
	int what = 0;
	if (argc < 3) {
		fprintf(stderr, "usage: refuse LIST PROGRAM [ARGUMENTS]\n       refuse --check LIST\n");
		return 2;
	}
	for (char *rest = argv[checks ? 2 : 1], *word; (word = strtok_r(rest, ",", &rest));) {
		int flag = 0;
		for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
			flag |= strcmp(word, names[i].name) ? 0 : names[i].flag;
		if (!flag && strcmp(word, "none")) {
			fprintf(stderr, "refuse: what is '%s'?\n", word);
			return 2;
		}
		what |= flag;
	}
	if (checks)
		return check_all(what);
	int error = what ? apply(what) : 0;
	if (error) {
		fprintf(stderr, "refuse: no filter: %s\n", strerror(error));
		return error == EINVAL || error == ENOSYS ? 77 : 1;
	}
	execvp(argv[2], argv + 2);
	fprintf(stderr, "refuse: %s: %s\n", argv[2], strerror(errno));
	return 127;
}
