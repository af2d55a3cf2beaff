/* Faults on demand: what goes wrong, where, how often, from which seed. The objects ask at the few places named here; the wire
 * asks for each packet. With no fault set a question is one load. */
#ifndef TP_VERBS_FAULT_H
#define TP_VERBS_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum tp_fault_place {
	TP_FAULT_OPEN,              /* ibv_open_device: fails with the errno */
	TP_FAULT_MISSING,           /* ibv_get_device_list: leaves the device out */
	TP_FAULT_MEMLOCK,           /* ibv_reg_mr: ENOMEM from so many bytes on */
	TP_FAULT_CQ,                /* a CQ error at the n-th completion */
	TP_FAULT_PROTECTION,        /* a local protection error, as ACS causes it */
	TP_FAULT_PLACES
};
/* From now on place strikes with error on device (NULL: any) where amount is at least so much; error 0 ends it. */
void tp_fault_set(enum tp_fault_place place, const char *device, uint64_t amount, int error);
/* 0, or the errno (or 1) of the fault that strikes now. amount: bytes where that matters. */
int tp_fault_strikes(enum tp_fault_place place, const char *device, uint64_t amount);
extern _Atomic uint32_t tp_fault_any;   /* bits of places that have a fault */
static inline int tp_fault(enum tp_fault_place place, const char *device, uint64_t amount)
{
	return atomic_load_explicit(&tp_fault_any, memory_order_relaxed) >> place & 1 ? tp_fault_strikes(place, device, amount) : 0;
}

#endif
