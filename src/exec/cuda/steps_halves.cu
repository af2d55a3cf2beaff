/* Steps kernels (steps.h) of one family of types. */
#include "exec/cuda/steps.h"

TP_REDUCTIONS_HALVES(TP_STEPS_KERNEL)
