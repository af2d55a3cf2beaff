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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_device_that_may_stand_in_must_be_able_too),
		cmocka_unit_test(where_connections_stay_each_device_stands_for_itself),
		cmocka_unit_test(nothing_is_tried_where_nothing_is_wanted),
	};
	use_fake_driver(1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
