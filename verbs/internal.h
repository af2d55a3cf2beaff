/* What the objects' files share among themselves; carriers and front ends don't need it. */
#ifndef TP_VERBS_INTERNAL_H
#define TP_VERBS_INTERNAL_H

#include "verbs/engine.h"

/* params.c */
enum tp_gid_mode { TP_GIDS_ONE, TP_GIDS_ALL, TP_GIDS_ROCE };
struct tp_card_params {
	const char *devices;            /* a count, or names */
	int ports;
	const char *interfaces, *pci, *numa;
	enum tp_gid_mode gids;
	int mtu;                        /* enum ibv_mtu, 0: by interface */
	int rate_gbps;
	bool down, hide_real;
};
void tp_params_read(struct tp_card_params *out);
/* The n-th of a list with commas, copied into out; false where there are fewer. */
bool tp_params_item(const char *list, int n, char *out, size_t bytes);

/* gid.c: reads the interfaces into port. */
void tp_gid_fill(struct tp_port *port, const struct tp_card_params *params, int rank, int ranks);
/* gid_watch.c: from now on the kernel tells of changes of addresses and links. */
void tp_gid_watch(void);
void tp_gid_watch_forget(void);
/* real.c: warns where a real RDMA device exists. */
void tp_real_warn(void);

/* query.c */
void tp_query_device(struct tp_device *device, struct ibv_device_attr_ex *out);
int tp_query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *out, size_t bytes);
int tp_query_gid_entry(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *out);

/* note.c: tells `telpher verbs run`, if this process is under it, that the card was opened. */
void tp_note_opened(void);

/* context.c, event.c */
struct ibv_context *tp_context_open(struct tp_device *device);
int tp_context_close(struct tp_context *context);
/* Queues a copy; reported: the count of the object that the event is about, NULL for a port. */
void tp_event_queue(struct tp_context *context, const struct ibv_async_event *what, uint32_t *reported);
int tp_event_take(struct tp_context *context, struct ibv_async_event *event);
void tp_event_ack(struct ibv_async_event *event);
/* Takes the object's queued events away, and waits until those handed out were acknowledged. */
void tp_event_drop(struct tp_context *context, const void *object, uint32_t *reported, pthread_mutex_t *mutex, pthread_cond_t *cond,
	uint32_t *completed);
/* True in the process that made the context: a forked child may only close what it inherited. */
bool tp_context_mine(struct ibv_context *context);

