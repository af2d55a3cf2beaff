/* How the IB transport registers GPU memory: what it asks a card, what it takes from a DMA-BUF, what stays registered, how it flushes. Memory is the host's:
 * the card takes no address for a GPU's that CUDA doesn't know. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "helper_ib.h"

#define PAGE ((size_t)4096)

static struct tp_verbs verbs;           /* the card's, with a DMA-BUF of our own */
static int refuses;                     /* errno of ibv_reg_dmabuf_mr with no descriptor */
static uint64_t offset_was;
static int registered, fd_was;

static struct tp_ib_context *context(void) { return tp_ib_port(0)->context; }

static struct ibv_mr *reg_dmabuf(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access)
{
	if (fd < 0) {
		errno = refuses;
		return NULL;
	}
	offset_was = offset;
	fd_was = fd;
	registered++;
	return context()->verbs->reg_mr(pd, (void *)(uintptr_t)iova, bytes, access & ~(int)IBV_ACCESS_RELAXED_ORDERING);
}

static void use(struct ibv_mr *(*reg)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int))
{
	verbs.reg_dmabuf_mr = reg;
	context()->gpu_asked = false;
	context()->gpu_memory = 0;
	context()->no_gpu_memory[0] = 0;
}

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	verbs = *context()->verbs;
	context()->verbs = &verbs;
	refuses = EBADF;
	return 0;
}

static void a_card_is_asked_with_no_descriptor(void **state)
{
	(void)state;
	static const struct { int error; bool software; uint32_t memory; } cases[] = {
		{ EBADF, true, TP_NET_CUDA | TP_NET_DMABUF }, { EINVAL, true, TP_NET_CUDA | TP_NET_DMABUF }, { EOPNOTSUPP, true, 0 }, { EPROTONOSUPPORT, true, 0 },
		{ EBADF, false, TP_NET_DMABUF }, { EOPNOTSUPP, false, 0 } };
	struct tp_net_properties p;

	if (tp_ib_peermem_is_loaded("")) skip();
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		use(reg_dmabuf);
		refuses = cases[i].error;
		verbs.software = cases[i].software;
		assert_int_equal(tp_net_ib.properties(0, &p), ncclSuccess);
		assert_int_equal(p.memory, TP_NET_HOST | cases[i].memory);
		if (!cases[i].memory) assert_non_null(strstr(p.no_gpu_memory, cases[i].software ? "TELPHER_VERBS_GPU" : "nvidia_peermem isn't loaded, and its driver knows no DMA-BUF: modprobe nvidia_peermem"));
	}
	use(NULL);
	assert_int_equal(tp_net_ib.properties(0, &p), ncclSuccess);
	assert_int_equal(p.memory, TP_NET_HOST);
	assert_non_null(strstr(p.no_gpu_memory, "its library knows no DMA-BUF"));
	verbs.software = true;
}

static void make(const char *root, const char *folders, const char *file)
{
	char path[256] = "";
	for (const char *at = folders; *at; at += strspn(at, "/")) {
		at += strcspn(at, "/");
		snprintf(path, sizeof(path), "%s/%.*s", root, (int)(at - folders), folders);
		mkdir(path, 0755);
	}
	if (!file) return;
	snprintf(path, sizeof(path), "%s/%s/%s", root, folders, file);
	int fd = open(path, O_CREAT | O_WRONLY, 0644);
	assert_true(fd >= 0);
	close(fd);
}

static void peer_memory_is_known_by_its_module(void **state)
{
	static const char *const folders[] = { "sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers/nv_mem", "sys/kernel/mm/memory_peers/nv_mem_nc" };
	char command[64];

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(folders); i++) {
		char root[] = "/tmp/telpher_sys_XXXXXX";
		assert_non_null(mkdtemp(root));
		make(root, "sys/module/mlx5_core", "version");
		make(root, folders[i], NULL);
		assert_false(tp_ib_peermem_is_loaded(root));
		make(root, folders[i], "version");
		assert_true(tp_ib_peermem_is_loaded(root));
		snprintf(command, sizeof(command), "rm -rf %s", root);
		assert_int_equal(system(command), 0);
	}
}

