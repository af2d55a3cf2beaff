/* Memory windows. Type 1 is bound by ibv_bind_mw and gets a new key each time; type 2 is bound by a work request, with a tag
 * (the key's low 8 bits) that the program chooses, to one QP (2B). A window keeps its region from being deregistered. */
#include <errno.h>
#include <stdlib.h>
#include "verbs/internal.h"

/* LOCAL_WRITE is accepted and means nothing: windows are for remote requests. */
#define WINDOW_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED)

struct ibv_mw *tp_mw_alloc(struct ibv_pd *pd, enum ibv_mw_type type)
{
	if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2) {
		errno = EINVAL;
		return NULL;
	}
	struct tp_mw *mw = tp_alloc(1, sizeof(*mw), "a memory window");
	uint32_t value;
	if (mw && !(mw->key = tp_key_alloc(type == IBV_MW_TYPE_1 ? TP_KEY_MW1 : TP_KEY_MW2, &value))) {
		free(mw);
		mw = NULL;
	}
	if (!mw) {
		errno = ENOMEM;
		return NULL;
	}
	mw->ibv = (struct ibv_mw){ .context = pd->context, .pd = pd, .rkey = value, .handle = TP_KEY_PLACE(value), .type = type };
	mw->key->pd = tp_pd_of(pd)->id;
	atomic_fetch_add_explicit(&tp_pd_of(pd)->users, 1, memory_order_relaxed);
	return &mw->ibv;
}

/* Only one thread at a time binds or invalidates a window. */
static pthread_mutex_t window_lock = PTHREAD_MUTEX_INITIALIZER;

void tp_mw_forget(void) { pthread_mutex_init(&window_lock, NULL); }

/* window_lock is held. */
static void unbind(struct tp_key *key)
{
	if (!atomic_load_explicit(&key->key, memory_order_relaxed))
		return;
	tp_key_revoke(key);
	struct tp_key *region = tp_key_at(key->parent << 8);
	atomic_fetch_sub_explicit(&region->windows, 1, memory_order_release);
	key->parent = 0;
}

int tp_mw_dealloc(struct ibv_mw *ibv)
{
	struct tp_mw *mw = (struct tp_mw *)ibv;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	pthread_mutex_lock(&window_lock);
	unbind(mw->key);
	pthread_mutex_unlock(&window_lock);
	tp_key_free(mw->key);
	atomic_fetch_sub_explicit(&tp_pd_of(ibv->pd)->users, 1, memory_order_release);
	free(mw);
	return 0;
}

/* Does the region allow this window? */
static bool region_allows(const struct tp_mw *mw, const struct ibv_mw_bind_info *info)
{
	struct tp_mr *mr = (struct tp_mr *)info->mr;
	const struct tp_key *region = mr->key;
	uint64_t offset = info->addr - region->iova;
	if (mr->key->pd != mw->key->pd || !(region->access & IBV_ACCESS_MW_BIND))
		return false;
	if ((info->mw_access_flags & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(region->access & IBV_ACCESS_LOCAL_WRITE))
		return false;
	return info->addr >= region->iova && offset <= region->length && info->length <= region->length - offset;
}

static enum ibv_wc_status bind_locked(struct tp_qp *qp, struct tp_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct tp_key *key = mw->key;
	if (mw->key->pd != qp->pd->id || (info->mw_access_flags & ~(unsigned)WINDOW_ACCESS))
		return IBV_WC_MW_BIND_ERR;
	if (mw->ibv.type == IBV_MW_TYPE_2 && ((rkey ^ mw->ibv.rkey) >> 8 || !info->length ||
		atomic_load_explicit(&key->key, memory_order_relaxed)))
		return IBV_WC_MW_BIND_ERR;
	if (info->length && (!info->mr || !region_allows(mw, info)))
		return IBV_WC_MW_BIND_ERR;
	unbind(key);
	if (!info->length)
		return IBV_WC_SUCCESS;
	struct tp_mr *mr = (struct tp_mr *)info->mr;
	atomic_fetch_add_explicit(&mr->key->windows, 1, memory_order_relaxed);
	key->parent = mr->ibv.handle;
	key->access = info->mw_access_flags & (unsigned)WINDOW_ACCESS;
	key->iova = info->mw_access_flags & IBV_ACCESS_ZERO_BASED ? 0 : info->addr;
	key->length = info->length;
	key->addr = mr->key->addr + (info->addr - mr->key->iova);
	key->flags = mr->key->flags;
	key->region = mr->key->region;
	key->qpn = qp->ibv.qp_num;
	tp_key_publish(key, rkey);
	return IBV_WC_SUCCESS;
}

enum ibv_wc_status tp_mw_bind(struct tp_qp *qp, const struct tp_wqe *wqe)
{
	pthread_mutex_lock(&window_lock);
	enum ibv_wc_status status = bind_locked(qp, wqe->bind.mw, wqe->bind.rkey, &wqe->bind.info);
	pthread_mutex_unlock(&window_lock);
	return status;
}

/* Finds the bound type 2 window of the QP (0: of any) and invalidates it. */
static int invalidate(uint32_t qpn, uint32_t pd, uint32_t rkey)
{
	struct tp_key *key = tp_key_at(rkey);
	int error = EINVAL;
	pthread_mutex_lock(&window_lock);
	if (key && rkey && atomic_load_explicit(&key->key, memory_order_relaxed) == rkey && key->kind == TP_KEY_MW2 && key->pd == pd &&
		key->qpn == qpn) {
		unbind(key);
		error = 0;
	}
	pthread_mutex_unlock(&window_lock);
	return error;
}

enum ibv_wc_status tp_mw_invalidate_local(struct tp_qp *qp, uint32_t rkey)
{
	return invalidate(qp->ibv.qp_num, qp->pd->id, rkey) ? IBV_WC_MW_BIND_ERR : IBV_WC_SUCCESS;
}

int tp_mw_invalidate_remote(struct tp_qp *qp, uint32_t rkey)
{
	return invalidate(qp->ibv.qp_num, qp->pd->id, rkey);
}

int tp_mw_bind_post(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	/* Type 1: the new key is valid as soon as the call returns, though the binding comes in its turn in the send queue. */
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	struct ibv_send_wr wr = { .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = bind->send_flags, .bind_mw = { .mw = mw, .rkey = rkey,
		.bind_info = bind->bind_info } }, *bad;
	if (bind->bind_info.length && (!bind->bind_info.mr || bind->bind_info.mw_access_flags & ~(unsigned)WINDOW_ACCESS))
		return EINVAL;
	int error = tp_qp_post_send(qp, &wr, &bad);
	if (!error)
		mw->rkey = rkey;
	return error;
}
