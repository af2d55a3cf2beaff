/* An opened device: the tables of operations through which the headers' inline functions call us. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "verbs/fault.h"
#include "verbs/internal.h"

static struct tp_context *all_contexts;     /* under tp_card_lock */

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t bytes)
{
	return tp_query_port(context, port, attr, bytes);
}

static int compat_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	/* The structure of old ended before port_cap_flags2. */
	return tp_query_port(context, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

static int compat_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	struct ibv_device_attr_ex wide;
	tp_query_device(tp_device_of(context), &wide);
	*attr = wide.orig_attr;
	return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr,
	size_t bytes)
{
	struct ibv_device_attr_ex wide;
	if (input && input->comp_mask)
		return EINVAL;
	tp_query_device(tp_device_of(context), &wide);
	memset(attr, 0, bytes);
	memcpy(attr, &wide, TP_MIN(bytes, sizeof(wide)));
	return 0;
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	uint32_t wanted = values->comp_mask;
	values->comp_mask = 0;
	if (wanted & IBV_VALUES_MASK_RAW_CLOCK) {
		clock_gettime(CLOCK_MONOTONIC, &values->raw_clock);
		values->comp_mask |= IBV_VALUES_MASK_RAW_CLOCK;
	}
	return 0;
}

static void fill_ops(struct verbs_context *verbs)
{
	struct ibv_context_ops *ops = &verbs->context.ops;
	ops->_compat_query_device = compat_query_device;
	ops->_compat_query_port = compat_query_port;
	ops->alloc_mw = tp_mw_alloc;
	ops->bind_mw = tp_mw_bind_post;
	ops->dealloc_mw = tp_mw_dealloc;
	ops->poll_cq = tp_cq_poll;
	ops->req_notify_cq = tp_cq_notify;
	ops->post_srq_recv = tp_srq_post;
	ops->post_send = tp_qp_post_send;
	ops->post_recv = tp_qp_post_recv;

	verbs->query_port = query_port;
	verbs->advise_mr = tp_mr_advise;
	verbs->alloc_null_mr = tp_mr_alloc_null;
	verbs->alloc_parent_domain = tp_pd_alloc_parent;
	verbs->dealloc_td = tp_td_dealloc;
	verbs->alloc_td = tp_td_alloc;
	verbs->modify_cq = tp_cq_modify;
	verbs->query_rt_values = query_rt_values;
	verbs->create_cq_ex = tp_cq_create_ex;
	verbs->query_device_ex = query_device_ex;
	verbs->open_qp = tp_qp_open;
	verbs->create_qp_ex = tp_qp_create;
	verbs->get_srq_num = tp_srq_number;
	verbs->create_srq_ex = tp_srq_create_ex;
	verbs->open_xrcd = tp_xrcd_open;
	verbs->close_xrcd = tp_xrcd_close;
	verbs->sz = sizeof(*verbs);
	verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
}

struct ibv_context *tp_context_open(struct tp_device *device)
{
	int error = tp_fault(TP_FAULT_OPEN, device->ibv.name, 0);
	struct tp_context *context = error ? NULL : tp_alloc(1, sizeof(*context), "a device's context");
	if (!context) {
		errno = error ? error : ENOMEM;
		return NULL;
	}
	struct ibv_context *ibv = &context->verbs.context;
	fill_ops(&context->verbs);
	ibv->device = &device->ibv;
	ibv->num_comp_vectors = TP_MAX(1, tp_cpu_count());
	pthread_mutex_init(&ibv->mutex, NULL);
	pthread_mutex_init(&context->event_lock, NULL);
	pthread_cond_init(&context->event_cond, NULL);
	context->events_end = &context->events;
	context->generation = atomic_load_explicit(&tp_card_generation, memory_order_relaxed);
	ibv->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	/* Programs look at cmd_fd only to see that it is one. */
	ibv->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (ibv->async_fd < 0 || ibv->cmd_fd < 0) {
		error = errno;
		TP_WARN("%s can't be opened: no descriptors (%s)", device->ibv.name, strerror(error));
		if (ibv->async_fd >= 0)
			close(ibv->async_fd);
		free(context);
		errno = error;
		return NULL;
	}
	pthread_mutex_lock(&tp_card_lock);
	context->next = all_contexts;
	all_contexts = context;
	pthread_mutex_unlock(&tp_card_lock);
	tp_note_opened();
	return ibv;
}

int tp_context_close(struct tp_context *context)
{
	if (!tp_context_mine(&context->verbs.context)) {
		/* A forked child: its copies of the descriptors go, the rest stays, inert. */
		close(context->verbs.context.async_fd);
		close(context->verbs.context.cmd_fd);
		return 0;
	}
	pthread_mutex_lock(&tp_card_lock);
	for (struct tp_context **at = &all_contexts; *at; at = &(*at)->next)
		if (*at == context) {
			*at = context->next;
			break;
		}
	pthread_mutex_unlock(&tp_card_lock);
	int left = atomic_load_explicit(&context->objects, memory_order_relaxed);
	if (left)
		TP_INFO(TP_NET, "%s was closed with %d of its objects still alive", context->verbs.context.device->name, left);
	for (struct tp_event *event = context->events, *next; event; event = next) {
		next = event->next;
		free(event);
	}
	close(context->verbs.context.async_fd);
	close(context->verbs.context.cmd_fd);
	/* Objects that the program leaves behind may still name their context from another thread. */
	if (!left)
		free(context);
	return 0;
}

bool tp_context_mine(struct ibv_context *context)
{
	return tp_context_of(context)->generation == atomic_load_explicit(&tp_card_generation, memory_order_relaxed);
}

void tp_event_port(struct tp_port *port, enum ibv_event_type type)
{
	pthread_mutex_lock(&tp_card_lock);
	for (struct tp_context *context = all_contexts; context; context = context->next) {
		if (context->verbs.context.device != &port->device->ibv || !tp_context_mine(&context->verbs.context))
			continue;
		struct ibv_async_event event = { .element.port_num = port->number, .event_type = type };
		tp_event_queue(context, &event, NULL);
	}
	pthread_mutex_unlock(&tp_card_lock);
}