static void what_is_held_is_registered_once(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, 64 * PAGE);
	const struct tp_net_gpu_memory whole = { .data = data, .bytes = 64 * PAGE, .kind = TP_NET_DMABUF, .fd = 77 };
	struct ib_pair pair;
	void *held, *part;

	(void)state;
	use(reg_dmabuf);
	ib_pair_open(&pair, PAGE);
	size_t before = tp_ib_reg_count(context());
	registered = 0;
	assert_int_equal(tp_net_ib.hold_memory(0, &whole, &held), ncclSuccess);
	assert_int_equal(registered, 1);
	assert_int_equal(fd_was, 77);
	/* A connection's part of it needs no registration of its own. */
	assert_int_equal(tp_net_ib.reg_dmabuf(pair.recv_comm, data + 8 * PAGE, 4 * PAGE, 0, 78, &part), ncclSuccess);
	assert_int_equal(registered, 1);
	assert_int_equal(tp_ib_reg_count(context()), before + 1);
	assert_int_equal(tp_net_ib.dereg_memory(pair.recv_comm, part), ncclSuccess);
	tp_net_ib.drop_memory(held);
	assert_int_equal(tp_ib_reg_count(context()), before);
	ib_pair_close(&pair);
	free(data);
}

/* Another allocation came to lie where one was that is held still. */
static void what_is_held_is_found_for_its_allocation_alone(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, 64 * PAGE);
	const struct tp_net_gpu_memory one = { .data = data, .bytes = 64 * PAGE, .kind = TP_NET_DMABUF, .fd = 77, .id = 5 };
	struct tp_net_gpu_memory other = one, closed = { .data = data + 8 * PAGE, .bytes = PAGE, .kind = TP_NET_DMABUF, .fd = -1, .id = 5 };
	struct ib_pair pair;
	void *held, *again, *part, *none = NULL;

	(void)state;
	use(reg_dmabuf);
	ib_pair_open(&pair, PAGE);
	size_t before = tp_ib_reg_count(context());
	registered = 0;
	assert_int_equal(tp_net_ib.hold_memory(0, &one, &held), ncclSuccess);
	/* Its parts need no DMA-BUF; nor do they end it for others. */
	for (int i = 0; i < 2; i++) {
		assert_int_equal(tp_net_ib.reg_held(pair.send_comm, &closed, &part), ncclSuccess);
		assert_int_equal(tp_net_ib.dereg_memory(pair.send_comm, part), ncclSuccess);
	}
	assert_int_equal(registered, 1);
	closed.id = other.id = 6;
	assert_int_equal(tp_net_ib.reg_held(pair.send_comm, &closed, &none), ncclInternalError);
	assert_null(none);
	assert_int_equal(tp_net_ib.hold_memory(0, &other, &again), ncclSuccess);
	assert_int_equal(registered, 2);
	assert_int_equal(tp_net_ib.reg_held(pair.send_comm, &closed, &part), ncclSuccess);
	assert_int_equal(tp_net_ib.reg_dmabuf(pair.recv_comm, data, PAGE, 0, 78, &none), ncclSuccess);
	assert_int_equal(registered, 3);
	assert_int_equal(tp_ib_reg_count(context()), before + 3);
	tp_net_ib.drop_memory(held);
	tp_net_ib.drop_memory(again);
	assert_int_equal(tp_ib_reg_count(context()), before + 2);
	assert_int_equal(tp_net_ib.dereg_memory(pair.send_comm, part), ncclSuccess);
	assert_int_equal(tp_net_ib.dereg_memory(pair.recv_comm, none), ncclSuccess);
	assert_int_equal(tp_ib_reg_count(context()), before);
	ib_pair_close(&pair);
	free(data);
}

static void a_dma_buf_begins_where_its_page_does(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, 8 * PAGE);
	struct ib_pair pair;
	void *part = NULL;

	(void)state;
	use(reg_dmabuf);
	ib_pair_open(&pair, PAGE);
	assert_int_equal(tp_net_ib.reg_dmabuf(pair.recv_comm, data + 2 * PAGE + 100, PAGE, 2 * PAGE + 100, 7, &part), ncclSuccess);
	assert_int_equal(offset_was, 2 * PAGE);
	assert_int_equal(tp_net_ib.dereg_memory(pair.recv_comm, part), ncclSuccess);
	assert_int_equal(tp_net_ib.reg_dmabuf(pair.recv_comm, data + 100, PAGE, 0, 7, &part), ncclInvalidArgument);
	ib_pair_close(&pair);
	free(data);
}

