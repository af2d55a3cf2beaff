/* Runs kernels as coroutines: see emulator.h. A kernel's coroutines take turns on the calling thread; one runs until it naps, waits at a
 * barrier or ends. Coroutines (a stack each) are kept by their thread for its next kernel.
 *
 * Under the thread sanitizer this file itself is compiled without it, with TP_EMULATE_TSAN defined: the sanitizer takes coroutines for
 * threads, and the bookkeeping here belongs to the OS thread that runs them all.
 *
 * FAKE_CUDA_SEED (a number): the turns' order is shuffled and coroutines now and then miss turns, to bring out what
 * depends on timing. */
#include "emulator.h"
#include "emulator_run.h"

#include <algorithm>
#include <new>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#define EMULATE_ASAN 1
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define EMULATE_ASAN 1
#endif
#endif
#ifdef EMULATE_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef TP_EMULATE_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr int nbarriers = 16;

struct barrier { int expected, arrived; unsigned generation; };
struct shared_object { const void *key; void *memory; size_t alignment; };
struct block { barrier barriers[nbarriers]; std::vector<shared_object> shared; int alive; };

enum state { RUNNABLE, WAITING, ENDED };
struct coroutine {
	tp_emulated seen;               /* first: tp_emulated_now points to it */
	block *home;
	const tp_emulated_kernel *kernel;
	const void *args;
	enum state state;
	bool napped;
	const barrier *waits;
	unsigned generation;
	char *stack;
#ifdef __x86_64__
	void *sp;
#else
	ucontext_t context;
#endif
#ifdef EMULATE_ASAN
	void *fake_stack;
#endif
#ifdef TP_EMULATE_TSAN
	void *fiber;
#endif
};

/* What a thread keeps: its own context while a coroutine runs, and idle coroutines. */
struct thread_state {
	std::vector<coroutine *> idle;
	coroutine *now = nullptr;
#ifdef __x86_64__
	void *sp = nullptr;
#else
	ucontext_t context;
#endif
#ifdef EMULATE_ASAN
	void *fake_stack = nullptr;
	const void *stack_bottom = nullptr;
	size_t stack_size = 0;
#endif
#ifdef TP_EMULATE_TSAN
	void *fiber = nullptr;
#endif
	uint64_t random = 0;
	~thread_state();
};
thread_local thread_state mine;

std::vector<tp_emulated_kernel> &table()
{
	static std::vector<tp_emulated_kernel> *kernels = new std::vector<tp_emulated_kernel>;
	return *kernels;
}

void run_coroutine(coroutine *c);

}

__thread struct tp_emulated *tp_emulated_now;
#ifdef TP_EMULATE_TSAN
uint32_t tp_emulated_fence;
bool tp_emulated_others;
void tp_emulator_others() { __atomic_store_n(&tp_emulated_others, true, __ATOMIC_RELAXED); }
#else
void tp_emulator_others() { }
#endif

void tp_emulated_die(const char *format, ...)
{
	char text[512];
	va_list list;
	va_start(list, format);
	vsnprintf(text, sizeof text, format, list);
	va_end(list);
	fflush(stdout);
	const tp_emulated *now = tp_emulated_now;
	if (now)
		fprintf(stderr, "emulator: kernel %s, block %d of %d, thread %d of %d: %s\n", mine.now ? mine.now->kernel->name : "?", now->block,
			now->blocks, now->thread, now->threads, text);
	else
		fprintf(stderr, "emulator: %s\n", text);
	abort();
}

/* Contexts. */
#ifdef __x86_64__
extern "C" void tp_emulator_switch(void **save, void *to);
asm(".text\n.p2align 4\n.globl tp_emulator_switch\n.hidden tp_emulator_switch\n.type tp_emulator_switch,@function\n"
	"tp_emulator_switch:\n"
	"\tpushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n"
	"\tmovq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n"
	"\tpopq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n"
	"\tret\n.size tp_emulator_switch, .-tp_emulator_switch\n");
#endif

