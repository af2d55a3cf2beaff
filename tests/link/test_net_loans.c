/* What kernels lend, in one process: a thread plays the kernel, another is the engine, others register and deregister what is lent. A transport of ours looks
 * at the memory late, when a request is asked for, so that what is read too late is seen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <unistd.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include "gpu/fake_driver.h"
#include "link/net_link.h"

enum { CHUNK = 4096, CHUNKS = 8, TURNS = 100, MEDDLERS = 2 };

/* ---- the transport */

struct handle { uintptr_t begin, end; };
struct request { struct iovec parts[2]; struct handle *handles[2]; int n; bool used; };
static struct request requests[TP_NET_MAX_REQUESTS];
static uint32_t nsent, ndone, nclosed;
static _Atomic int wrong;
static _Atomic long nhandles;
static enum tp_net_memory refuses;      /* what can't be registered; 0: nothing */
static bool breaks;            /* nothing is sent any more */

static ncclResult_t properties(int dev, struct tp_net_properties *out)
{
	(void)dev;
	*out = (struct tp_net_properties){ .name = "card", .memory = TP_NET_HOST | TP_NET_CUDA, .max_parts = 2 };
	return ncclSuccess;
}

static ncclResult_t reg_memory(void *comm, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	(void)comm;
	if (kind == refuses) return ncclSystemError;
	struct handle *h = malloc(sizeof(*h));
	*h = (struct handle){ (uintptr_t)data, (uintptr_t)data + bytes };
	atomic_fetch_add(&nhandles, 1);
	*mhandle = h;
	return ncclSuccess;
}

static ncclResult_t dereg_memory(void *comm, void *mhandle)
{
	(void)comm;
	atomic_fetch_sub(&nhandles, 1);
	free(mhandle);
	return ncclSuccess;
}

static ncclResult_t isendv(void *comm, const struct iovec *parts, int n, int tag, void *const *mhandles, void **out)
{
	struct request *r = &requests[nsent % TP_NET_MAX_REQUESTS];
	(void)comm, (void)tag;
	*out = NULL;
	if (breaks) return ncclRemoteError;
	if (nsent % 5 == 4 && !r->used) {       /* no room, now and then */
		r->used = true;
		return ncclSuccess;
	}
	*r = (struct request){ .n = n };
	for (int i = 0; i < n; i++) {
		r->parts[i] = parts[i];
		r->handles[i] = mhandles[i];
	}
	nsent++;
	*out = r;
	return ncclSuccess;
}

static ncclResult_t isend(void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct iovec part = { (void *)(uintptr_t)data, bytes };
	return isendv(comm, &part, 1, tag, &mhandle, out);
}

/* A message is a header, and words that all are the chunk's number. */
static ncclResult_t test(void *handle, bool *done, size_t *sizes)
{
	struct request *r = handle;
	unsigned char message[sizeof(struct tp_net_chunk) + CHUNK] = { 0 };
	struct tp_net_chunk header;
	size_t bytes = 0;
	(void)sizes;
	for (int i = 0; i < r->n; i++) {
		uintptr_t at = (uintptr_t)r->parts[i].iov_base;
		size_t n = r->parts[i].iov_len;
		if (at < r->handles[i]->begin || at + n > r->handles[i]->end || bytes + n > sizeof(message)) {
			atomic_fetch_add(&wrong, 1);
			break;
		}
		memcpy(message + bytes, r->parts[i].iov_base, n);
		bytes += n;
	}
	memcpy(&header, message, sizeof(header));
	if (bytes != sizeof(message) || header.bytes != CHUNK || header.kind != TP_SLOT_INLINE || header.tag != 7) atomic_fetch_add(&wrong, 1);
	for (size_t at = sizeof(header); at + sizeof(uint32_t) <= bytes; at += sizeof(uint32_t)) {
		uint32_t word;
		memcpy(&word, message + at, sizeof(word));
		if (word == ndone) continue;
		atomic_fetch_add(&wrong, 1);
		break;
	}
	ndone++;
	*done = true;
	return ncclSuccess;
}

static ncclResult_t close_send(void *comm)
{
	(void)comm;
	nclosed++;
	return ncclSuccess;
}