static struct ibv_mr *fails(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access)
{
	(void)pd, (void)offset, (void)bytes, (void)iova, (void)fd, (void)access;
	errno = ENOMEM;
	return NULL;
}

static void a_refusal_says_what_may_be_used_up(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, PAGE);
	void *held = &held;

	(void)state;
	use(fails);
	assert_int_equal(tp_net_ib.hold_memory(0, &(struct tp_net_gpu_memory){ .data = data, .bytes = PAGE, .kind = TP_NET_DMABUF, .fd = 7 }, &held), ncclSystemError);
	assert_ptr_equal(held, &held);
	assert_non_null(strstr(tp_log_last_error(), "Call to ibv_reg_dmabuf_mr of 4096 bytes of GPU memory failed"));
	assert_non_null(strstr(tp_log_last_error(), "BAR1"));
	free(data);
}

static void flushes_end_and_need_no_peer(void **state)
{
	struct ib_pair pair;
	void *requests[TP_NET_MAX_REQUESTS];
	size_t bytes = 64, nothing = 0;

	(void)state;
	ib_pair_open(&pair, 64 * PAGE);
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 0, NULL, NULL, NULL, &requests[0]), ncclSuccess);
	assert_null(requests[0]);
	assert_int_equal(ib_exchange(&pair, 0, 5000, 3), ncclSuccess);
	for (int turn = 0; turn < 3; turn++) {
		for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
			void *at = pair.to + (size_t)i * PAGE;
			assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &requests[i]), ncclSuccess);
			assert_non_null(requests[i]);
		}
		/* In no order. */
		for (int i = TP_NET_MAX_REQUESTS; i-- > 0;) {
			bool done = false;
			while (!done) assert_int_equal(tp_net_ib.test(requests[i], &done, NULL), ncclSuccess);
		}
	}
	void *at = pair.to;
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &nothing, &pair.recv_memory, &requests[0]), ncclSuccess);
	assert_null(requests[0]);
	assert_int_equal(ib_exchange(&pair, 0, 100000, 4), ncclSuccess);
	ib_pair_close(&pair);
}

static void memory_that_cannot_be_read_back_is_an_error_that_says_so(void **state)
{
	struct ib_pair pair;
	void *request = NULL, *at;
	size_t bytes = 64;
	bool done = false;
	ncclResult_t result = ncclSuccess;

	(void)state;
	ib_pair_open(&pair, PAGE);
	/* No key covers it. */
	at = pair.to + ((size_t)1 << 30);
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &request), ncclSuccess);
	while (result == ncclSuccess && !done) {
		result = tp_net_ib.test(request, &done, NULL);
		sched_yield();
	}
	if (result == ncclSuccess) result = ((struct tp_ib_comm *)pair.recv_comm)->error;
	assert_int_equal(result, ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "the READ that flushes GPU memory failed on telpher0:1: IBV_WC_REM_ACCESS_ERR(10)"));
	ib_pair_close(&pair);
}

/* ---- loops that break ---- */

static int reads;                       /* posted */
static int (*real_post)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

static int count_reads(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	reads += wr->opcode == IBV_WR_RDMA_READ;
	return real_post(qp, wr, bad);
}

static void wait_for(void *request)
{
	for (bool done = false; !done; sched_yield()) assert_int_equal(tp_net_ib.test(request, &done, NULL), ncclSuccess);
}

static void a_flush_waits_for_a_loop_that_broke_with_others_under_way(void **state)
{
	enum { BROKEN = 20 };               /* more than one look takes */
	struct ib_pair pair;
	void *requests[BROKEN + 1], *at;
	size_t bytes = 64;
	bool done;

	(void)state;
	ib_pair_open(&pair, PAGE);
	struct tp_ib_path *path = ((struct tp_ib_comm *)pair.recv_comm)->used[0];
	/* As when a port dies: what is under way fails, and is no error. */
	atomic_store_explicit(&path->port->state, IBV_PORT_DOWN, memory_order_relaxed);
	at = pair.to + ((size_t)1 << 30);
	for (int i = 0; i < BROKEN; i++) {
		assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &requests[i]), ncclSuccess);
		assert_non_null(requests[i]);
	}
	/* One look takes 8 of them at most: the first and not the last. */
	for (done = false; !done; sched_yield()) assert_int_equal(tp_net_ib.test(requests[0], &done, NULL), ncclSuccess);
	atomic_store_explicit(&path->port->state, IBV_PORT_ACTIVE, memory_order_relaxed);
	real_post = context()->ibv->ops.post_send;
	context()->ibv->ops.post_send = count_reads;
	reads = 0;
	at = pair.to;
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &requests[BROKEN]), ncclSuccess);
	for (int i = 1; i <= BROKEN; i++) wait_for(requests[i]);
	context()->ibv->ops.post_send = real_post;
	assert_int_equal(reads, 1);
	ib_pair_close(&pair);
}

