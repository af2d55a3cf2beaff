/* Faults on demand in a running process, ordered as `telpher verbs fault` does: what a program then sees. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "verbs/control.h"
#include "verbs/helper_api.h"

/* Orders are taken from the first protection domain on. */
static void wake_control(void)
{
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	assert_non_null(pd);
	assert_int_equal(ibv_dealloc_pd(pd), 0);
	assert_int_equal(ibv_close_device(context), 0);
}

static int connect_self(void)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	struct stat pidns;
	assert_int_equal(stat("/proc/self/ns/pid", &pidns), 0);
	int length = snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "telpher-verbs/1/%u/control/%d/%llu", geteuid(), getpid(),
		(unsigned long long)pidns.st_ino);
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(s >= 0);
	assert_int_equal(connect(s, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)), 0);
	return s;
}

static int ask(int s, enum tp_control_kind kind, const char *text, int with, struct tp_control_answer *answer)
{
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = { { 0 } };
	struct tp_control_order order = { .magic = TP_CONTROL_MAGIC, .version = TP_CONTROL_VERSION, .kind = kind };
	snprintf(order.text, sizeof(order.text), "%s", text);
	struct iovec part = { &order, sizeof(order) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &with, sizeof(with));
	assert_int_equal(sendmsg(s, &message, MSG_NOSIGNAL), sizeof(order));
	/* The descriptor that comes along isn't taken: there is no room for it. */
	assert_int_equal(recv(s, answer, sizeof(*answer), MSG_WAITALL), sizeof(*answer));
	return answer->error;
}

static int order(const char *faults)
{
	struct tp_control_answer answer;
	int s = connect_self(), error = ask(s, TP_CONTROL_FAULTS, faults, s, &answer);
	close(s);
	return error;
}

static void what_strikes_now_is_told_and_wrong_lists_change_nothing(void **state)
{
	(void)state;
	const char *const wrong[] = { "memlock=x", "memlock=", "open=EWHAT", "open", "cq=", "protection=0", "protection=2", "scatter=x", "drop=2", "thing=1",
		"memlock=64K,thing" };
	struct tp_control_answer answer;
	assert_int_equal(order("drop=0.25,memlock=1G,seed=5"), 0);
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		assert_int_equal(order(wrong[i]), EINVAL);
	int s = connect_self();
	assert_int_equal(ask(s, TP_CONTROL_SHOW, "", s, &answer), 0);
	assert_string_equal(answer.text, "drop=0.25,memlock=1G,seed=5");
	assert_int_equal(ask(s, TP_CONTROL_FAULTS, "none", s, &answer), 0);
	assert_int_equal(ask(s, TP_CONTROL_SHOW, "", s, &answer), 0);
	assert_string_equal(answer.text, "none");
	assert_int_equal(ask(s, (enum tp_control_kind)77, "", s, &answer), ENOSYS);
	close(s);
}

static void a_device_is_missing_or_can_not_be_opened(void **state)
{
	(void)state;
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	assert_int_equal(count, 2);
	assert_int_equal(order("missing=faulty1,open=EACCES:faulty0"), 0);
	struct ibv_device **fewer = ibv_get_device_list(&count);
	assert_int_equal(count, 1);
	assert_string_equal(ibv_get_device_name(fewer[0]), "faulty0");
	errno = 0;
	assert_null(ibv_open_device(list[0]));
	assert_int_equal(errno, EACCES);
	struct ibv_context *other = ibv_open_device(list[1]);
	assert_non_null(other);
	assert_int_equal(ibv_close_device(other), 0);
	assert_int_equal(order("none"), 0);
	ibv_free_device_list(list);
	ibv_free_device_list(fewer);
}

static void registered_memory_has_a_limit_as_rlimit_memlock_sets_it(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	uint8_t *memory = aligned_alloc(4096, 65536);
	memset(memory, 0, 65536);
	assert_int_equal(order("memlock=32K"), 0);
	struct ibv_mr *first = ibv_reg_mr(pd, memory, 16384, 0), *second = ibv_reg_mr(pd, memory + 16384, 16384, 0);
	assert_non_null(first);
	assert_non_null(second);
	errno = 0;
	assert_null(ibv_reg_mr(pd, memory + 32768, 4096, 0));
	assert_int_equal(errno, ENOMEM);
	assert_int_equal(ibv_dereg_mr(second), 0);
	second = ibv_reg_mr(pd, memory + 32768, 4096, 0);
	assert_non_null(second);
	assert_int_equal(ibv_rereg_mr(second, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 65536, 0), IBV_REREG_MR_ERR_INPUT);
	assert_int_equal(order("none"), 0);
	assert_int_equal(ibv_dereg_mr(first), 0);
	assert_int_equal(ibv_dereg_mr(second), 0);
	assert_int_equal(ibv_dealloc_pd(pd), 0);
	assert_int_equal(ibv_close_device(context), 0);
	free(memory);
}

