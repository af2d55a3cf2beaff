/* Faults at the objects: one rule a place. */
#include "verbs/fault.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

_Atomic uint32_t tp_fault_any;

static struct { char device[64]; uint64_t amount; int error; } rules[TP_FAULT_PLACES];
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;

void tp_fault_set(enum tp_fault_place place, const char *device, uint64_t amount, int error)
{
	pthread_mutex_lock(&rules_lock);
	snprintf(rules[place].device, sizeof(rules[place].device), "%s", device ? device : "");
	rules[place].amount = amount;
	rules[place].error = error;
	if (error)
		atomic_fetch_or_explicit(&tp_fault_any, 1u << place, memory_order_relaxed);
	else
		atomic_fetch_and_explicit(&tp_fault_any, ~(1u << place), memory_order_relaxed);
	pthread_mutex_unlock(&rules_lock);
}

int tp_fault_strikes(enum tp_fault_place place, const char *device, uint64_t amount)
{
	pthread_mutex_lock(&rules_lock);
	bool here = !rules[place].device[0] || !strcmp(rules[place].device, device);
	int error = here && amount >= rules[place].amount ? rules[place].error : 0;
	pthread_mutex_unlock(&rules_lock);
	return error;
}
