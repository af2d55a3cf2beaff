/* Bruck's all-to-all: ceil(log2 n) stages for any number of ranks; a rank speaks to that many others instead of to all.
 * The block for rank + i goes by way of the set bits of i, lowest first; half of all blocks cross each stage.
 *
 * Two lanes a stage: one sends the blocks that have its bit set, from INPUT or from the lane that received them; the
 * other receives, and hands on or puts into OUTPUT. All lanes of all ranks take the blocks in the order of i, so the
 * block with the lowest i that is under way can always move: two slots a link are enough, and blocks on their way lie in
 * slots. References: blocks that leave their first rank do so from INPUT, which nothing overwrites: all-to-all
 * is not done in place. */
#include "plan/build.h"

#define MAX_STAGES 31

static const char *refuses(const struct tp_plan_spec *spec)
{
	return spec->coll == TP_ALL_TO_ALL ? NULL : "Bruck's algorithm does all-to-all";
}

static int lower_bit(int i, int bit)
{
	while (--bit >= 0)
		if (i >> bit & 1) return bit;
	return -1;
}

static int higher_bit(int i, int bit)
{
	for (bit++; i >> bit; bit++)
		if (i >> bit & 1) return bit;
	return -1;
}

static void generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks, nstages = 0, links[MAX_STAGES][MAX_STAGES];
	while (1u << nstages < (unsigned)n) nstages++;
	for (int i = 0; i < nstages; i++)
		for (int j = i + 1; j < nstages; j++) links[i][j] = -1;
	int own = tp_build_lane(b);
	tp_build_step(b, own, 0);
	tp_build_read(b, TP_INPUT, rank);
	tp_build_write(b, TP_OUTPUT, rank);
	for (int bit = 0; bit < nstages; bit++) {
		int send = tp_build_lane(b), recv = tp_build_lane(b), skip = 1 << bit;
		for (int i = skip; i < n; i++) {
			if (!(i & skip)) continue;
			int before = lower_bit(i, bit), after = higher_bit(i, bit);
			tp_build_step(b, send, 0);
			if (before < 0) tp_build_read(b, TP_INPUT, (rank + i) % n);
			else tp_build_take_local(b, links[before][bit]);
			tp_build_give(b, (rank + skip) % n, 0, before < 0);
			tp_build_step(b, recv, 0);
			tp_build_take(b, (rank + n - skip) % n, 0);
			if (after >= 0) {
				if (links[bit][after] < 0) links[bit][after] = tp_build_local(b, false);
				tp_build_give_local(b, links[bit][after]);
			} else {
				tp_build_write(b, TP_OUTPUT, (rank + n - i) % n);
			}
		}
	}
}

const struct tp_generator tp_generator_bruck = { refuses, NULL, generate };
