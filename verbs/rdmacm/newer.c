/* Calls of newer versions, under headers of any age: addresses resolved by an id, and events that a program writes itself. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/rdmacm/cm.h"

/* RDMA_CM_EVENT_*, RAI_SA */
enum { ADDRINFO_RESOLVED = 16, ADDRINFO_ERROR, WRITTEN_BY_USER, WRITTEN_INTERNALLY };
enum { ASK_SUBNET = 0x10 };

int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service, const struct rdma_addrinfo *hints);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **out);
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg);

int rdma_resolve_addrinfo(struct rdma_cm_id *pub, const char *node, const char *service, const struct rdma_addrinfo *hints)
{
	struct cm_id *id = cm_of(pub);
	struct rdma_addrinfo *found = NULL;
	/* RoCE has no subnet administrator to ask. */
	if (hints && (hints->ai_flags & ASK_SUBNET))
		return cm_fail(EOPNOTSUPP);
	if (!node && !service)
		return cm_fail(EINVAL);
	int error = rdma_getaddrinfo(node, service, hints, &found);
	pthread_mutex_lock(&cm_lock);
	struct rdma_addrinfo *before = id->resolved;
	id->resolved = error ? NULL : found;
	cm_raise_locked(id, NULL, (enum rdma_cm_event_type)(error ? ADDRINFO_ERROR : ADDRINFO_RESOLVED), error ? -ENOENT : 0, NULL, NULL);
	pthread_mutex_unlock(&cm_lock);
	rdma_freeaddrinfo(before);
	return cm_complete(id);
}

static void *copy(const void *from, size_t bytes, bool *good)
{
	void *made = from ? malloc(bytes) : NULL;
	if (made)
		memcpy(made, from, bytes);
	*good &= !from || made;
	return made;
}

int rdma_query_addrinfo(struct rdma_cm_id *pub, struct rdma_addrinfo **out)
{
	struct rdma_addrinfo *first = NULL, **last = &first;
	bool good = true;
	pthread_mutex_lock(&cm_lock);
	const struct rdma_addrinfo *all = cm_of(pub)->resolved;
	for (const struct rdma_addrinfo *each = all; each && good; each = each->ai_next) {
		struct rdma_addrinfo *made = copy(each, sizeof(*each), &good);
		if (!made)
			break;
		made->ai_next = NULL;
		made->ai_src_addr = copy(each->ai_src_addr, each->ai_src_len, &good);
		made->ai_dst_addr = copy(each->ai_dst_addr, each->ai_dst_len, &good);
		*last = made;
		last = &made->ai_next;
	}
	pthread_mutex_unlock(&cm_lock);
	if (!good || !all) {
		rdma_freeaddrinfo(first);
		return cm_fail(all ? ENOMEM : ENOENT);
	}
	*out = first;
	return 0;
}

int rdma_write_cm_event(struct rdma_cm_id *pub, enum rdma_cm_event_type event, int status, uint64_t arg)
{
	struct cm_id *id = cm_of(pub);
	if ((int)event != WRITTEN_BY_USER && (int)event != WRITTEN_INTERNALLY)
		return cm_fail(EINVAL);
	pthread_mutex_lock(&cm_lock);
	cm_raise_written_locked(id, event, status, arg);
	pthread_mutex_unlock(&cm_lock);
	return 0;
}
