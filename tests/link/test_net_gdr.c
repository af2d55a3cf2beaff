/* Which network devices' slots lie in GPU memory. A connection may move to another device of a network that spreads, with its memory: so one that can't
 * register such memory keeps all others from it, also where the topology wants nothing of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "gpu/fake_driver.h"
#include "link/net_link.h"

#define NDEVS 3
#define UNABLE 2        /* its card takes host memory alone */

static ncclResult_t properties(int dev, struct tp_net_properties *out)
{
	*out = (struct tp_net_properties){ .memory = TP_NET_HOST | (dev == UNABLE ? 0 : TP_NET_CUDA), .pci_path = "" };
	snprintf(out->name, sizeof(out->name), "card%d", dev);
	if (dev == UNABLE) snprintf(out->no_gpu_memory, sizeof(out->no_gpu_memory), "card%d is too old", dev);
	return ncclSuccess;
}

static const struct tp_net_ops spreads = { .name = "spreads", .spreads = true, .properties = properties }, stays = { .name = "stays", .properties = properties };

/* The topology allows those before `wanted`. */
static struct tp_net_links set(const struct tp_net_ops *ops, struct tp_links_gdr devs[NDEVS], int wanted)
{
	struct tp_gpu *gpu;
	bool has;
	assert_true(tp_gpu_open(&has) == ncclSuccess && has && tp_gpu_of_ordinal(0, &gpu) == ncclSuccess);
	struct tp_net_links nets = { .ops = ops, .ndevs = NDEVS, .gpu = gpu };
	for (int d = 0; d < NDEVS; d++) devs[d] = (struct tp_links_gdr){ .receive = d < wanted, .send = d < wanted };
	assert_int_equal(tp_net_gdr_set(&nets, devs, NDEVS), ncclSuccess);
	return nets;
}

static void a_device_that_may_stand_in_must_be_able_too(void **state)
{
	struct tp_links_gdr devs[NDEVS];
	(void)state;
	struct tp_net_links nets = set(&spreads, devs, UNABLE);
	for (int d = 0; d < UNABLE; d++) {
		assert_false(devs[d].receive || devs[d].send || nets.gdr[d].receive || nets.gdr[d].send);
		assert_non_null(strstr(devs[d].why, "card2 is too old"));
	}
	tp_net_gdr_close(&nets);
}

static void where_connections_stay_each_device_stands_for_itself(void **state)
{
	struct tp_links_gdr devs[NDEVS];
	(void)state;
	struct tp_net_links nets = set(&stays, devs, NDEVS);
	for (int d = 0; d < NDEVS; d++) assert_int_equal(nets.gdr[d].receive && devs[d].send, d != UNABLE);
	tp_net_gdr_close(&nets);
}

static void nothing_is_tried_where_nothing_is_wanted(void **state)
{
	struct tp_links_gdr devs[NDEVS];
	(void)state;
	struct tp_net_links nets = set(&spreads, devs, 0);
	for (int d = 0; d < NDEVS; d++) assert_true(!nets.gdr[d].receive && !devs[d].why[0]);
	tp_net_gdr_close(&nets);
}

/* ---- a network that can't register memory before there are connections: other people's plug-ins ---- */

static struct { void *comm, *data; size_t bytes; enum tp_net_memory kind; } registered[4];
static int nregistered, nflushes;
static ncclResult_t answer;

static ncclResult_t reg_memory(void *comm, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	registered[nregistered].comm = comm;
	registered[nregistered].data = data;
	registered[nregistered].bytes = bytes;
	registered[nregistered].kind = kind;
	if (answer == ncclSuccess) *mhandle = &registered[nregistered];
	nregistered++;
	return answer;
}

static ncclResult_t iflush(void *comm, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **request)
{
	(void)comm, (void)data, (void)bytes, (void)mhandles;
	assert_int_equal(n, 0);
	nflushes++;
	*request = NULL;
	return ncclSuccess;
}

static const struct tp_net_ops holds_nothing = { .name = "holds nothing", .properties = properties, .reg_memory = reg_memory, .iflush = iflush };

static void memory_that_is_not_held_is_registered_by_each_connection(void **state)
{
	struct tp_links_gdr devs[NDEVS];
	(void)state;
	struct tp_net_links nets = set(&holds_nothing, devs, 1);
	int comms[2];
	struct tp_link_net ends[2] = { { .nets = &nets, .comm = &comms[0], .sending = true }, { .nets = &nets, .comm = &comms[1] } };
	assert_true(nets.gdr[0].receive && nets.gdr[0].send);
	nets.gdr[0].flush = true;
	nregistered = nflushes = 0;
	answer = ncclSuccess;
	for (int e = 0; e < 2; e++) {
		tp_net_gdr_take(&ends[e], 65536);
		assert_non_null(ends[e].far_slots);
		assert_int_equal(ends[e].far_bytes, 65536);
	}
	/* A piece for both, and a place in it for each. */
	assert_ptr_equal(ends[1].far_slots, (unsigned char *)ends[0].far_slots + 65536);
	assert_int_equal(nets.far->shown.nheld, 0);
	for (int e = 0; e < 2; e++) {
		assert_int_equal(tp_net_gdr_register(&ends[e]), ncclSuccess);
		assert_int_equal(nregistered, e + 1);
		assert_ptr_equal(registered[e].comm, &comms[e]);
		assert_ptr_equal(registered[e].data, ends[e].far_slots);
		assert_int_equal(registered[e].bytes, 65536);
		assert_int_equal(registered[e].kind, TP_NET_CUDA);
		assert_ptr_equal(ends[e].mhandle, &registered[e]);
	}
	/* Of the receiver alone, before there is data. */
	assert_int_equal(nflushes, 1);
	/* Nothing was held, and there is nothing to drop it by. */
	tp_net_gdr_close(&nets);
	assert_null(nets.far);
}

static void memory_that_is_not_held_fails_where_it_is_registered(void **state)
{
	struct tp_links_gdr devs[NDEVS];
	(void)state;
	struct tp_net_links nets = set(&holds_nothing, devs, 1);
	struct tp_link_net end = { .nets = &nets };
	tp_net_gdr_take(&end, 65536);
	assert_non_null(end.far_slots);
	answer = ncclSystemError;
	nregistered = 0;
	assert_int_equal(tp_net_gdr_register(&end), ncclSystemError);
	assert_null(end.mhandle);
	tp_net_gdr_close(&nets);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_device_that_may_stand_in_must_be_able_too),
		cmocka_unit_test(where_connections_stay_each_device_stands_for_itself),
		cmocka_unit_test(nothing_is_tried_where_nothing_is_wanted),
		cmocka_unit_test(memory_that_is_not_held_is_registered_by_each_connection),
		cmocka_unit_test(memory_that_is_not_held_fails_where_it_is_registered),
	};
	use_fake_driver(1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
