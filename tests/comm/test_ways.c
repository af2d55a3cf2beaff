/* The choice of algorithms by the paths of a machine: as bandwidths by hand say, whatever kind of machine it is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "comm/ways.h"

struct machine {
	struct tp_topo_doc *doc;
	struct tp_topo *graph;
	struct tp_topo_policy policy;
	struct tp_layout *layout;
	struct tp_topo_costs costs;
	struct tp_ways ways;
	struct tp_cost_model library;
	int32_t gpus[16];
};

static void order_rings(struct machine *m)
{
	struct tp_channels *rings;
	int orders[TP_CHANNELS_MAX * 16], n = m->layout->nranks;
	assert_int_equal(tp_channels_search(m->graph, &m->policy, TP_PATTERN_RING, &rings), ncclSuccess);
	for (int c = 0; c < rings->nchannels; c++)
		for (int i = 0; i < n; i++) orders[c * n + i] = m->graph->nodes[rings->channels[c].gpus[i]].ordinal;
	assert_int_equal(tp_layout_set_orders(m->layout, tp_channels_stand_in(rings) ? 0 : rings->nchannels, orders), ncclSuccess);
	tp_channels_free(rings);
}

static void open_machine(const char *model, int ngpus, void (*change)(struct tp_topo_doc *doc), struct machine *m)
{
	int hosts[16] = { 0 };
	memset(m, 0, sizeof(*m));
	assert_int_equal(tp_topo_model(model, &m->doc), ncclSuccess);
	assert_int_equal(tp_topo_doc_keep_gpus(m->doc, ngpus), ncclSuccess);
	if (change) change(m->doc);
	assert_int_equal(tp_topo_build(m->doc, &m->graph), ncclSuccess);
	tp_topo_policy_default(&m->policy);
	m->policy.nvb = m->policy.pxn = m->policy.multi_host = false;
	assert_int_equal(tp_topo_compute_paths(m->graph, &m->policy), ncclSuccess);
	assert_int_equal(tp_layout_create(ngpus, hosts, &m->layout), ncclSuccess);
	order_rings(m);
	assert_int_equal(tp_topo_costs_of(m->doc, m->graph, &m->policy, NULL, &m->costs), ncclSuccess);
	tp_cost_gpu_defaults(&m->library);
	m->ways.known = true;
	for (int g = 0; g < ngpus; g++) m->gpus[g] = g;
	const struct tp_ways_host host = { .graph = m->graph, .costs = &m->costs, .layout = m->layout, .gpus = m->gpus };
	for (int c = 0; c < TP_WAYS_COLLS; c++)
		for (int a = 0; a < TP_NALGOS; a++) {
			struct tp_topo_load load;
			bool can;
			assert_int_equal(tp_ways_load(&host, (enum tp_coll)c, (enum tp_algo)a, 0, &can, &load), ncclSuccess);
			if (can) m->ways.of[c][a] = tp_way_of((enum tp_algo)a, &load);
		}
}

static void close_machine(struct machine *m)
{
	tp_layout_free(m->layout);
	tp_topo_free(m->graph);
	tp_topo_doc_free(m->doc);
}

static struct tp_ways_call call_of(const struct machine *m, enum tp_coll coll, size_t bytes)
{
	return (struct tp_ways_call){ .layout = m->layout, .ways = &m->ways, .library = &m->library, .coll = coll, .root = -1, .nchannels = 32, .block_bytes = bytes };
}

static enum tp_algo choice(const struct machine *m, size_t bytes, bool wants, enum tp_algo wanted)
{
	const struct tp_ways_call call = call_of(m, TP_ALL_REDUCE, bytes);
	struct tp_choice c;
	assert_int_equal(tp_ways_choose(&call, &c), ncclSuccess);
	tp_ways_fit(&call, wants, wanted, &c);
	return c.algo;
}

static void on_a_mesh_large_messages_go_along_rings_of_nvlinks(void **state)
{
	(void)state;
	struct machine m;
	open_machine("dgx-1v", 8, NULL, &m);
	assert_int_equal(choice(&m, 8, false, 0), TP_ALGO_ONE_SHOT);
	for (size_t bytes = 1 << 20; bytes <= 1u << 30; bytes *= 8) assert_int_equal(choice(&m, bytes, false, 0), TP_ALGO_RING);
	/* Six links of 20 GB/s a GPU, all in rings: 2 x 7/8 of a byte over 120. */
	assert_true((double)m.ways.of[TP_ALL_REDUCE][TP_ALGO_RING].inside_us * 1000 < 2.0 * 7 / 8 / 120 * 1.01);
	assert_false(tp_ways_are_even(&m.ways));
	close_machine(&m);
}