static const struct tp_net_ops ops = { .name = "late", .properties = properties, .reg_memory = reg_memory, .dereg_memory = dereg_memory, .isend = isend, .isendv = isendv, .test = test,
	.close_send = close_send };

/* ---- a link */

struct world {
	struct tp_boot boot;
	struct tp_boot_peer peers[2];
	struct tp_net_links nets;
	struct tp_link_net end, *ends[1];
	struct tp_link link;
	struct tp_device_link device;
	struct tp_gpu_memory buffer;
	pthread_mutex_t lock;
	uint32_t next;
	_Atomic bool ends_now;
	uint64_t lent;
};

static void open_world(struct world *w)
{
	struct tp_links_gdr dev = { .send = true };
	struct tp_gpu *gpu;
	bool has;
	memset(w, 0, sizeof(*w));
	memset(requests, 0, sizeof(requests));
	nsent = ndone = nclosed = 0;
	atomic_store(&wrong, 0);
	assert_true(tp_gpu_open(&has) == ncclSuccess && has && tp_gpu_of_ordinal(0, &gpu) == ncclSuccess);
	pthread_mutex_init(&w->lock, NULL);
	w->peers[1].host = 1;
	w->boot.nranks = 2;
	w->boot.peers = w->peers;
	w->nets = (struct tp_net_links){ .boot = &w->boot, .gpu = gpu, .ops = &ops, .ndevs = 1, .nchannels = 1, .capacity = CHUNK, .stride = 8192, .nslots = CHUNKS, .lends = true, .ends = w->ends,
		.nends = 1, .size_ends = 1 };
	assert_int_equal(tp_net_gdr_set(&w->nets, &dev, 1), ncclSuccess);
	assert_non_null(w->nets.loans);
	w->ends[0] = &w->end;
	w->end = (struct tp_link_net){ .nets = &w->nets, .link = &w->link, .sending = true, .to = 1, .comm = w, .state = TP_NET_READY };
	assert_int_equal(tp_net_ring_make(&w->end, &w->link), ncclSuccess);
	assert_int_equal(tp_net_ring_register(&w->end), ncclSuccess);
	w->link.net = &w->end;
	w->device = (struct tp_device_link){ .stride = (uint32_t)w->link.stride, .mask = w->link.mask };
	tp_net_ring_places(&w->link, &w->device);
	assert_true(w->device.lends);
	assert_int_equal(tp_gpu_alloc(gpu, CHUNKS * CHUNK, false, "a buffer", &w->buffer), ncclSuccess);
}

static void close_world(struct world *w)
{
	tp_net_grants_drop(&w->end);
	dereg_memory(NULL, w->end.mhandle);
	if (w->end.headers_mhandle) dereg_memory(NULL, w->end.headers_mhandle);
	tp_net_loans_retire(&w->nets, &w->lock);
	assert_null(w->nets.buffers);
	tp_net_loans_close(&w->nets);
	tp_net_rings_destroy(&w->nets);
	tp_gpu_free(&w->buffer);
	pthread_mutex_destroy(&w->lock);
	assert_int_equal(atomic_load(&nhandles), 0);
}

static unsigned char *chunk_at(struct world *w, uint32_t number) { return (unsigned char *)w->buffer.ptr + (size_t)(number % CHUNKS) * CHUNK; }

/* As kernels do it: struct tp_slot in the slot, and again as its flag. */
static void publish(struct world *w, bool lent)
{
	uint32_t n = w->next++;
	struct tp_slot *slot = (struct tp_slot *)(uintptr_t)(w->device.slots + (uint64_t)(n & w->device.mask) * w->device.stride);
	struct tp_slot *flag = (struct tp_slot *)(uintptr_t)(w->device.flags + (uint64_t)(n & w->device.mask) * w->device.flag_stride);
	while (n - atomic_load_explicit((_Atomic uint32_t *)(uintptr_t)w->device.head, memory_order_acquire) > w->device.mask) usleep(20);
	slot->bytes = flag->bytes = CHUNK;
	slot->tag = flag->tag = 7;
	slot->kind = TP_SLOT_INLINE;
	flag->kind = lent ? TP_SLOT_LENT : TP_SLOT_INLINE;
	if (lent) ((struct tp_slot_lent *)flag->data)->addr = (uintptr_t)chunk_at(w, n);
	else memcpy(slot->data, chunk_at(w, n), CHUNK);
	w->lent += lent;
	atomic_store_explicit(&flag->seq, n + 1, memory_order_release);
}