/* pd.c */
struct ibv_pd *tp_pd_alloc(struct ibv_context *context);
int tp_pd_dealloc(struct ibv_pd *pd);
struct ibv_pd *tp_pd_alloc_parent(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
struct ibv_td *tp_td_alloc(struct ibv_context *context, struct ibv_td_init_attr *attr);
int tp_td_dealloc(struct ibv_td *td);
static inline struct tp_pd *tp_pd_of(struct ibv_pd *pd) { return (struct tp_pd *)pd; }

/* mr.c, mw.c */
struct ibv_mr *tp_mr_reg(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access);
int tp_mr_dereg(struct ibv_mr *mr);
int tp_mr_rereg(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_mr *tp_mr_alloc_null(struct ibv_pd *pd);
struct ibv_mr *tp_mr_reg_dma_buf(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, unsigned int access);
int tp_mr_advise(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge, uint32_t count);
struct ibv_mw *tp_mw_alloc(struct ibv_pd *pd, enum ibv_mw_type type);
int tp_mw_dealloc(struct ibv_mw *mw);
int tp_mw_bind_post(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
void tp_key_forget(void);       /* the _forget functions: in a forked child */
void tp_mw_forget(void);

/* cq.c, cq_ex.c, channel.c */
struct ibv_cq *tp_cq_create(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector);
int tp_cq_init(struct tp_cq *cq, struct ibv_context *context, uint32_t cqe, void *cq_context, struct ibv_comp_channel *channel, uint32_t vector);
int tp_cq_destroy(struct ibv_cq *cq);
int tp_cq_resize(struct ibv_cq *cq, int cqe);
int tp_cq_poll(struct ibv_cq *cq, int count, struct ibv_wc *wc);
bool tp_cq_take(struct tp_cq *cq, struct tp_cqe *out);
int tp_cq_notify(struct ibv_cq *cq, int solicited_only);
struct ibv_cq_ex *tp_cq_create_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int tp_cq_modify(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
struct ibv_comp_channel *tp_channel_create(struct ibv_context *context);
int tp_channel_destroy(struct ibv_comp_channel *channel);
int tp_channel_get(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void tp_channel_ack(struct ibv_cq *cq, unsigned int count);
void tp_channel_raise(struct tp_channel *channel, struct tp_cq *cq);     /* cq->lock held */
void tp_channel_drop(struct tp_channel *channel, struct tp_cq *cq);

/* ah.c, mcast.c */
struct ibv_ah *tp_ah_create(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int tp_ah_destroy(struct ibv_ah *ah);
int tp_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr);
int tp_mcast_attach(struct ibv_qp *qp, const union ibv_gid *gid);
int tp_mcast_detach(struct ibv_qp *qp, const union ibv_gid *gid);
void tp_mcast_leave_all(struct tp_qp *qp);
void tp_mcast_forget(void);

/* wq.c */
int tp_sq_init(struct tp_sq *sq, struct ibv_qp_cap *cap);
void tp_sq_free(struct tp_sq *sq);
int tp_rq_init(struct tp_rq *rq, uint32_t max_wr, uint32_t max_sge);
void tp_rq_free(struct tp_rq *rq);
struct tp_rwqe *tp_rq_at(struct tp_rq *rq, uint32_t counter);
int tp_rq_post(struct tp_rq *rq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* srq.c, xrc.c */
struct ibv_srq *tp_srq_create(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
struct ibv_srq *tp_srq_create_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int tp_srq_modify(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask);
int tp_srq_query(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int tp_srq_destroy(struct ibv_srq *srq);
int tp_srq_post(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int tp_srq_number(struct ibv_srq *srq, uint32_t *number);
void tp_srq_forget(void);
struct ibv_xrcd *tp_xrcd_open(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int tp_xrcd_close(struct ibv_xrcd *xrcd);

/* qp.c, qp_state.c, post.c, qp_ex.c */
struct ibv_qp *tp_qp_create(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
struct ibv_qp *tp_qp_open(struct ibv_context *context, struct ibv_qp_open_attr *attr);
int tp_qp_destroy(struct ibv_qp *qp);
int tp_qp_modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int tp_qp_query(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init);
int tp_qp_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int tp_qp_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/* Is there a free slot for the count-th request that isn't published yet (from 0)? */
bool tp_sq_room(struct tp_qp *qp, uint32_t count);
/* An opcode that this type of QP can send? Is the request within the limits? 0 or EINVAL. */
int tp_wqe_check(struct tp_qp *qp, const struct tp_wqe *wqe);
/* Data that are posted inline, into the request; 0 or EFAULT. */
int tp_wqe_copy_inline(uint8_t *to, uint64_t from, size_t bytes);
/* Shows count requests to the carrier and runs it; lock held. 0, or EINVAL where the state takes none. */
int tp_sq_publish_locked(struct tp_qp *qp, uint32_t count);
/* This thread runs a send queue because its program has just posted: it may wait a moment for another process. */
extern _Thread_local bool tp_qp_is_posting;
void tp_qp_fill_ops(struct tp_qp *qp);
void tp_qp_forget(void);
/* Is the transition allowed with these attributes? 0 or EINVAL. */
int tp_qp_check_transition(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);
/* After the state changed, or a run ended: stops the carrier and flushes where that is due. */
void tp_qp_settle_locked(struct tp_qp *qp);
/* Stops and detaches the carrier, if there is one; no run is in progress. */
void tp_qp_leave_carrier_locked(struct tp_qp *qp);
/* Gives back what a message that came in half holds. */
void tp_target_forget_locked(struct tp_qp *qp);
static inline struct tp_qp *tp_qp_of(struct ibv_qp *ibv)
{
	struct tp_qp *qp = (struct tp_qp *)ibv;
	return qp->real ? qp->real : qp;
}
static inline bool tp_qp_connected(enum ibv_qp_type type) { return type != IBV_QPT_UD; }
static inline bool tp_qp_reliable(enum ibv_qp_type type) { return type != IBV_QPT_UD && type != IBV_QPT_UC; }

/* progress.c */
void tp_progress_forget(void);
bool tp_progress_is_thread(void);
void tp_progress_start(void);       /* the thread, if it isn't there; failure is logged */
void tp_progress_kick(void);        /* it looks at its timers and descriptors anew */
/* timer.c, for progress.c alone. Runs what is due, and says when the next is; thread: the caller will sleep until then. 0: none. */
uint64_t tp_timers_run(bool thread);
uint64_t tp_timers_next(void);
void tp_timers_forget(void);
/* precedence.c: the progress thread's alone. When it begins; before it sleeps. */
void tp_progress_take_precedence(void);
void tp_progress_keep_precedence(void);
/* linger.c: the progress thread's alone. */
#define TP_LINGER_NS 100000u        /* how long it looks for another packet after the last one */
bool tp_linger_pays(uint64_t now);
bool tp_linger_application_sleeps(uint64_t now);     /* as far as could be seen lately */
void tp_linger_note(uint64_t now);      /* packets came */
void tp_linger_refrain(uint64_t now);   /* somebody else wanted the processor */

#endif
