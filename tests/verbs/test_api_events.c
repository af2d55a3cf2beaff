/* Completion channels and asynchronous events. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include "verbs/helper_api.h"

static struct request to_b(struct pair *p, unsigned flags)
{
	(void)p;
	return (struct request){ .opcode = IBV_WR_SEND, .bytes = 8, .flags = flags };
}

static bool readable(int fd)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	return poll(&poll_fd, 1, 0) == 1;
}

struct armed { struct pair pair; struct ibv_comp_channel *channel; };
static void armed_open(struct armed *armed)
{
	struct ibv_context *context = open_first();
	armed->channel = ibv_create_comp_channel(context);
	assert_non_null(armed->channel);
	pair_open(&armed->pair, &(struct pair_options){ .channel = armed->channel });
}
static void armed_close(struct armed *armed)
{
	side_close(&armed->pair.a);
	side_close(&armed->pair.b);
	assert_int_equal(ibv_destroy_comp_channel(armed->channel), 0);
	assert_int_equal(ibv_close_device(armed->pair.context), 0);
}

static void an_armed_queue_gives_one_event_for_several_completions(void **state)
{
	(void)state;
	struct armed armed;
	struct ibv_cq *cq;
	void *context;
	armed_open(&armed);
	struct pair *p = &armed.pair;
	assert_int_equal(ibv_req_notify_cq(p->b.cq, 0), 0);
	assert_false(readable(armed.channel->fd));
	for (int i = 0; i < 3; i++) {
		struct request request = to_b(p, 0);
		post_recv(&p->b, 1, 0, 8);
		post(&p->a, &request);
	}
	assert_true(readable(armed.channel->fd));
	assert_int_equal(ibv_get_cq_event(armed.channel, &cq, &context), 0);
	assert_ptr_equal(cq, p->b.cq);
	assert_ptr_equal(context, &p->b);
	assert_false(readable(armed.channel->fd));
	ibv_ack_cq_events(cq, 1);
	armed_close(&armed);
}

static void solicited_only_waits_for_a_solicited_message(void **state)
{
	(void)state;
	struct armed armed;
	armed_open(&armed);
	struct pair *p = &armed.pair;
	ibv_req_notify_cq(p->b.cq, 1);
	post_recv(&p->b, 1, 0, 8);
	post_recv(&p->b, 1, 0, 8);
	struct request request = to_b(p, 0);
	post(&p->a, &request);
	assert_false(readable(armed.channel->fd));
	request.flags = IBV_SEND_SOLICITED;
	post(&p->a, &request);
	assert_true(readable(armed.channel->fd));
	armed_close(&armed);
}

static void an_error_counts_as_solicited(void **state)
{
	(void)state;
	struct armed armed;
	armed_open(&armed);
	ibv_req_notify_cq(armed.pair.b.cq, 1);
	post_recv(&armed.pair.b, 1, 0, 8);
	to_error(armed.pair.b.qp);
	assert_true(readable(armed.channel->fd));
	armed_close(&armed);
}

static void a_non_blocking_channel_says_eagain(void **state)
{
	(void)state;
	struct armed armed;
	struct ibv_cq *cq;
	void *context;
	armed_open(&armed);
	fcntl(armed.channel->fd, F_SETFL, fcntl(armed.channel->fd, F_GETFL) | O_NONBLOCK);
	assert_int_equal(ibv_get_cq_event(armed.channel, &cq, &context), -1);
	assert_int_equal(errno, EAGAIN);
	armed_close(&armed);
}

static void *ack_later(void *arg)
{
	poll(NULL, 0, 50);
	ibv_ack_cq_events(arg, 1);
	return NULL;
}

static void destroying_a_queue_waits_for_the_acknowledgement(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct pair p;
	struct ibv_cq *cq;
	void *its;
	pthread_t thread;
	pair_open(&p, &(struct pair_options){ .channel = channel });
	ibv_req_notify_cq(p.b.cq, 0);
	post_recv(&p.b, 1, 0, 8);
	to_error(p.b.qp);
	assert_int_equal(ibv_get_cq_event(channel, &cq, &its), 0);
	assert_int_equal(pthread_create(&thread, NULL, ack_later, cq), 0);
	side_close(&p.a);
	side_close(&p.b);
	pthread_join(thread, NULL);
	assert_int_equal(ibv_destroy_comp_channel(channel), 0);
	ibv_close_device(context);
}

static void events_of_a_destroyed_queue_are_gone(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct pair p;
	pair_open(&p, &(struct pair_options){ .channel = channel });
	ibv_req_notify_cq(p.b.cq, 0);
	post_recv(&p.b, 1, 0, 8);
	to_error(p.b.qp);
	assert_true(readable(channel->fd));
	side_close(&p.b);
	assert_false(readable(channel->fd));
	side_close(&p.a);
	assert_int_equal(ibv_destroy_comp_channel(channel), 0);
	ibv_close_device(context);
}

static void the_first_message_in_rtr_is_communication_established(void **state)
{
	(void)state;
	static const struct pair_options options;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	to_init(p.a.qp, 0);
	to_init(p.b.qp, 0);
	to_rtr(p.a.qp, p.b.qp->qp_num, 0, &options);
	to_rtr(p.b.qp, p.a.qp->qp_num, 0, &options);
	to_rts(p.a.qp, 0, &options);
	post_recv(&p.b, 1, 0, 8);
	struct request request = to_b(&p, 0);
	post(&p.a, &request);
	struct ibv_async_event event = next_event(p.context);
	assert_int_equal(event.event_type, IBV_EVENT_COMM_EST);
	assert_ptr_equal(event.element.qp, p.b.qp);
	assert_false(any_event(p.context));
	pair_close(&p);
}

static void a_drained_send_queue_is_an_event_where_asked_for(void **state)
{
	(void)state;
	struct pair p;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	pair_open(&p, NULL);
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	assert_int_equal(next_event(p.context).event_type, IBV_EVENT_SQ_DRAINED);
	pair_close(&p);
}

static void an_overrun_completion_queue_is_an_event(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .cqe = 2, .wr = 8 });
	struct request write = { .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b };
	for (int i = 0; i < 3; i++)
		assert_int_equal(post(&p.a, &write), 0);
	struct ibv_async_event event = next_event(p.context);
	assert_int_equal(event.event_type, IBV_EVENT_CQ_ERR);
	assert_ptr_equal(event.element.cq, p.a.cq);
	assert_int_equal(next_event(p.context).event_type, IBV_EVENT_QP_FATAL);
	assert_int_equal(state_of(p.a.qp), IBV_QPS_ERR);
	pair_close(&p);
}

static void a_queue_pair_on_a_shared_receive_queue_ends_with_last_wqe_reached(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_srq *srq = ibv_create_srq(pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 4, .max_sge = 1 } });
	struct pair p;
	pair_open(&p, &(struct pair_options){ .srq = srq });
	to_error(p.b.qp);
	assert_int_equal(next_event(p.context).event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	side_close(&p.a);
	side_close(&p.b);
	assert_int_equal(ibv_destroy_srq(srq), 0);
	assert_int_equal(ibv_dealloc_pd(pd), 0);
	ibv_close_device(context);
}

static void without_events_a_non_blocking_read_says_eagain(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_async_event event;
	fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
	assert_int_equal(ibv_get_async_event(context, &event), -1);
	assert_int_equal(errno, EAGAIN);
	ibv_close_device(context);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_armed_queue_gives_one_event_for_several_completions),
		cmocka_unit_test(solicited_only_waits_for_a_solicited_message),
		cmocka_unit_test(an_error_counts_as_solicited),
		cmocka_unit_test(a_non_blocking_channel_says_eagain),
		cmocka_unit_test(destroying_a_queue_waits_for_the_acknowledgement),
		cmocka_unit_test(events_of_a_destroyed_queue_are_gone),
		cmocka_unit_test(the_first_message_in_rtr_is_communication_established),
		cmocka_unit_test(a_drained_send_queue_is_an_event_where_asked_for),
		cmocka_unit_test(an_overrun_completion_queue_is_an_event),
		cmocka_unit_test(a_queue_pair_on_a_shared_receive_queue_ends_with_last_wqe_reached),
		cmocka_unit_test(without_events_a_non_blocking_read_says_eagain),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
