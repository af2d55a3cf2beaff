/* Tasks, the worker threads that run them, and the places for blocks on devices.
 *
 * A kernel takes its places as a whole and in the order in which kernels became ready, so where co-operating kernels
 * don't all fit, they deadlock here as on a GPU. A kernel larger than the device runs alone, in waves. */
#include "fake.h"

#include <pthread.h>
#include <time.h>

namespace fake {

namespace {

struct pool { std::deque<task_ref> ready; size_t idle = 0; std::condition_variable work; };
pool &workers = *new pool;

void *worker_main(void *)
{
	guard held(fake::lock);
	for (;;) {
		while (workers.ready.empty()) {
			workers.idle++;
			workers.work.wait(held);
			workers.idle--;
		}
		task_ref t = workers.ready.front();
		workers.ready.pop_front();
		std::function<void()> work = std::move(t->work);
		t->work = nullptr;
		held.unlock();
		work();
		work = nullptr;
		held.lock();
		finish_task(t);
	}
	return nullptr;
}

void hand_out(const task_ref &t)
{
	workers.ready.push_back(t);
	if (workers.ready.size() > workers.idle) {
		pthread_t thread;
		pthread_attr_t detached;
		pthread_attr_init(&detached);
		pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
		if (pthread_create(&thread, &detached, worker_main, nullptr) != 0) die("no more threads");
		pthread_attr_destroy(&detached);
	}
	workers.work.notify_one();
}

void dispatch(device &d)
{
	while (!d.waiting.empty()) {
		task_ref t = d.waiting.front();
		if (d.used > 0 && d.used + t->threads > d.places) return;
		d.waiting.pop_front();
		d.used += t->threads;
		hand_out(t);
	}
}

void make_ready(const task_ref &t, std::vector<task_ref> &ended)
{
	if (!t->work) {
		ended.push_back(t);
	} else if (t->threads > 0) {
		device &d = devices[(size_t)t->context->ordinal];
		d.waiting.push_back(t);
		dispatch(d);
	} else {
		hand_out(t);
	}
}

void end(std::vector<task_ref> ended)
{
	while (!ended.empty()) {
		task_ref t = ended.back();
		ended.pop_back();
		t->done = true;
		t->done_at = now_ms();
		t->changed.notify_all();
		if (t->context) t->context->pending.erase(t);
		for (const task_ref &n : t->next)
			if (--n->waits == 0) make_ready(n, ended);
		t->next.clear();
	}
}

}

double now_ms()
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

task_ref add_task(CUcontext context, const std::vector<task_ref> &before, std::function<void()> work, int threads)
{
	task_ref t = std::make_shared<task>();
	t->context = context;
	t->work = std::move(work);
	t->threads = threads;
	if (context) context->pending.insert(t);
	for (const task_ref &b : before)
		if (b && !b->done) {
			b->next.push_back(t);
			t->waits++;
		}
	if (t->waits == 0) {
		std::vector<task_ref> ended;
		make_ready(t, ended);
		end(std::move(ended));
	}
	return t;
}

task_ref hold_task(CUcontext context)
{
	task_ref t = std::make_shared<task>();
	t->context = context;
	t->waits = 1;
	context->pending.insert(t);
	return t;
}

void finish_task(const task_ref &t)
{
	if (t->threads > 0) {
		device &d = devices[(size_t)t->context->ordinal];
		d.used -= t->threads;
		dispatch(d);
	}
	end({ t });
}

void wait_task(guard &held, const task_ref &t)
{
	while (t && !t->done) t->changed.wait(held);
}

void wait_context(guard &held, CUcontext context)
{
	std::set<task_ref> all = context->pending;
	for (const task_ref &t : all) wait_task(held, t);
}

}
