/* Kernels for the fake driver's own tests. */
#include "exec/cuda/shim.h"
#include "kernels_test.h"

/* Every thread its share: p[i] += value. */
TP_KERNEL(tp_test_add, struct test_args)
{
	uint32_t *p = (uint32_t *)args.memory;
	for (uint32_t i = (uint32_t)(tp_block() * tp_threads() + tp_thread()); i < args.count; i += (uint32_t)(tp_blocks() * tp_threads())) p[i] += args.value;
}

/* Ends when somebody has stored value, or anything above. */
TP_KERNEL(tp_test_wait, struct test_args)
{
	for (unsigned turn = 0; tp_load_acquire((const uint32_t *)args.memory) < args.value; turn++) tp_nap(turn, true);
}

TP_KERNEL(tp_test_store, struct test_args)
{
	if (tp_block() == 0 && tp_thread() == 0) tp_store_release((uint32_t *)args.memory, args.value);
}

/* All blocks of all kernels that were started so, count of them, wait for each other. */
TP_KERNEL(tp_test_meet, struct test_args)
{
	TP_SHARED(uint32_t, seen);
	uint32_t *p = (uint32_t *)args.memory;
	if (tp_thread() == 0) {
		tp_add_device(p, 1);
		for (unsigned turn = 0; tp_load_acquire(p) < args.count; turn++) tp_nap(turn, true);
		seen = tp_load_relaxed(p);
	}
	tp_block_sync();
	if (tp_thread() == tp_threads() - 1 && seen >= args.count) tp_add_device(p + 1, 1);
}