static void a_completion_queue_fails_at_the_completion_that_was_named(void **state)
{
	(void)state;
	struct pair pair;
	pair_open(&pair, NULL);
	assert_int_equal(order("cq=3"), 0);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &pair.b }), 0);
		assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_SUCCESS);
	}
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &pair.b });
	struct ibv_async_event event = next_event(pair.context);
	assert_int_equal(event.event_type, IBV_EVENT_CQ_ERR);
	assert_ptr_equal(event.element.cq, pair.a.cq);
	assert_int_equal(order("none"), 0);
	while (any_event(pair.context))
		next_event(pair.context);
	pair_close(&pair);
}

static void a_request_fails_with_a_local_protection_error(void **state)
{
	(void)state;
	struct pair pair;
	pair_open(&pair, NULL);
	assert_int_equal(order("protection=1"), 0);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &pair.b });
	assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_LOC_PROT_ERR);
	assert_int_equal(state_of(pair.a.qp), IBV_QPS_ERR);
	assert_int_equal(order("none"), 0);
	pair_close(&pair);
}

static enum ibv_port_state port_state(struct ibv_context *context)
{
	struct ibv_port_attr attr;
	assert_int_equal(ibv_query_port(context, 1, &attr), 0);
	return attr.state;
}

static void a_port_goes_down_and_comes_back_with_its_events(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	assert_int_equal(port_state(context), IBV_PORT_ACTIVE);
	assert_int_equal(order("down"), 0);
	assert_int_equal(next_event(context).event_type, IBV_EVENT_PORT_ERR);
	assert_int_equal(port_state(context), IBV_PORT_DOWN);
	assert_int_equal(order("none"), 0);
	assert_int_equal(next_event(context).event_type, IBV_EVENT_PORT_ACTIVE);
	assert_int_equal(port_state(context), IBV_PORT_ACTIVE);
	assert_int_equal(ibv_close_device(context), 0);
}

static void packets_are_lost_until_the_order_to_lose_none(void **state)
{
	(void)state;
	struct pair pair;
	pair_open(&pair, &(struct pair_options){ .timeout = 1 });
	assert_int_equal(order("dead"), 0);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &pair.b });
	assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_RETRY_EXC_ERR);
	assert_int_equal(order("none"), 0);
	pair_close(&pair);
	pair_open(&pair, NULL);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &pair.b });
	assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_SUCCESS);
	pair_close(&pair);
}

/* How a WRITE of so many bytes ends while such packets are struck. */
static enum ibv_wc_status write_while(const char *faults, uint8_t traffic_class, uint32_t bytes, uint8_t timeout)
{
	struct pair pair;
	pair_open(&pair, &(struct pair_options){ .timeout = timeout, .retry_cnt = 7, .traffic_class = traffic_class });
	assert_int_equal(order(faults), 0);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = bytes, .remote = &pair.b });
	enum ibv_wc_status status = next_wc(pair.a.cq).status;
	assert_int_equal(order("none"), 0);
	pair_close(&pair);
	return status;
}
enum { IMPATIENT = 1, PATIENT = 20 };

static void a_traffic_class_that_was_forgotten_is_seen_by_the_loss(void **state)
{
	(void)state;
	assert_int_equal(write_while("dscp=0:1", 0, 8, IMPATIENT), IBV_WC_RETRY_EXC_ERR);
	assert_int_equal(write_while("dscp=0:1", 26 << 2, 8, PATIENT), IBV_WC_SUCCESS);
}

static void nothing_goes_where_there_is_no_route(void **state)
{
	(void)state;
	char faults[64];
	union ibv_gid gid;
	struct ibv_context *context = open_first();
	assert_int_equal(ibv_query_gid(context, 1, 0, &gid), 0);
	assert_int_equal(ibv_close_device(context), 0);
	if (gid.raw[10] != 0xff)
		skip();
	snprintf(faults, sizeof(faults), "unroute=%u.%u.%u.%u", gid.raw[12], gid.raw[13], gid.raw[14], gid.raw[15]);
	assert_int_equal(write_while(faults, 0, 8, IMPATIENT), IBV_WC_RETRY_EXC_ERR);
	assert_int_equal(write_while("unroute=203.0.113.9", 0, 8, PATIENT), IBV_WC_SUCCESS);
}

