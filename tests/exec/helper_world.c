#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "exec/helper_world.h"

enum { MAX_RANKS = 64 };

/* Seen by all ranks. */
struct meeting {
	pthread_barrier_t barrier;
	struct tp_bell bells[MAX_RANKS];
	_Atomic uint32_t alarm, abort;
	int segment;                            /* descriptor, inherited */
	void *mapped;                           /* threads: one mapping for all */
	enum world_kind kind;
	unsigned char gather[MAX_RANKS][TP_BOOT_GATHER_MAX];
	int failed[MAX_RANKS];
	struct tp_boot_peer peers[MAX_RANKS];
	int local_ranks[MAX_RANKS];
};

struct seat {
	struct tp_boot boot;                    /* first: a boot is its seat */
	struct meeting *meeting;
	const struct world_options *options;
	int (*body)(struct world *world);
	const void *arg;
	unsigned char *shared;
	void *mapped;
	size_t mapped_bytes;
};

ncclResult_t tp_boot_all_gather(struct tp_boot *boot, void *all, size_t bytes_each)
{
	struct meeting *m = ((struct seat *)boot)->meeting;
	memcpy(m->gather[boot->rank], (char *)all + (size_t)boot->rank * bytes_each, bytes_each);
	pthread_barrier_wait(&m->barrier);
	for (int r = 0; r < boot->nranks; r++) memcpy((char *)all + (size_t)r * bytes_each, m->gather[r], bytes_each);
	pthread_barrier_wait(&m->barrier);
	return ncclSuccess;
}

ncclResult_t tp_boot_share(struct tp_boot *boot, size_t bytes, const char *what, void **base)
{
	struct seat *seat = (struct seat *)boot;
	struct meeting *m = seat->meeting;
	bool maps = boot->rank == 0 || m->kind == WORLD_PROCESSES;
	(void)what;
	if (boot->rank == 0 && ftruncate(m->segment, (off_t)bytes) != 0) return ncclSystemError;
	pthread_barrier_wait(&m->barrier);
	if (maps) {
		seat->mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->segment, 0);
		seat->mapped_bytes = bytes;
		if (seat->mapped == MAP_FAILED) return ncclSystemError;
		if (m->kind == WORLD_THREADS) m->mapped = seat->mapped;
	}
	pthread_barrier_wait(&m->barrier);
	*base = m->kind == WORLD_THREADS ? m->mapped : seat->mapped;
	return ncclSuccess;
}

ncclResult_t tp_boot_barrier(struct tp_boot *boot)
{
	pthread_barrier_wait(&((struct seat *)boot)->meeting->barrier);
	return ncclSuccess;
}

/* Ranks here don't die. */
bool tp_boot_first_event(struct tp_boot *boot, struct tp_event *out)
{
	(void)boot, (void)out;
	return false;
}

void world_barrier(struct world *world) { pthread_barrier_wait(&((struct seat *)world->boot)->meeting->barrier); }

struct running { struct tp_runnable runnable; struct world *world; struct tp_exec_op *op; ncclResult_t result; bool over; };

static enum tp_run run(struct tp_runnable *self)
{
	struct running *running = (struct running *)self;
	bool moved;
	if (running->over) return TP_RUN_IDLE;
	running->result = tp_exec_run(running->world->exec, running->op, &moved, &running->over);
	running->over |= running->result != ncclSuccess;
	return moved || running->over ? TP_RUN_MOVED : TP_RUN_WAITING;
}

static bool is_over(void *arg) { return ((struct running *)arg)->over; }

ncclResult_t world_run_call(struct world *world, const struct tp_exec_call *call)
{
	struct running running = { .world = world, .runnable = { .run = run, .bell = &world->boot->bells[world->rank], .crowded = world->crowded } };
	TP_TRY(tp_exec_start(world->exec, call, &running.op));
	tp_engine_wait((struct tp_runnable *const[]){ &running.runnable }, 1, is_over, &running);
	if (running.result != ncclSuccess) tp_exec_cancel(world->exec, running.op);
	return running.result;
}

