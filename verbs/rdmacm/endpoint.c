/* Names, endpoints, options: what stands above ids. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/rdma_verbs.h>
#include "verbs/rdmacm/cm.h"

const char *rdma_event_str(enum rdma_cm_event_type event)
{
	static const char *const names[] = { "RDMA_CM_EVENT_ADDR_RESOLVED", "RDMA_CM_EVENT_ADDR_ERROR", "RDMA_CM_EVENT_ROUTE_RESOLVED",
		"RDMA_CM_EVENT_ROUTE_ERROR", "RDMA_CM_EVENT_CONNECT_REQUEST", "RDMA_CM_EVENT_CONNECT_RESPONSE", "RDMA_CM_EVENT_CONNECT_ERROR",
		"RDMA_CM_EVENT_UNREACHABLE", "RDMA_CM_EVENT_REJECTED", "RDMA_CM_EVENT_ESTABLISHED", "RDMA_CM_EVENT_DISCONNECTED",
		"RDMA_CM_EVENT_DEVICE_REMOVAL", "RDMA_CM_EVENT_MULTICAST_JOIN", "RDMA_CM_EVENT_MULTICAST_ERROR", "RDMA_CM_EVENT_ADDR_CHANGE",
		"RDMA_CM_EVENT_TIMEWAIT_EXIT", "RDMA_CM_EVENT_ADDRINFO_RESOLVED", "RDMA_CM_EVENT_ADDRINFO_ERROR", "RDMA_CM_EVENT_USER",
		"RDMA_CM_EVENT_INTERNAL" };
	return (unsigned)event < sizeof(names) / sizeof(names[0]) ? names[event] : "UNKNOWN EVENT";
}

struct ibv_context **rdma_get_devices(int *count)
{
	int found;
	struct ibv_context **devices = cm_devices(&found), **list = calloc((size_t)found + 1, sizeof(*list));
	if (list)
		memcpy(list, devices, (size_t)found * sizeof(*list));
	if (count)
		*count = list ? found : 0;
	return list;
}

void rdma_free_devices(struct ibv_context **list) { free(list); }

/* ---- names ---- */

void rdma_freeaddrinfo(struct rdma_addrinfo *info)
{
	for (struct rdma_addrinfo *next; info; info = next) {
		next = info->ai_next;
		free(info->ai_src_addr);
		free(info->ai_dst_addr);
		free(info->ai_dst_canonname);
		free(info->ai_src_canonname);
		free(info);
	}
}

static struct sockaddr *copy_addr(const struct sockaddr *addr, socklen_t bytes)
{
	struct sockaddr *copy = calloc(1, sizeof(struct sockaddr_storage));
	if (copy)
		memcpy(copy, addr, bytes);
	return copy;
}

static struct rdma_addrinfo *convert(const struct addrinfo *found, const struct rdma_addrinfo *hints, bool passive)
{
	struct rdma_addrinfo *info = calloc(1, sizeof(*info));
	if (!info)
		return NULL;
	info->ai_flags = hints ? hints->ai_flags : 0;
	info->ai_family = found->ai_family;
	info->ai_port_space = hints && hints->ai_port_space ? hints->ai_port_space : RDMA_PS_TCP;
	info->ai_qp_type = hints && hints->ai_qp_type ? hints->ai_qp_type : info->ai_port_space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
	if (hints && !hints->ai_port_space && hints->ai_qp_type == IBV_QPT_UD)
		info->ai_port_space = RDMA_PS_UDP;
	struct sockaddr *addr = copy_addr(found->ai_addr, found->ai_addrlen);
	if (passive) {
		info->ai_src_addr = addr;
		info->ai_src_len = found->ai_addrlen;
	} else {
		info->ai_dst_addr = addr;
		info->ai_dst_len = found->ai_addrlen;
		if (hints && hints->ai_src_len && hints->ai_src_len <= sizeof(struct sockaddr_storage)) {
			info->ai_src_addr = copy_addr(hints->ai_src_addr, hints->ai_src_len);
			info->ai_src_len = hints->ai_src_len;
		}
	}
	if (!addr) {
		rdma_freeaddrinfo(info);
		return NULL;
	}
	return info;
}

int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **out)
{
	int flags = hints ? hints->ai_flags : 0;
	bool passive = flags & RAI_PASSIVE;
	struct addrinfo wanted = { .ai_socktype = hints && hints->ai_port_space == RDMA_PS_UDP ? SOCK_DGRAM : SOCK_STREAM,
		.ai_flags = (passive ? AI_PASSIVE : 0) | (flags & RAI_NUMERICHOST ? AI_NUMERICHOST : 0),
		.ai_family = flags & RAI_FAMILY ? hints->ai_family : AF_UNSPEC }, *found = NULL;
	struct rdma_addrinfo *first = NULL, **last = &first;
	if (!node && !service && !(hints && (hints->ai_src_len || hints->ai_dst_len)))
		return cm_fail(EINVAL);
	if (!node && !service) {
		const struct sockaddr *addr = passive || !hints->ai_dst_len ? hints->ai_src_addr : hints->ai_dst_addr;
		struct addrinfo given = { .ai_family = addr->sa_family, .ai_addr = (struct sockaddr *)(uintptr_t)addr,
			.ai_addrlen = passive || !hints->ai_dst_len ? hints->ai_src_len : hints->ai_dst_len };
		*out = convert(&given, hints, passive);
		return *out ? 0 : cm_fail(ENOMEM);
	}
	int error = getaddrinfo(node, service, &wanted, &found);
	if (error)
		return error;
	for (struct addrinfo *each = found; each; each = each->ai_next)
		if ((*last = convert(each, hints, passive)) != NULL)
			last = &(*last)->ai_next;
	freeaddrinfo(found);
	*out = first;
	return first ? 0 : cm_fail(ENOMEM);
}

