/* The emulator as its users see it: the fake driver, and tests of kernels alone. */
#ifndef TP_TESTS_CUDA_EMULATOR_RUN_H
#define TP_TESTS_CUDA_EMULATOR_RUN_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tp_emulated_kernel { const char *name; void (*run)(const void *args); size_t args_bytes; };
const struct tp_emulated_kernel *tp_emulator_find(const char *name);            /* NULL: no such kernel */
size_t tp_emulator_kernels(const struct tp_emulated_kernel **out);              /* all of them, in no order */
/* Runs a kernel on the calling thread, to its end. threads: as a GPU counts, a multiple of 32. resident: blocks that run at once; a
 * block beyond starts when one ends. args are copied. */
void tp_emulator_launch(const struct tp_emulated_kernel *kernel, int blocks, int threads, int resident, const void *args);
/* From now on kernels of other processes may write to this one's memory, and read it: for the thread sanitizer (emulator.h). */
void tp_emulator_others(void);

#ifdef __cplusplus
}
#endif
#endif