static void fill(struct world *w, uint32_t number)
{
	uint32_t *word = (uint32_t *)chunk_at(w, number);
	for (size_t i = 0; i < CHUNK / sizeof(*word); i++) word[i] = number;
}

static void await(struct world *w)
{
	while (atomic_load_explicit((_Atomic uint32_t *)(uintptr_t)w->device.head, memory_order_acquire) != w->next) usleep(20);
}

static uint32_t found;         /* the index */
static bool finds(struct world *w, size_t offset, size_t bytes)
{
	struct tp_link_loan range;
	uintptr_t at = (uintptr_t)w->buffer.ptr + offset;
	return tp_net_loans_find(&w->nets, (void *)at, bytes, &range, &found) && range.begin <= at && at + bytes <= range.end;
}

/* A kernel a turn: it lends what it finds registered, and ends when all is through; then the program writes over the buffer. */
static void *run_kernels(void *arg)
{
	struct world *w = arg;
	for (int turn = 0; turn < TURNS; turn++) {
		for (uint32_t i = 0; i < CHUNKS; i++) fill(w, w->next + i);
		bool lends = finds(w, 0, CHUNKS * CHUNK);
		for (int i = 0; i < CHUNKS; i++) publish(w, lends && i % 4 != 3);
		await(w);
	}
	atomic_store(&w->ends_now, true);
	return NULL;
}

static void progress(struct world *w)
{
	bool moved = false;
	pthread_mutex_lock(&w->lock);
	if (tp_net_links_progress(&w->nets, &moved) != ncclSuccess) atomic_fetch_add(&wrong, 1);
	pthread_mutex_unlock(&w->lock);
	if (!moved) usleep(20);
}

static void *run_engine(void *arg)
{
	struct world *w = arg;
	while (!atomic_load(&w->ends_now)) progress(w);
	return NULL;
}

static bool nobody_lends(void *arg)
{
	(void)arg;
	return false;
}

static void settle(struct world *w) { tp_net_loans_settle(&w->nets, &w->lock, nobody_lends, NULL); }

/* Asked with the lock: what is deregistered after the answer isn't given back by it. */
static bool somebody_lends(void *arg)
{
	struct world *w = arg;
	if (pthread_mutex_trylock(&w->lock) != EBUSY) atomic_fetch_add(&wrong, 1);
	return true;
}

static void *meddle(void *arg)
{
	struct world *w = arg;
	struct tp_net_buffer *buffer;
	int turns = 0;
	while (!atomic_load(&w->ends_now)) {
		if (tp_net_loans_register(&w->nets, &w->lock, w->buffer.ptr, CHUNKS * CHUNK, &buffer) != ncclSuccess || !buffer) {
			atomic_fetch_add(&wrong, 1);
			return NULL;
		}
		usleep(300);
		tp_net_loans_deregister(&w->nets, &w->lock, buffer);
		/* A kernel runs, so this is too early: what it has found is copied late then. */
		if (++turns % 3 == 0) settle(w);
		usleep(50);
	}
	return NULL;
}

static void close_with(struct world *w, struct tp_net_buffer *buffer)
{
	tp_net_loans_deregister(&w->nets, &w->lock, buffer);
	close_world(w);
}

static void buffers_come_and_go_while_kernels_lend_them(void **state)
{
	static struct world w;
	pthread_t threads[2 + MEDDLERS];
	struct tp_links_loans loans = { 0 };
	(void)state;
	open_world(&w);
	for (int t = 0; t < 2 + MEDDLERS; t++) assert_int_equal(pthread_create(&threads[t], NULL, t == 0 ? run_kernels : t == 1 ? run_engine : meddle, &w), 0);
	for (int t = 0; t < 2 + MEDDLERS; t++) assert_int_equal(pthread_join(threads[t], NULL), 0);
	assert_int_equal(atomic_load(&wrong), 0);
	assert_int_equal(ndone, TURNS * CHUNKS);
	tp_net_loans_count(&w.nets, &loans);
	assert_true(w.lent > 0 && loans.chunks > 0);
	assert_int_equal(loans.chunks + loans.copied, w.lent);
	assert_int_equal(loans.bytes, loans.chunks * CHUNK);
	settle(&w);
	assert_null(w.nets.buffers);
	close_world(&w);
}