static void what_kernels_want_does_not_count_where_gpus_are_not_joined_alike(void **state)
{
	(void)state;
	struct machine m;
	open_machine("dgx-1v", 4, NULL, &m);
	assert_false(tp_ways_are_even(&m.ways));
	assert_int_equal(choice(&m, 64 << 20, true, TP_ALGO_TWO_SHOT), TP_ALGO_RING);
	close_machine(&m);
	open_machine("dgx-h100", 8, NULL, &m);
	assert_true(tp_ways_are_even(&m.ways));
	assert_int_equal(choice(&m, 64 << 10, true, TP_ALGO_ONE_SHOT), TP_ALGO_ONE_SHOT);
	assert_int_equal(choice(&m, 64 << 20, false, 0), TP_ALGO_TWO_SHOT);
	close_machine(&m);
}

static void over_pcie_a_ring_crosses_between_the_sockets_once(void **state)
{
	(void)state;
	struct machine m;
	open_machine("pcie-box", 8, NULL, &m);
	assert_int_equal(choice(&m, 64 << 20, false, 0), TP_ALGO_RING);
	assert_int_equal(choice(&m, 8, false, 0), TP_ALGO_ONE_SHOT);
	close_machine(&m);
}

static void without_a_machine_the_library_s_constants_decide(void **state)
{
	(void)state;
	struct machine m;
	open_machine("dgx-1v", 8, NULL, &m);
	m.ways = (struct tp_ways){ .known = false };
	struct tp_choice plain;
	assert_int_equal(tp_choose(m.layout, TP_ALL_REDUCE, -1, 64 << 20, false, &m.library, NULL, &plain), ncclSuccess);
	assert_int_equal(choice(&m, 64 << 20, false, 0), plain.algo);
	assert_int_equal(choice(&m, 64 << 10, true, TP_ALGO_ONE_SHOT), TP_ALGO_ONE_SHOT);
	close_machine(&m);
}

static void what_a_table_says_of_the_links_stays(void **state)
{
	(void)state;
	struct machine m;
	struct tp_cost_model found;
	open_machine("dgx-1v", 8, NULL, &m);
	m.library.inside.latency_us = 5;
	m.library.inside.us_per_byte = 1e-5;
	m.library.copy_us_per_byte = 1e-5;
	tp_ways_model(&m.ways, m.layout, TP_ALL_REDUCE, TP_ALGO_RING, &m.library, &found);
	assert_memory_equal(&found, &m.library, sizeof(found));
	close_machine(&m);
}

/* Wires that were measured at a quarter of what they should carry: the planned figure makes place. */
static void measure_the_switch(struct tp_topo_doc *doc)
{
	struct tp_topo_measured value = { .from = "GPU 0", .to = "GPU 1", .alpha_us = 9, .gbps = 370.8 / 4 };
	assert_int_equal(tp_topo_doc_record(doc, &value), ncclSuccess);
}

static void measured_wires_make_the_times(void **state)
{
	(void)state;
	struct machine planned, measured;
	open_machine("dgx-h100", 8, NULL, &planned);
	open_machine("dgx-h100", 8, measure_the_switch, &measured);
	const struct tp_way *a = &planned.ways.of[TP_ALL_REDUCE][TP_ALGO_TWO_SHOT], *b = &measured.ways.of[TP_ALL_REDUCE][TP_ALGO_TWO_SHOT];
	assert_float_equal(b->inside_us, 4 * a->inside_us, 1e-9);
	assert_float_equal(b->hop_us, 9, 1e-6);
	close_machine(&planned);
	close_machine(&measured);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(on_a_mesh_large_messages_go_along_rings_of_nvlinks),
		cmocka_unit_test(what_kernels_want_does_not_count_where_gpus_are_not_joined_alike),
		cmocka_unit_test(over_pcie_a_ring_crosses_between_the_sockets_once),
		cmocka_unit_test(without_a_machine_the_library_s_constants_decide),
		cmocka_unit_test(what_a_table_says_of_the_links_stays),
		cmocka_unit_test(measured_wires_make_the_times),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
