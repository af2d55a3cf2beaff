/* Multicast groups of UD QPs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

struct tp_mcast {
	struct tp_mcast *next;          /* all of the process, under groups_lock */
	struct tp_qp *qp;
	struct tp_port *port;
	union ibv_gid group;
};

static struct tp_mcast *members;
static pthread_rwlock_t groups_lock = PTHREAD_RWLOCK_INITIALIZER;
void (*tp_engine_group_hook)(struct tp_port *port, const union ibv_gid *group, bool join);

void tp_mcast_forget(void)
{
	pthread_rwlock_init(&groups_lock, NULL);
	members = NULL;
}

static bool is_member(const struct tp_mcast *member, const struct tp_port *port, const union ibv_gid *group)
{
	return member->port == port && !memcmp(&member->group, group, sizeof(*group));
}

static int count_members(const struct tp_port *port, const union ibv_gid *group)
{
	int count = 0;
	for (const struct tp_mcast *at = members; at; at = at->next)
		count += is_member(at, port, group);
	return count;
}

int tp_mcast_attach(struct ibv_qp *ibv, const union ibv_gid *group)
{
	struct tp_qp *qp = tp_qp_of(ibv);
	if (ibv->qp_type != IBV_QPT_UD || group->raw[0] != 0xff)
		return TP_CARD_FAIL(EINVAL, "only UD queue pairs join groups, and a group's GID begins with ff");
	if (!qp->port)
		return TP_CARD_FAIL(EINVAL, "a queue pair joins a group after it got its port (INIT)");
	struct tp_mcast *member = tp_alloc(1, sizeof(*member), "a multicast membership");
	if (!member)
		return ENOMEM;
	member->qp = qp;
	member->port = qp->port;
	member->group = *group;
	pthread_rwlock_wrlock(&groups_lock);
	for (struct tp_mcast *at = members; at; at = at->next)
		if (at->qp == qp && is_member(at, qp->port, group)) {
			pthread_rwlock_unlock(&groups_lock);
			free(member);
			return 0;
		}
	bool first = count_members(qp->port, group) == 0;
	member->next = members;
	members = member;
	if (first && tp_engine_group_hook)
		tp_engine_group_hook(member->port, group, true);
	pthread_rwlock_unlock(&groups_lock);
	return 0;
}

/* Takes the memberships of qp (in group, or all where NULL) away; how many. */
static int leave(struct tp_qp *qp, const union ibv_gid *group)
{
	int left = 0;
	pthread_rwlock_wrlock(&groups_lock);
	for (struct tp_mcast **at = &members; *at;) {
		struct tp_mcast *member = *at;
		if (member->qp != qp || (group && memcmp(&member->group, group, sizeof(*group)))) {
			at = &member->next;
			continue;
		}
		*at = member->next;
		if (tp_engine_group_hook && count_members(member->port, &member->group) == 0)
			tp_engine_group_hook(member->port, &member->group, false);
		free(member);
		left++;
	}
	pthread_rwlock_unlock(&groups_lock);
	return left;
}

int tp_mcast_detach(struct ibv_qp *qp, const union ibv_gid *group) { return leave(tp_qp_of(qp), group) ? 0 : EINVAL; }
void tp_mcast_leave_all(struct tp_qp *qp) { leave(qp, NULL); }

void tp_target_multicast(struct tp_port *port, const union ibv_gid *group, struct tp_qp *sender, const struct tp_datagram *datagram)
{
	pthread_rwlock_rdlock(&groups_lock);
	for (struct tp_mcast *at = members; at; at = at->next) {
		if (!is_member(at, port, group))
			continue;
		if (at->qp == sender && (sender->create_flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB))
			continue;
		tp_counter_add(port, TP_CNT_MULTICAST_RCV, 1);
		tp_target_datagram(at->qp, datagram);
	}
	pthread_rwlock_unlock(&groups_lock);
}