static void an_mtu_on_the_way_eats_what_is_larger(void **state)
{
	(void)state;
	assert_int_equal(write_while("mtu=600", 0, 400, PATIENT), IBV_WC_SUCCESS);
	assert_int_equal(write_while("mtu=600", 0, 1000, IMPATIENT), IBV_WC_RETRY_EXC_ERR);
}

static void a_slow_receiver_takes_its_time(void **state)
{
	(void)state;
	struct timespec begin, end;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	assert_int_equal(write_while("slow=30ms", 0, 8, PATIENT), IBV_WC_SUCCESS);
	clock_gettime(CLOCK_MONOTONIC, &end);
	/* Less can't be, however fast the machine. */
	assert_true((end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec >= 30000000);
}

static void a_write_that_lands_out_of_order_is_whole_when_its_immediate_comes(void **state)
{
	(void)state;
	struct pair pair;
	pair_open(&pair, NULL);
	assert_int_equal(order("scatter=1,seed=9"), 0);
	for (int i = 0; i < SIDE_BYTES; i++)
		pair.a.data[i] = (uint8_t)(i * 7 + i / 256);
	for (int round = 0; round < 4; round++) {
		memset(pair.b.data, 0, SIDE_BYTES);
		assert_int_equal(post_recv(&pair.b, 1, 0, 0), 0);
		post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .bytes = 9001, .offset = 3, .remote = &pair.b, .imm = 5 });
		struct ibv_wc wc = next_wc(pair.b.cq);
		assert_int_equal(wc.status, IBV_WC_SUCCESS);
		assert_int_equal(wc.byte_len, 9001);
		assert_memory_equal(pair.b.data, pair.a.data + 3, 9001);
		assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_SUCCESS);
	}
	assert_int_equal(order("none"), 0);
	pair_close(&pair);
}

static void packets_are_captured_for_as_long_as_the_connection_lasts(void **state)
{
	(void)state;
	struct pair pair;
	struct tp_control_answer answer;
	struct stat before, after;
	uint32_t magic = 0;
	int s = connect_self(), file = memfd_create("capture", MFD_CLOEXEC);
	assert_int_equal(ask(s, TP_CONTROL_CAPTURE, "", file, &answer), 0);
	pair_open(&pair, NULL);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 4000, .remote = &pair.b });
	assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_SUCCESS);
	close(s);
	/* Whoever ends the capture has seen the connection's end; what is ordered after it comes after it. */
	assert_int_equal(order("none"), 0);
	assert_int_equal(fstat(file, &before), 0);
	assert_true(before.st_size > 4000);
	assert_int_equal(pread(file, &magic, sizeof(magic), 0), sizeof(magic));
	assert_int_equal(magic, 0x0a0d0d0a);
	post(&pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 4000, .remote = &pair.b });
	assert_int_equal(next_wc(pair.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(order("none"), 0);
	assert_int_equal(fstat(file, &after), 0);
	assert_int_equal(before.st_size, after.st_size);
	close(file);
	pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_strikes_now_is_told_and_wrong_lists_change_nothing),
		cmocka_unit_test(a_device_is_missing_or_can_not_be_opened),
		cmocka_unit_test(registered_memory_has_a_limit_as_rlimit_memlock_sets_it),
		cmocka_unit_test(a_completion_queue_fails_at_the_completion_that_was_named),
		cmocka_unit_test(a_request_fails_with_a_local_protection_error),
		cmocka_unit_test(a_port_goes_down_and_comes_back_with_its_events),
		cmocka_unit_test(packets_are_lost_until_the_order_to_lose_none),
		cmocka_unit_test(a_traffic_class_that_was_forgotten_is_seen_by_the_loss),
		cmocka_unit_test(nothing_goes_where_there_is_no_route),
		cmocka_unit_test(an_mtu_on_the_way_eats_what_is_larger),
		cmocka_unit_test(a_slow_receiver_takes_its_time),
		cmocka_unit_test(a_write_that_lands_out_of_order_is_whole_when_its_immediate_comes),
		cmocka_unit_test(packets_are_captured_for_as_long_as_the_connection_lasts),
	};
	setenv("TELPHER_VERBS_DEVICES", "faulty0,faulty1", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	unsetenv("TELPHER_VERBS_FAULT");
	unsetenv("TELPHER_VERBS_CAPTURE");
	wake_control();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
