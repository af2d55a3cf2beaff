/* Faults at the objects: one rule a place. All chance at a place comes from the seed and the order of the questions. */
#include "verbs/fault.h"
#include <pthread.h>
#include <string.h>
#include "base/fork.h"

_Atomic uint32_t tp_fault_any;

static struct { struct tp_fault_rule rule; uint64_t chance; } rules[TP_FAULT_PLACES];
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_HOLD(TP_FORK_BASE, rules_lock)

void tp_fault_set(enum tp_fault_place place, const struct tp_fault_rule *rule, uint64_t seed)
{
	pthread_mutex_lock(&rules_lock);
	rules[place].rule = *rule;
	rules[place].chance = (seed + place) * 0x9e3779b97f4a7c15u + 1;
	if (rule->error)
		atomic_fetch_or_explicit(&tp_fault_any, 1u << place, memory_order_relaxed);
	else
		atomic_fetch_and_explicit(&tp_fault_any, ~(1u << place), memory_order_relaxed);
	pthread_mutex_unlock(&rules_lock);
}

/* splitmix64 */
static uint64_t draw_locked(enum tp_fault_place place)
{
	uint64_t z = rules[place].chance += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

uint64_t tp_fault_draw(enum tp_fault_place place, uint64_t limit)
{
	pthread_mutex_lock(&rules_lock);
	uint64_t value = draw_locked(place) % limit;
	pthread_mutex_unlock(&rules_lock);
	return value;
}

int tp_fault_strikes(enum tp_fault_place place, const char *device, uint64_t amount)
{
	pthread_mutex_lock(&rules_lock);
	const struct tp_fault_rule *rule = &rules[place].rule;
	bool here = !rule->device[0] || !strcmp(rule->device, device);
	int error = here && amount >= rule->amount ? rule->error : 0;
	if (error && rule->rate > 0 && (double)(draw_locked(place) >> 11) * 0x1p-53 >= rule->rate)
		error = 0;
	pthread_mutex_unlock(&rules_lock);
	return error;
}