static void register_buffer(struct world *w, struct tp_net_buffer **out)
{
	assert_int_equal(tp_net_loans_register(&w->nets, &w->lock, w->buffer.ptr, CHUNKS * CHUNK, out), ncclSuccess);
	assert_non_null(*out);
}

/* One chunk lies ready to be sent from a registered buffer. */
static struct tp_net_buffer *open_with_a_loan(struct world *w)
{
	struct tp_net_buffer *buffer;
	open_world(w);
	register_buffer(w, &buffer);
	fill(w, 0);
	publish(w, true);
	return buffer;
}

static void pump(struct world *w)
{
	for (int i = 0; i < 50; i++) progress(w);
}

/* Two chunks are published, the buffer goes, two more are by a kernel that has found it before. */
static void what_a_kernel_has_found_is_sent_until_it_is_over(void **state)
{
	static struct world w;
	struct tp_net_buffer *buffer;
	struct tp_links_loans loans = { 0 };
	(void)state;
	for (int early = 0; early < 2; early++) {
		open_world(&w);
		register_buffer(&w, &buffer);
		for (uint32_t i = 0; i < 4; i++) fill(&w, i);
		publish(&w, true);
		publish(&w, true);
		tp_net_loans_deregister(&w.nets, &w.lock, buffer);
		assert_false(finds(&w, 0, 1));
		/* It is on its way, so it stays. */
		settle(&w);
		assert_non_null(w.nets.buffers);
		pump(&w);
		tp_net_loans_count(&w.nets, &loans);
		assert_true(ndone == 2 && loans.chunks == 2 && loans.copied == 0);
		tp_net_loans_settle(&w.nets, &w.lock, somebody_lends, &w);
		assert_true(w.nets.buffers && atomic_load(&wrong) == 0);
		/* Somebody is mistaken, and the kernel goes on: the engine copies. */
		if (early) settle(&w);
		publish(&w, true);
		publish(&w, true);
		pump(&w);
		tp_net_loans_count(&w.nets, &loans);
		assert_true(ndone == 4 && loans.chunks == (early ? 2 : 4) && loans.copied == (early ? 2 : 0) && atomic_load(&wrong) == 0);
		settle(&w);
		assert_null(w.nets.buffers);
		close_world(&w);
	}
}

static void the_table_says_what_is_registered(void **state)
{
	static struct world w;
	struct tp_net_buffer *one, *two;
	(void)state;
	open_world(&w);
	const struct tp_link_loan *table = (const struct tp_link_loan *)(uintptr_t)tp_net_loans_table(&w.nets);
	uint64_t begin = (uint64_t)(uintptr_t)w.buffer.ptr;
	register_buffer(&w, &one);
	assert_true(finds(&w, 5, CHUNK) && found == one->index);
	assert_true(table[found].begin == begin && table[found].end == begin + CHUNKS * CHUNK);
	assert_false(finds(&w, 1, CHUNKS * CHUNK));
	register_buffer(&w, &two);
	assert_int_not_equal(two->index, one->index);
	uint32_t index = one->index;
	tp_net_loans_deregister(&w.nets, &w.lock, one);
	assert_true(table[index].begin == 0 && table[index].end == 0);
	assert_true(finds(&w, 0, CHUNK) && found == two->index);
	tp_net_loans_deregister(&w.nets, &w.lock, two);
	close_world(&w);
}

/* More buffers than the table has entries: those that are too many are copied, and an entry that was given back is somebody's again. */
static void a_full_table_refuses_and_no_more(void **state)
{
	static struct world w;
	static struct tp_net_buffer *buffers[TP_LINK_LOANS];
	struct tp_net_buffer *more;
	(void)state;
	open_world(&w);
	for (int i = 0; i < TP_LINK_LOANS; i++) register_buffer(&w, &buffers[i]);
	assert_int_equal(tp_net_loans_register(&w.nets, &w.lock, w.buffer.ptr, CHUNK, &more), ncclSuccess);
	assert_null(more);
	tp_net_loans_deregister(&w.nets, &w.lock, buffers[77]);
	settle(&w);
	register_buffer(&w, &more);
	assert_int_equal(more->index, 77);
	close_world(&w);
}