/* As a card that is gone answers. */
static struct ibv_qp *make_none(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	(void)pd, (void)init;
	errno = EIO;
	return NULL;
}

enum death { OF_THE_CARD, OF_THE_PORT, OF_THE_PATH, DEATHS };

static void set_dead(struct tp_ib_path *path, enum death death, bool dead)
{
	if (death == OF_THE_CARD) atomic_store_explicit(&path->port->context->fatal, dead ? IBV_EVENT_DEVICE_FATAL + 1 : 0, memory_order_relaxed);
	if (death == OF_THE_PORT) atomic_store_explicit(&path->port->state, dead ? IBV_PORT_DOWN : IBV_PORT_ACTIVE, memory_order_relaxed);
	if (death == OF_THE_PATH) path->state = dead ? TP_IB_PATH_DEAD : TP_IB_PATH_LIVE;
}

static void flushes_end_without_an_error_although_the_card_has_died(void **state)
{
	struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *init) = verbs.create_qp;
	void *under_way, *after, *at;
	size_t bytes = 64;

	(void)state;
	for (enum death death = 0; death < DEATHS; death++) {
		struct ib_pair pair;
		ib_pair_open(&pair, PAGE);
		struct tp_ib_comm *comm = pair.recv_comm;
		/* Before it is needed, as for links of GPU ranks. */
		assert_int_equal(tp_net_ib.iflush(comm, 0, NULL, NULL, NULL, &under_way), ncclSuccess);
		set_dead(comm->used[0], death, true);
		verbs.create_qp = make_none;
		/* The READ fails. */
		at = pair.to + ((size_t)1 << 30);
		assert_int_equal(tp_net_ib.iflush(comm, 1, &at, &bytes, &pair.recv_memory, &under_way), ncclSuccess);
		wait_for(under_way);
		at = pair.to;
		assert_int_equal(tp_net_ib.iflush(comm, 1, &at, &bytes, &pair.recv_memory, &after), ncclSuccess);
		wait_for(after);
		assert_int_equal(comm->error, ncclSuccess);
		set_dead(comm->used[0], death, false);
		verbs.create_qp = create_qp;
		ib_pair_close(&pair);
	}
}

static void what_has_landed_is_flushed_although_the_connection_has_failed(void **state)
{
	struct ib_pair pair;
	void *first, *second, *at;
	size_t bytes = 64;

	(void)state;
	ib_pair_open(&pair, PAGE);
	at = pair.to;
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &first), ncclSuccess);
	((struct tp_ib_comm *)pair.recv_comm)->error = ncclRemoteError;
	assert_int_equal(tp_net_ib.iflush(pair.recv_comm, 1, &at, &bytes, &pair.recv_memory, &second), ncclSuccess);
	assert_non_null(second);
	wait_for(second);
	wait_for(first);
	ib_pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_card_is_asked_with_no_descriptor), cmocka_unit_test(peer_memory_is_known_by_its_module), cmocka_unit_test(what_is_held_is_registered_once),
		cmocka_unit_test(what_is_held_is_found_for_its_allocation_alone),
		cmocka_unit_test(a_dma_buf_begins_where_its_page_does), cmocka_unit_test(a_refusal_says_what_may_be_used_up), cmocka_unit_test(flushes_end_and_need_no_peer),
		cmocka_unit_test(memory_that_cannot_be_read_back_is_an_error_that_says_so),
		cmocka_unit_test(a_flush_waits_for_a_loop_that_broke_with_others_under_way),
		cmocka_unit_test(flushes_end_without_an_error_although_the_card_has_died),
		cmocka_unit_test(what_has_landed_is_flushed_although_the_connection_has_failed),
	};
	return cmocka_run_group_tests(tests, card, NULL);
}