namespace {

void switch_to_coroutine(coroutine *c)
{
	thread_state &m = mine;
	m.now = c;
	tp_emulated_now = &c->seen;
#ifdef EMULATE_ASAN
	__sanitizer_start_switch_fiber(&m.fake_stack, c->stack, stack_bytes);
#endif
#ifdef TP_EMULATE_TSAN
	m.fiber = __tsan_get_current_fiber();
	__tsan_switch_to_fiber(c->fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __x86_64__
	tp_emulator_switch(&m.sp, c->sp);
#else
	swapcontext(&m.context, &c->context);
#endif
#ifdef EMULATE_ASAN
	__sanitizer_finish_switch_fiber(m.fake_stack, nullptr, nullptr);
#endif
	m.now = nullptr;
	tp_emulated_now = nullptr;
}

void switch_to_thread(coroutine *c)
{
	thread_state &m = mine;
#ifdef EMULATE_ASAN
	__sanitizer_start_switch_fiber(&c->fake_stack, m.stack_bottom, m.stack_size);
#endif
#ifdef TP_EMULATE_TSAN
	__tsan_switch_to_fiber(m.fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __x86_64__
	tp_emulator_switch(&c->sp, m.sp);
#else
	swapcontext(&c->context, &m.context);
#endif
#ifdef EMULATE_ASAN
	__sanitizer_finish_switch_fiber(c->fake_stack, &m.stack_bottom, &m.stack_size);
#endif
}

/* A coroutine's life: kernel after kernel. */
[[noreturn]] void coroutine_main()
{
#ifdef EMULATE_ASAN
	__sanitizer_finish_switch_fiber(nullptr, &mine.stack_bottom, &mine.stack_size);
#endif
	coroutine *c = mine.now;
	for (;;) {
		run_coroutine(c);
		switch_to_thread(c);
	}
}

coroutine *coroutine_create()
{
	coroutine *c = new coroutine();
	void *map = mmap(nullptr, stack_bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (map == MAP_FAILED || mprotect(map, 4096, PROT_NONE) != 0) tp_emulated_die("no memory for a coroutine's stack");
	c->stack = static_cast<char *>(map) + 4096;
#ifdef __x86_64__
	void **top = reinterpret_cast<void **>(c->stack + stack_bytes);
	*--top = nullptr;                                       /* whom coroutine_main would return to */
	*--top = reinterpret_cast<void *>(coroutine_main);
	for (int i = 0; i < 6; i++) *--top = nullptr;           /* rbp, rbx, r12 to r15 */
	c->sp = top;
#else
	getcontext(&c->context);
	c->context.uc_stack.ss_sp = c->stack;
	c->context.uc_stack.ss_size = stack_bytes;
	c->context.uc_link = nullptr;
	makecontext(&c->context, coroutine_main, 0);
#endif
#ifdef TP_EMULATE_TSAN
	c->fiber = __tsan_create_fiber(0);
#endif
	return c;
}

void coroutine_destroy(coroutine *c)
{
#ifdef TP_EMULATE_TSAN
	__tsan_destroy_fiber(c->fiber);
#endif
	munmap(c->stack - 4096, stack_bytes + 4096);
	delete c;
}

thread_state::~thread_state()
{
	for (coroutine *c : idle) coroutine_destroy(c);
}

/* The thread sanitizer sees no order between coroutines but at barriers, and at a kernel's start and end. */
void order_before([[maybe_unused]] const void *place)
{
#ifdef TP_EMULATE_TSAN
	__tsan_release(const_cast<void *>(place));
#endif
}
void order_after([[maybe_unused]] const void *place)
{
#ifdef TP_EMULATE_TSAN
	__tsan_acquire(const_cast<void *>(place));
#endif
}

void run_coroutine(coroutine *c)
{
	order_after(c->args);
	c->kernel->run(c->args);
	order_before(c->args);
	c->state = ENDED;
	c->home->alive--;
}

bool runnable(coroutine *c)
{
	if (c->state == WAITING && c->waits->generation != c->generation) c->state = RUNNABLE;
	return c->state == RUNNABLE;
}

uint64_t next_random(uint64_t &x)
{
	x ^= x << 13; x ^= x >> 7; x ^= x << 17;
	return x;
}

/* Nobody of a block can run and some are alive: they wait for those that have ended. */
void die_of_barrier(const std::vector<coroutine *> &all)
{
	for (coroutine *c : all)
		if (c->state == WAITING) {
			mine.now = c;
			tp_emulated_now = &c->seen;
			tp_emulated_die("waits at barrier %d, which %d of %d threads have reached: nobody else of its block can",
				(int)(c->waits - c->home->barriers), c->waits->arrived, c->waits->expected);
		}
	tp_emulated_die("nobody can run");
}

uint64_t now_us()
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Waiting for another kernel: let its thread run. A yield is the quickest way where nobody else is there. Where other programs run it costs
 * the thread its share of the processor (a whole slice, since Linux 6.18: milliseconds a turn), and a short sleep doesn't: after a yield
 * that took long, some turns sleep. */
void idle_turn(unsigned turns)
{
	thread_local unsigned sleeps = 0;
	if (sleeps == 0 && turns < 20000) {
		uint64_t before = now_us();
		sched_yield();
		if (now_us() - before > 200) sleeps = 100;
		return;
	}
	if (sleeps > 0) sleeps--;
	struct timespec pause = { 0, turns < 20000 ? 10000 : 50000 };
	nanosleep(&pause, nullptr);
}

/* Blocks start in order, `places` of them at once. */
bool started(const coroutine *c, int blocks_started) { return c->seen.block < blocks_started; }

void take_turns(std::vector<coroutine *> &all, int places)
{
	size_t alive = all.size();
	int blocks_started = places;
	unsigned idle_turns = 0;
	uint64_t &random = mine.random;
	while (alive > 0) {
		bool worked = false, ran = false;
		if (random) std::rotate(all.begin(), all.begin() + (ptrdiff_t)(next_random(random) % all.size()), all.end());
		for (coroutine *c : all) {
			if (!started(c, blocks_started) || !runnable(c)) continue;
			ran = true;
			if (random && next_random(random) % 8 == 0) continue;
			c->napped = false;
			switch_to_coroutine(c);
			if (c->state == ENDED) {
				alive--;
				if (c->home->alive == 0) blocks_started++;
			}
			if (!c->napped) worked = true;
		}
		if (!ran && alive > 0) die_of_barrier(all);
		idle_turns = worked ? 0 : idle_turns + 1;
		if (!worked) idle_turn(idle_turns);
	}
}

uint64_t seed()
{
	static const char *text = getenv("FAKE_CUDA_SEED");
	if (!text) return 0;
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (strtoull(text, nullptr, 10) * 0x9e3779b97f4a7c15u ^ (uint64_t)now.tv_nsec * (uint64_t)gettid()) | 1;
}

}

void tp_emulated_barrier(int number, int threads)
{
	coroutine *c = mine.now;
	if (number < 0 || number >= nbarriers) tp_emulated_die("barrier %d: there are %d", number, nbarriers);
	if (threads < 1 || threads > c->seen.threads) tp_emulated_die("barrier %d for %d threads: the block has %d", number, threads, c->seen.threads);
	barrier *b = &c->home->barriers[number];
	order_before(b);
	if (b->arrived == 0) b->expected = threads;
	else if (b->expected != threads) tp_emulated_die("barrier %d for %d threads: others came to it for %d", number, threads, b->expected);
	if (++b->arrived == b->expected) {
		b->arrived = 0;
		b->generation++;
	} else {
		c->state = WAITING;
		c->waits = b;
		c->generation = b->generation;
		switch_to_thread(c);
	}
	order_after(b);
}

void tp_emulated_nap(unsigned)
{
	coroutine *c = mine.now;
	c->napped = true;
	switch_to_thread(c);
}

void *tp_emulated_shared(const void *key, size_t bytes, size_t alignment)
{
	block *home = mine.now->home;
	for (const shared_object &object : home->shared)
		if (object.key == key) {
			order_after(object.memory);
			return object.memory;
		}
	void *memory = ::operator new(bytes, std::align_val_t(std::max<size_t>(alignment, 16)));
	memset(memory, 0xa5, bytes);
	order_before(memory);
	home->shared.push_back({ key, memory, std::max<size_t>(alignment, 16) });
	return memory;
}

void tp_emulated_register(const char *name, void (*run)(const void *args), size_t args_bytes)
{
	if (tp_emulator_find(name)) tp_emulated_die("two kernels are called %s", name);
	table().push_back({ name, run, args_bytes });
}

const struct tp_emulated_kernel *tp_emulator_find(const char *name)
{
	for (const tp_emulated_kernel &kernel : table())
		if (strcmp(kernel.name, name) == 0) return &kernel;
	return nullptr;
}

size_t tp_emulator_kernels(const struct tp_emulated_kernel **out)
{
	*out = table().data();
	return table().size();
}

void tp_emulator_launch(const struct tp_emulated_kernel *kernel, int blocks, int threads, int resident, const void *args)
{
	if (threads < 32 || threads % 32 != 0) tp_emulated_die("kernel %s with %d threads a block: not a multiple of 32", kernel->name, threads);
	thread_state &m = mine;
	if (!m.random) m.random = seed();
	int per_block = threads / 32;
	/* A copy with the GPU's alignment; its address is what orders the coroutines' start and end. */
	void *copy = ::operator new(std::max<size_t>(kernel->args_bytes, 1), std::align_val_t(64));
	memcpy(copy, args, kernel->args_bytes);
	order_before(copy);
	std::vector<block> homes((size_t)blocks);
	std::vector<coroutine *> all;
	for (int b = 0; b < blocks; b++)
		for (int t = 0; t < per_block; t++) {
			coroutine *c;
			if (m.idle.empty()) c = coroutine_create();
			else {
				c = m.idle.back();
				m.idle.pop_back();
			}
			c->seen = { t, per_block, b, blocks, false };
			c->home = &homes[(size_t)b];
			c->home->alive++;
			c->kernel = kernel;
			c->args = copy;
			c->state = RUNNABLE;
			c->napped = false;
			all.push_back(c);
		}
	take_turns(all, resident);
	order_after(copy);
	m.idle.insert(m.idle.end(), all.begin(), all.end());
	for (block &home : homes)
		for (shared_object &object : home.shared) ::operator delete(object.memory, std::align_val_t(object.alignment));
	::operator delete(copy, std::align_val_t(64));
}
