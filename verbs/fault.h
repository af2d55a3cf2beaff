/* Faults on demand: what goes wrong, where, how often, from which seed. The objects ask at the few places named here; the wire
 * asks for each packet (wire_fault.h). With no fault set a question is one load. */
#ifndef TP_VERBS_FAULT_H
#define TP_VERBS_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tp_fault_place {
	TP_FAULT_OPEN,              /* ibv_open_device: fails with the errno */
	TP_FAULT_MISSING,           /* ibv_get_device_list: leaves the device out */
	TP_FAULT_MEMLOCK,           /* ibv_reg_mr: ENOMEM where more bytes than so many would be registered */
	TP_FAULT_CQ,                /* a CQ error at the n-th completion */
	TP_FAULT_PROTECTION,        /* a local protection error, as ACS causes it */
	TP_FAULT_DOWN,              /* the port's state */
	TP_FAULT_SCATTER,           /* a WRITE's packets land in another order than they came, its immediate last */
	TP_FAULT_PLACES
};
/* Where a rule strikes: on device (NULL or "": any), where amount is at least so much, with this chance of each time (0: always);
 * error 0 ends it. */
struct tp_fault_rule { char device[64]; uint64_t amount; double rate; int error; };
void tp_fault_set(enum tp_fault_place place, const struct tp_fault_rule *rule, uint64_t seed);
/* 0, or the errno (or 1) of the fault that strikes now. amount: bytes or a count where that matters. */
int tp_fault_strikes(enum tp_fault_place place, const char *device, uint64_t amount);
/* A number below limit, from the place's seed. */
uint64_t tp_fault_draw(enum tp_fault_place place, uint64_t limit);
extern _Atomic uint32_t tp_fault_any;   /* bits of places that have a fault */
static inline bool tp_fault_on(enum tp_fault_place place) { return atomic_load_explicit(&tp_fault_any, memory_order_relaxed) >> place & 1; }
static inline int tp_fault(enum tp_fault_place place, const char *device, uint64_t amount)
{
	return tp_fault_on(place) ? tp_fault_strikes(place, device, amount) : 0;
}

/* fault_text.c: rules as a user writes them, of objects and packets: "drop=0.01,memlock=64K,seed=7"; "", "none": nothing. They
 * replace those that were. 0 or EINVAL, logged with what was found; then nothing changes. */
int tp_fault_text_set(const char *text);
void tp_fault_text_get(char *out, size_t bytes);    /* those that strike now, "none" */
/* From TELPHER_VERBS_FAULT: those of objects, before the first device; those of packets, at the first QP. */
void tp_fault_objects_from_environment(void);
void tp_fault_packets_from_environment(void);

#endif