/* ---- endpoints ---- */

int rdma_create_ep(struct rdma_cm_id **out, struct rdma_addrinfo *info, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *id;
	if (rdma_create_id(NULL, &id, NULL, (enum rdma_port_space)info->ai_port_space))
		return -1;
	id->qp_type = (enum ibv_qp_type)info->ai_qp_type;
	int result;
	if (info->ai_flags & RAI_PASSIVE) {
		struct ibv_qp_init_attr *kept = attr ? malloc(sizeof(*attr)) : NULL;
		if (kept)
			*kept = *attr;
		cm_of(id)->for_requests = kept;
		id->pd = pd;
		result = attr && !kept ? cm_fail(ENOMEM) : rdma_bind_addr(id, info->ai_src_addr);
	} else {
		result = rdma_resolve_addr(id, info->ai_src_addr, info->ai_dst_addr, 2000);
		if (!result)
			result = rdma_resolve_route(id, 2000);
		if (!result && attr) {
			attr->qp_type = id->qp_type;
			result = rdma_create_qp(id, pd, attr);
		}
	}
	if (result) {
		int error = errno;
		rdma_destroy_ep(id);
		return cm_fail(error);
	}
	*out = id;
	return 0;
}

void rdma_destroy_ep(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	if (id->srq)
		rdma_destroy_srq(id);
	rdma_destroy_id(id);
}

int rdma_get_request(struct rdma_cm_id *listener, struct rdma_cm_id **out)
{
	struct rdma_cm_event *event;
	if (!cm_of(listener)->sync)
		return cm_fail(EINVAL);
	if (listener->event) {
		rdma_ack_cm_event(listener->event);
		listener->event = NULL;
	}
	if (rdma_get_cm_event(listener->channel, &event))
		return -1;
	struct rdma_cm_id *id = event->id;
	int error = event->event != RDMA_CM_EVENT_CONNECT_REQUEST ? EINVAL : event->status;
	if (!error && rdma_migrate_id(id, NULL))
		error = errno;
	if (!error && cm_of(listener)->for_requests) {
		struct ibv_qp_init_attr attr = *cm_of(listener)->for_requests;
		attr.qp_type = listener->qp_type;
		if (rdma_create_qp(id, listener->pd, &attr))
			error = errno;
	}
	if (error) {
		listener->event = event;
		return cm_fail(error);
	}
	id->event = event;
	*out = id;
	return 0;
}

/* ---- options ---- */

int rdma_set_option(struct rdma_cm_id *pub, int level, int option, void *value, size_t bytes)
{
	struct cm_id *id = cm_of(pub);
	if (level != RDMA_OPTION_ID)
		return cm_fail(ENOSYS);
	switch (option) {
	case RDMA_OPTION_ID_TOS:
		if (bytes != sizeof(uint8_t))
			return cm_fail(EINVAL);
		id->tos = *(uint8_t *)value;
		return 0;
	case RDMA_OPTION_ID_ACK_TIMEOUT:
		if (bytes != sizeof(uint8_t) || *(uint8_t *)value > 31)
			return cm_fail(EINVAL);
		id->ack_timeout = *(uint8_t *)value;
		return 0;
	case RDMA_OPTION_ID_REUSEADDR: case RDMA_OPTION_ID_AFONLY:
		return bytes == sizeof(int) ? 0 : cm_fail(EINVAL);
	default: return cm_fail(ENOSYS);
	}
}

/* The peer's data came before its RTU, which may be lost. */
int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
	if (event != IBV_EVENT_COMM_EST)
		return cm_fail(EINVAL);
	pthread_mutex_lock(&cm_lock);
	cm_established_locked(cm_of(id));
	pthread_mutex_unlock(&cm_lock);
	return 0;
}

/* Enhanced connection establishment negotiates vendors' features: there are none. */
int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	return id && id->qp && ece && !ece->vendor_id && !ece->options ? 0 : cm_fail(EOPNOTSUPP);
}
int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	if (!id || id->qp || !ece)
		return cm_fail(EINVAL);
	memset(ece, 0, sizeof(*ece));
	return 0;
}
int rdma_reject_ece(struct rdma_cm_id *id, const void *data, uint8_t bytes) { return rdma_reject(id, data, bytes); }
