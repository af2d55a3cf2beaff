/* The facts as our header has them. */
#include "gpu/driver.h"
#include "gpu/driver_facts.h"

const struct driver_fact driver_facts_ours[] = DRIVER_FACTS;
