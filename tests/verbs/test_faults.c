/* Faults of the objects: the same seed gives the same faults, and a WRITE's packets land in an order of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "verbs/fault.h"
#include "verbs/internal.h"
#include "verbs/scatter.h"

static void a_seed_gives_the_same_strikes_again(void **state)
{
	(void)state;
	bool first[400];
	int different = 0;
	for (int run = 0; run < 3; run++) {
		int strikes = 0;
		assert_int_equal(tp_fault_text_set(run < 2 ? "protection=0.25,seed=42" : "protection=0.25,seed=43"), 0);
		for (int i = 0; i < 400; i++) {
			bool strikes_now = tp_fault(TP_FAULT_PROTECTION, "", 0) != 0;
			strikes += strikes_now;
			if (run == 0)
				first[i] = strikes_now;
			else if (run == 1)
				assert_int_equal(first[i], strikes_now);
			else
				different += first[i] != strikes_now;
		}
		assert_in_range(strikes, 60, 140);
	}
	assert_true(different > 0);
	assert_int_equal(tp_fault_text_set("none"), 0);
}

static void a_rule_strikes_the_device_and_the_amount_that_it_names(void **state)
{
	(void)state;
	char text[64];
	assert_int_equal(tp_fault_text_set("memlock=4K:mlx5_1, cq=2M"), 0);
	assert_int_equal(tp_fault(TP_FAULT_MEMLOCK, "mlx5_0", 1 << 20), 0);
	assert_int_equal(tp_fault(TP_FAULT_MEMLOCK, "mlx5_1", 4096), 0);
	assert_int_equal(tp_fault(TP_FAULT_MEMLOCK, "mlx5_1", 4097), ENOMEM);
	assert_int_equal(tp_fault(TP_FAULT_CQ, "mlx5_0", (2 << 20) - 1), 0);
	assert_int_equal(tp_fault(TP_FAULT_CQ, "mlx5_0", 2 << 20), 1);
	tp_fault_text_get(text, sizeof(text));
	assert_string_equal(text, "memlock=4K:mlx5_1, cq=2M");
	assert_int_equal(tp_fault_text_set(NULL), 0);
	assert_int_equal(tp_fault(TP_FAULT_CQ, "mlx5_0", 2 << 20), 0);
}

struct target { struct ibv_context *context; struct ibv_pd *pd; struct ibv_cq *cq; struct ibv_mr *mr; struct tp_qp *qp; uint8_t memory[64]; };

static void open_target(struct target *t)
{
	struct tp_device *devices;
	assert_true(tp_card_devices(&devices) > 0);
	t->context = tp_context_open(&devices[0]);
	t->pd = tp_pd_alloc(t->context);
	t->cq = tp_cq_create(t->context, 16, NULL, NULL, 0);
	t->mr = tp_mr_reg(t->pd, t->memory, sizeof(t->memory), 0x1000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RC, .send_cq = t->cq, .recv_cq = t->cq, .pd = t->pd, .comp_mask = IBV_QP_INIT_ATTR_PD,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = tp_qp_create(t->context, &init);
	assert_non_null(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	assert_int_equal(tp_qp_modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	t->qp = tp_qp_of(qp);
}

static void close_target(struct target *t)
{
	tp_qp_destroy(&t->qp->ibv);
	tp_mr_dereg(t->mr);
	tp_cq_destroy(t->cq);
	tp_pd_dealloc(t->pd);
	tp_context_close(tp_context_of(t->context));
}

/* Eight packets that all write the same bytes: what remains is the one that was written last. */
static int last_of_eight(struct target *t, const char *faults)
{
	assert_int_equal(tp_fault_text_set(faults), 0);
	memset(t->memory, 0xff, sizeof(t->memory));
	for (uint8_t i = 0; i < 8; i++) {
		uint8_t data[4] = { i, i, i, i };
		assert_true(tp_scatter_keep(t->qp, 0x1008, data, sizeof(data), i == 0));
		assert_int_equal(t->memory[8], 0xff);
	}
	pthread_mutex_lock(&t->qp->lock);
	assert_int_equal(tp_scatter_place(t->qp, 0, t->mr->rkey), TP_REPLY_ACK);
	pthread_mutex_unlock(&t->qp->lock);
	assert_int_equal(t->memory[7], 0xff);
	assert_int_equal(t->memory[12], 0xff);
	return t->memory[8];
}

static void packets_of_a_write_land_in_an_order_that_the_seed_decides(void **state)
{
	(void)state;
	static struct target t;
	bool out_of_order = false;
	open_target(&t);
	for (int seed = 1; seed < 6; seed++) {
		char text[40];
		snprintf(text, sizeof(text), "scatter=1,seed=%d", seed);
		int last = last_of_eight(&t, text);
		assert_in_range(last, 0, 7);
		assert_int_equal(last_of_eight(&t, text), last);
		out_of_order |= last != 7;
	}
	assert_true(out_of_order);
	assert_int_equal(tp_fault_text_set("none"), 0);
	assert_false(tp_scatter_keep(t.qp, 0x1008, "x", 1, true));
	close_target(&t);
}

static void a_message_that_never_became_whole_is_forgotten(void **state)
{
	(void)state;
	static struct target t;
	open_target(&t);
	assert_int_equal(tp_fault_text_set("scatter=1"), 0);
	assert_true(tp_scatter_keep(t.qp, 0x1000, "aaaa", 4, true));
	assert_true(tp_scatter_keep(t.qp, 0x1010, "bbbb", 4, true));
	pthread_mutex_lock(&t.qp->lock);
	assert_int_equal(tp_scatter_place(t.qp, 0, t.mr->rkey), TP_REPLY_ACK);
	pthread_mutex_unlock(&t.qp->lock);
	assert_int_equal(t.memory[0], 0);
	assert_memory_equal(t.memory + 16, "bbbb", 4);
	/* Also where its queue pair went. */
	assert_true(tp_scatter_keep(t.qp, 0x1000, "aaaa", 4, true));
	close_target(&t);
	open_target(&t);
	assert_true(tp_scatter_keep(t.qp, 0x1000, "cccc", 4, true));
	pthread_mutex_lock(&t.qp->lock);
	assert_int_equal(tp_scatter_place(t.qp, 0, t.mr->rkey), TP_REPLY_ACK);
	pthread_mutex_unlock(&t.qp->lock);
	assert_int_equal(tp_fault_text_set("none"), 0);
	close_target(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_seed_gives_the_same_strikes_again), cmocka_unit_test(a_rule_strikes_the_device_and_the_amount_that_it_names),
		cmocka_unit_test(packets_of_a_write_land_in_an_order_that_the_seed_decides), cmocka_unit_test(a_message_that_never_became_whole_is_forgotten),
	};
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_SHARE", "0", 1);
	setenv("TELPHER_VERBS_CONTROL", "0", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
