/* A gather that is complete although an event comes just after it: its ranks have come through, whatever they hear of next. The moment between a
 * waiter's two looks, for the end and at what it waits for, is held still: its look for an abort faults, and the other rank goes on meanwhile. */
#include "helper_boot.h"
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include "boot/internal.h"

static _Atomic uint32_t *page;
static _Atomic uint32_t looking, complete;
static _Atomic(struct tp_boot *) waiter;

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	if (info->si_addr != (void *)page) _exit(99);
	atomic_store_explicit(&looking, 1, memory_order_release);
	while (!atomic_load_explicit(&complete, memory_order_acquire)) sched_yield();
	if (mprotect((void *)page, 4096, PROT_READ | PROT_WRITE) != 0) _exit(98);
	atomic_store_explicit(page, 1, memory_order_release);
}

static void wait_for_it(struct tp_boot *boot)
{
	int all[2] = { 7, 0 };

	boot->abort = page;
	atomic_store_explicit(&waiter, boot, memory_order_release);
	must(tp_boot_all_gather(boot, all, sizeof(int)) == ncclSuccess);
	must(all[0] == 7 && all[1] == 8);
	/* It did come. */
	must(atomic_load_explicit(&looking, memory_order_acquire) == 1);
	must(tp_boot_barrier(boot) != ncclSuccess);
}

static void complete_it(struct tp_boot *boot)
{
	int all[2] = { 0, 8 };
	struct tp_boot *other;

	while (!(other = atomic_load_explicit(&waiter, memory_order_acquire))) sched_yield();
	struct tp_segment *seg = ((struct tp_boot_inside *)boot)->site->seg;
	while (atomic_load_explicit(&seg->arrived, memory_order_acquire) == 0) sched_yield();
	/* It waits, and looks for an abort now and then. */
	must(mprotect((void *)page, 4096, PROT_NONE) == 0);
	while (!atomic_load_explicit(&looking, memory_order_acquire)) sched_yield();
	must(tp_boot_all_gather(boot, all, sizeof(int)) == ncclSuccess);
	must(all[0] == 7 && all[1] == 8);
	atomic_store_explicit(&complete, 1, memory_order_release);
}

static void either(struct tp_boot *boot, void *arg)
{
	(void)arg;
	if (boot->rank == 0) wait_for_it(boot);
	else complete_it(boot);
}

static void whoever_is_through_a_gather_stays_through(void **state)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO }, old;

	(void)state;
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_true(page != MAP_FAILED);
	sigemptyset(&action.sa_mask);
	assert_int_equal(sigaction(SIGSEGV, &action, &old), 0);
	helper_threads(2, either, NULL);
	sigaction(SIGSEGV, &old, NULL);
	munmap((void *)page, 4096);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(whoever_is_through_a_gather_stays_through) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
