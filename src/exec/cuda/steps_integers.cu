/* Steps kernels (steps.h) of one family of types. */
#include "exec/cuda/steps.h"

TP_REDUCTIONS_INTEGERS(TP_STEPS_KERNEL)