static void *run_seat(void *arg)
{
	struct seat *seat = arg;
	struct world world = { .boot = &seat->boot, .rank = seat->boot.rank, .nranks = seat->boot.nranks, .shared = seat->shared, .arg = seat->arg,
		.crowded = seat->boot.nranks > tp_cpu_count() };
	struct tp_boot_peer *self = &seat->meeting->peers[world.rank];
	self->pid = getpid();
	self->process_hash = (uint64_t)getpid();
	pthread_barrier_wait(&seat->meeting->barrier);
	struct tp_links_options options = { .nchannels = seat->options->nchannels, .allow_by_ref = seat->options->by_ref };
	int *failed = &seat->meeting->failed[world.rank];
	if (tp_links_create(world.boot, &options, &world.links) != ncclSuccess ||
		tp_exec_create(world.boot, world.links, &world.exec) != ncclSuccess) {
		*failed = __LINE__;
		return NULL;
	}
	*failed = seat->body(&world);
	pthread_barrier_wait(&seat->meeting->barrier);
	tp_exec_destroy(world.exec);
	tp_links_destroy(world.links);
	pthread_barrier_wait(&seat->meeting->barrier);
	if (seat->mapped) munmap(seat->mapped, seat->mapped_bytes);
	return NULL;
}

static void *map_common(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) abort();
	return p;
}

/* A rank that failed would leave the others waiting: they are ended with it. */
static void reap(const pid_t *pids, int n)
{
	for (int left = n; left; left--) {
		int status;
		pid_t pid = wait(&status);
		if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
		fprintf(stderr, "pid %d ended with status 0x%x\n", (int)pid, status);
		for (int r = 0; r < n; r++)
			if (pids[r] != pid) kill(pids[r], SIGKILL);
	}
}

int world_run(const struct world_options *options, int (*body)(struct world *world), const void *arg)
{
	int n = options->nranks, first = 0;
	struct meeting *m = map_common(sizeof(*m));
	unsigned char *shared = map_common(options->shared_bytes + 1);
	pthread_barrierattr_t attr;
	pthread_barrierattr_init(&attr);
	pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&m->barrier, &attr, (unsigned)n);
	m->segment = memfd_create("world", MFD_CLOEXEC);
	m->kind = options->kind;
	for (int r = 0; r < n; r++) {
		m->peers[r] = (struct tp_boot_peer){ .rank = r, .local = r, .host_name = "here" };
		m->local_ranks[r] = r;
		m->failed[r] = -1;
	}
	static struct seat seats[MAX_RANKS];
	pthread_t threads[MAX_RANKS];
	pid_t pids[MAX_RANKS];
	for (int r = 0; r < n; r++) {
		seats[r] = (struct seat){ .boot = { .rank = r, .nranks = n, .nhosts = 1, .local = r, .nlocal = n, .local_ranks = m->local_ranks,
			.peers = m->peers, .bells = m->bells, .alarm = &m->alarm, .abort = &m->abort }, .meeting = m, .options = options,
			.body = body, .arg = arg, .shared = shared };
		if (options->kind == WORLD_THREADS) {
			pthread_create(&threads[r], NULL, run_seat, &seats[r]);
		} else if (!(pids[r] = fork())) {
			run_seat(&seats[r]);
			_exit(m->failed[r] != 0);
		}
	}
	if (options->kind == WORLD_THREADS)
		for (int r = 0; r < n; r++) pthread_join(threads[r], NULL);
	else reap(pids, n);
	for (int r = n - 1; r >= 0; r--)
		if (m->failed[r]) first = m->failed[r];
	close(m->segment);
	munmap(m, sizeof(*m));
	munmap(shared, options->shared_bytes + 1);
	return first;
}
