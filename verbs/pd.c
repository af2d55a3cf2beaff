/* Protection domains, parent domains and thread domains. A parent domain stands for its real one: keys and QPs made on either
 * belong together. A parent domain's allocators are accepted and never called: they are for queues that a device must reach. */
#include <errno.h>
#include <stdlib.h>
#include "verbs/control.h"
#include "verbs/internal.h"

static _Atomic uint32_t last_id;

static struct tp_pd *make(struct ibv_context *context)
{
	struct tp_pd *pd = tp_alloc(1, sizeof(*pd), "a protection domain");
	if (!pd) {
		errno = ENOMEM;
		return NULL;
	}
	pd->ibv.context = context;
	atomic_fetch_add_explicit(&tp_context_of(context)->objects, 1, memory_order_relaxed);
	return pd;
}

struct ibv_pd *tp_pd_alloc(struct ibv_context *context)
{
	struct tp_pd *pd = make(context);
	if (!pd)
		return NULL;
	pd->id = atomic_fetch_add_explicit(&last_id, 1, memory_order_relaxed) + 1;
	pd->ibv.handle = pd->id;
	tp_control_start();         /* whoever merely looks at a device needs no thread */
	return &pd->ibv;
}

int tp_pd_dealloc(struct ibv_pd *ibv)
{
	struct tp_pd *pd = tp_pd_of(ibv);
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	int users = atomic_load_explicit(&pd->users, memory_order_acquire);
	if (users)
		return TP_CARD_FAIL(EBUSY, "a protection domain can't go while %d objects belong to it", users);
	if (pd->parent)
		atomic_fetch_sub_explicit(&pd->parent->users, 1, memory_order_release);
	if (pd->td)
		atomic_fetch_sub_explicit(&pd->td->users, 1, memory_order_release);
	atomic_fetch_sub_explicit(&tp_context_of(ibv->context)->objects, 1, memory_order_relaxed);
	free(pd);
	return 0;
}

struct ibv_pd *tp_pd_alloc_parent(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr)
{
	const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	if (!attr->pd || (attr->comp_mask & ~known)) {
		errno = TP_CARD_FAIL(EINVAL, "a parent domain needs a protection domain and no flags but 0x%x (has 0x%x)", known, attr->comp_mask);
		return NULL;
	}
	struct tp_pd *parent = tp_pd_of(attr->pd), *pd = make(context);
	if (!pd)
		return NULL;
	parent = parent->parent ? parent->parent : parent;
	pd->parent = parent;
	pd->id = parent->id;
	pd->ibv.handle = parent->ibv.handle;
	atomic_fetch_add_explicit(&parent->users, 1, memory_order_relaxed);
	if (attr->td) {
		pd->td = (struct tp_td *)attr->td;
		atomic_fetch_add_explicit(&pd->td->users, 1, memory_order_relaxed);
	}
	return &pd->ibv;
}

struct ibv_td *tp_td_alloc(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	if (attr->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	struct tp_td *td = tp_alloc(1, sizeof(*td), "a thread domain");
	if (!td) {
		errno = ENOMEM;
		return NULL;
	}
	td->ibv.context = context;
	return &td->ibv;
}

int tp_td_dealloc(struct ibv_td *ibv)
{
	struct tp_td *td = (struct tp_td *)ibv;
	int users = atomic_load_explicit(&td->users, memory_order_acquire);
	if (users)
		return TP_CARD_FAIL(EBUSY, "a thread domain can't go while %d parent domains use it", users);
	free(td);
	return 0;
}