/* A connection that comes after the registration can't register it: what kernels lend meanwhile is copied, and then they find it no more. */
static void what_a_connection_refuses_leaves_the_table(void **state)
{
	static struct world w;
	struct tp_net_buffer *buffer;
	struct tp_links_loans loans = { 0 };
	(void)state;
	open_world(&w);
	const struct tp_link_loan *table = (const struct tp_link_loan *)(uintptr_t)tp_net_loans_table(&w.nets);
	w.end.state = TP_NET_CONNECTING;
	register_buffer(&w, &buffer);
	assert_true(finds(&w, 0, CHUNK));
	w.end.state = TP_NET_READY;
	refuses = TP_NET_CUDA;
	fill(&w, 0);
	publish(&w, true);
	pump(&w);
	tp_net_loans_count(&w.nets, &loans);
	assert_true(ndone == 1 && loans.chunks == 0 && loans.copied == 1 && atomic_load(&wrong) == 0);
	assert_false(finds(&w, 0, CHUNK));
	assert_true(table[buffer->index].begin == 0 && table[buffer->index].end == 0);
	refuses = 0;
	close_with(&w, buffer);
}

/* Flags that can't be registered end the operation, as slots do: they would be tried again with each chunk, and each be copied by the engine. */
static void flags_that_cannot_be_registered_are_an_error(void **state)
{
	static struct world w;
	bool moved;
	(void)state;
	struct tp_net_buffer *buffer = open_with_a_loan(&w);
	refuses = TP_NET_HOST;
	assert_int_equal(tp_net_links_progress(&w.nets, &moved), ncclSystemError);
	assert_true(nsent == 0 && w.nets.loans);
	refuses = 0;
	tp_net_links_recall(&w.nets);
	assert_int_equal(w.end.state, TP_NET_RECALLED);
	close_with(&w, buffer);
}

/* It isn't in its slot, from which it must not be sent either. */
static void what_could_not_be_sent_is_still_lent(void **state)
{
	static struct world w;
	bool moved;
	(void)state;
	struct tp_net_buffer *buffer = open_with_a_loan(&w);
	breaks = true;
	assert_int_equal(tp_net_links_progress(&w.nets, &moved), ncclRemoteError);
	breaks = false;
	assert_true(tp_net_link_has_loan(&w.end));
	pump(&w);
	assert_true(ndone == 1 && atomic_load(&wrong) == 0);
	close_with(&w, buffer);
}

/* So much has been sent, and all that was lent came before a number. */
static void begin_at(struct world *w, uint32_t number, uint32_t lent_to)
{
	w->next = w->link.next = w->link.head_seen = w->end.posted = w->end.finished = ndone = number;
	nsent = number;
	w->end.lent_to = lent_to;
	atomic_store(w->link.head, number);
}

static void counters_wrap(void **state)
{
	/* Nothing was lent for half of their range, which looks like something that is to come; and where they begin anew. */
	static const struct { uint32_t from, lent_to; } begins[] = { { 0x7ffffffd, 0 }, { 0x80000005, 0x80000005 - 20 }, { 0xffffffed, 0xffffff00 } };
	static struct world w;
	struct tp_net_buffer *buffer;
	(void)state;
	for (size_t b = 0; b < TP_ARRAY_LEN(begins); b++) {
		open_world(&w);
		begin_at(&w, begins[b].from, begins[b].lent_to);
		for (uint32_t i = 0; i < 5; i++) {
			fill(&w, w.next);
			publish(&w, false);
		}
		pump(&w);
		assert_false(tp_net_link_has_loan(&w.end));
		register_buffer(&w, &buffer);
		for (uint32_t i = 0; i < 3 * CHUNKS; i++) {
			fill(&w, w.next);
			publish(&w, i % 2 == 0);
			assert_true(i % 2 || tp_net_link_has_loan(&w.end));
			pump(&w);
			assert_false(tp_net_link_has_loan(&w.end));
		}
		assert_true(ndone == begins[b].from + 5 + 3 * CHUNKS && atomic_load(&wrong) == 0);
		tp_net_links_recall(&w.nets);
		assert_int_equal(w.end.state, TP_NET_READY);
		close_with(&w, buffer);
	}
}

