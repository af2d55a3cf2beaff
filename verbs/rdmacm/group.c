/* Multicast groups of an id: joined at once, since the card's wire needs no subnet manager; the QP is attached to the group's GID. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/rdmacm/cm.h"

#define UDP_QKEY 0x01234567u
#define MULTICAST_QPN 0xffffffu

struct cm_group { struct cm_group *next; struct sockaddr_storage addr; union ibv_gid gid; uint32_t qpn /* attached; 0: none */; };

/* The QP may have been destroyed without us, and has left its groups then. */
static int detach(const struct cm_group *group)
{
	struct ibv_qp *qp = group->qpn ? tp_card_inner_qp_hold(group->qpn) : NULL;
	int error = qp ? ibv_detach_mcast(qp, &group->gid, 0) : 0;
	if (qp)
		tp_card_inner_qp_let_go(qp);
	return error;
}

/* ff0e::ffff:a.b.c.d for IPv4. */
static int gid_of_group(const struct sockaddr *addr, union ibv_gid *gid)
{
	cm_gid_of(addr, gid);
	if (addr->sa_family == AF_INET && (gid->raw[12] & 0xf0) == 0xe0) {
		gid->raw[0] = 0xff;
		gid->raw[1] = 0x0e;
		return 0;
	}
	return addr->sa_family == AF_INET6 && gid->raw[0] == 0xff ? 0 : EINVAL;
}

static int join(struct cm_id *id, const struct sockaddr *addr, bool receives, void *context)
{
	union ibv_gid gid;
	if (!id->pub.verbs || !id->ud || !addr || gid_of_group(addr, &gid))
		return EINVAL;
	struct cm_group *group = calloc(1, sizeof(*group));
	if (!group)
		return ENOMEM;
	memcpy(&group->addr, addr, addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
	group->gid = gid;
	group->qpn = receives && id->pub.qp ? id->pub.qp->qp_num : 0;
	int error = group->qpn ? ibv_attach_mcast(id->pub.qp, &gid, 0) : 0;
	if (error) {
		free(group);
		return error;
	}
	struct rdma_ud_param ud = { .qp_num = MULTICAST_QPN, .qkey = UDP_QKEY, .ah_attr = { .is_global = 1, .port_num = id->pub.port_num,
		.grh = { .dgid = gid, .sgid_index = id->sgid_index, .hop_limit = 1, .traffic_class = id->tos } } };
	pthread_mutex_lock(&cm_lock);
	group->next = id->groups;
	id->groups = group;
	cm_raise_joined_locked(id, &ud, context);
	pthread_mutex_unlock(&cm_lock);
	return 0;
}

int rdma_join_multicast(struct rdma_cm_id *pub, struct sockaddr *addr, void *context)
{
	int error = join(cm_of(pub), addr, true, context);
	return error ? cm_fail(error) : cm_complete(cm_of(pub));
}

int rdma_join_multicast_ex(struct rdma_cm_id *pub, struct rdma_cm_join_mc_attr_ex *attr, void *context)
{
	if (attr->comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED || !(attr->comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS) ||
		!(attr->comp_mask & RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS) || attr->join_flags >= RDMA_MC_JOIN_FLAG_RESERVED)
		return cm_fail(EINVAL);
	int error = join(cm_of(pub), attr->addr, attr->join_flags != RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, context);
	return error ? cm_fail(error) : cm_complete(cm_of(pub));
}

static bool same(const struct sockaddr_storage *a, const struct sockaddr *b)
{
	union ibv_gid x, y;
	cm_gid_of((const struct sockaddr *)(const void *)a, &x);
	cm_gid_of(b, &y);
	return !memcmp(&x, &y, sizeof(x));
}

int rdma_leave_multicast(struct rdma_cm_id *pub, struct sockaddr *addr)
{
	struct cm_id *id = cm_of(pub);
	struct cm_group *found = NULL;
	pthread_mutex_lock(&cm_lock);
	for (struct cm_group **at = &id->groups; *at && !found; at = &(*at)->next)
		if (same(&(*at)->addr, addr)) {
			found = *at;
			*at = found->next;
			break;
		}
	pthread_mutex_unlock(&cm_lock);
	if (!found)
		return cm_fail(EADDRNOTAVAIL);
	int error = detach(found);
	free(found);
	return error ? cm_fail(error) : 0;
}

void cm_forget_groups(struct cm_id *id)
{
	for (struct cm_group *group = id->groups, *next; group; group = next) {
		next = group->next;
		detach(group);
		free(group);
	}
	id->groups = NULL;
}