static void what_is_recalled_is_never_sent(void **state)
{
	static struct world w;
	struct tp_net_buffer *buffer;
	(void)state;
	for (int connected = 0; connected < 2; connected++) {
		open_world(&w);
		if (!connected) {
			w.end.state = TP_NET_CONNECTING;
			w.end.comm = NULL;
		}
		register_buffer(&w, &buffer);
		fill(&w, 0);
		publish(&w, true);
		tp_net_links_recall(&w.nets);
		assert_int_equal(w.end.state, TP_NET_RECALLED);
		assert_int_equal(nclosed, connected);
		publish(&w, true);
		pump(&w);
		tp_net_links_recall(&w.nets);
		assert_true(nsent == 0 && nclosed == (uint32_t)connected && !tp_net_links_need_progress(&w.nets));
		close_with(&w, buffer);
	}
}

static void a_connection_with_nothing_on_loan_stays(void **state)
{
	static struct world w;
	(void)state;
	struct tp_net_buffer *buffer = open_with_a_loan(&w);
	pump(&w);
	assert_int_equal(ndone, 1);
	fill(&w, 1);
	publish(&w, false);
	tp_net_links_recall(&w.nets);
	assert_int_equal(w.end.state, TP_NET_READY);
	pump(&w);
	assert_true(ndone == 2 && atomic_load(&wrong) == 0);
	close_with(&w, buffer);
}

/* A trial of another communicator's, which calls CUDA, and so may wait for a kernel that waits for the engine. */
static _Atomic bool tries, may_end;
static ncclResult_t slow_hold(int dev, const struct tp_net_gpu_memory *memory, void **held)
{
	(void)dev, (void)memory;
	atomic_store(&tries, true);
	for (int ms = 0; !atomic_load(&may_end); ms++, usleep(1000))
		if (ms == 10000) return atomic_fetch_add(&wrong, 1), ncclInternalError;
	*held = NULL;
	return ncclSuccess;
}

static void *try_elsewhere(void *arg)
{
	static struct tp_net_ops slow;
	const struct world *w = arg;
	struct tp_links_gdr dev = { .send = true };
	struct tp_net_links nets = { .boot = w->nets.boot, .gpu = w->nets.gpu, .ops = &slow, .ndevs = 1 };
	slow = ops;
	slow.hold_memory = slow_hold;
	if (tp_net_gdr_set(&nets, &dev, 1) != ncclSuccess) atomic_fetch_add(&wrong, 1);
	tp_net_gdr_close(&nets);
	return NULL;
}

static void nobody_waits_for_trials_of_other_devices(void **state)
{
	static struct world w;
	struct tp_net_buffer *buffer;
	pthread_t thread;
	(void)state;
	open_world(&w);
	assert_int_equal(pthread_create(&thread, NULL, try_elsewhere, &w), 0);
	while (!atomic_load(&tries)) usleep(100);
	register_buffer(&w, &buffer);
	fill(&w, 0);
	publish(&w, true);
	pump(&w);
	atomic_store(&may_end, true);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_true(ndone == 1 && atomic_load(&wrong) == 0);
	close_with(&w, buffer);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(buffers_come_and_go_while_kernels_lend_them), cmocka_unit_test(what_a_kernel_has_found_is_sent_until_it_is_over),
		cmocka_unit_test(the_table_says_what_is_registered), cmocka_unit_test(a_full_table_refuses_and_no_more),
		cmocka_unit_test(what_a_connection_refuses_leaves_the_table), cmocka_unit_test(flags_that_cannot_be_registered_are_an_error),
		cmocka_unit_test(what_could_not_be_sent_is_still_lent), cmocka_unit_test(counters_wrap),
		cmocka_unit_test(what_is_recalled_is_never_sent), cmocka_unit_test(a_connection_with_nothing_on_loan_stays),
		cmocka_unit_test(nobody_waits_for_trials_of_other_devices),
	};
	use_fake_driver(1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
