/* A port's GID table, made from the addresses of its network interfaces.
 *
 * "one" and "all" list RoCE v2 entries alone; "roce" shows for each address both versions in turn, as a Mellanox port does:
 * link-local v1, link-local v2, then each IPv4 or global IPv6 address as v1 and v2. */
#include <ifaddrs.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "verbs/fault.h"
#include "verbs/internal.h"

void tp_gid_from_addr(const union tp_addr *addr, union ibv_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	if (addr->sa.sa_family == AF_INET6) {
		memcpy(gid->raw, &addr->v6.sin6_addr, 16);
		return;
	}
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &addr->v4.sin_addr, 4);
}

/* ::ffff:a.b.c.d, or ff0e::ffff:a.b.c.d for IPv4 multicast. */
static bool holds_ipv4(const union ibv_gid *gid)
{
	static const uint8_t unicast[12] = { [10] = 0xff, [11] = 0xff }, multicast[12] = { 0xff, 0x0e, [10] = 0xff, [11] = 0xff };
	return !memcmp(gid->raw, unicast, 12) || !memcmp(gid->raw, multicast, 12);
}

void tp_gid_to_addr(const union ibv_gid *gid, uint32_t scope, uint16_t port, union tp_addr *out)
{
	memset(out, 0, sizeof(*out));
	if (holds_ipv4(gid)) {
		out->v4.sin_family = AF_INET;
		out->v4.sin_port = htons(port);
		memcpy(&out->v4.sin_addr, gid->raw + 12, 4);
		return;
	}
	out->v6.sin6_family = AF_INET6;
	out->v6.sin6_port = htons(port);
	memcpy(&out->v6.sin6_addr, gid->raw, 16);
	if (IN6_IS_ADDR_LINKLOCAL(&out->v6.sin6_addr) || IN6_IS_ADDR_MC_LINKLOCAL(&out->v6.sin6_addr))
		out->v6.sin6_scope_id = scope;
}

/* ---- interfaces ---- */

#define MAX_INTERFACES 64
struct interfaces {
	struct ifaddrs *all;
	char names[MAX_INTERFACES][16];
	int count;
};

static bool has_address(const struct ifaddrs *entry)
{
	return entry->ifa_addr && (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6);
}

static void add_name(struct interfaces *set, const char *name)
{
	for (int i = 0; i < set->count; i++)
		if (!strcmp(set->names[i], name))
			return;
	if (set->count < MAX_INTERFACES)
		snprintf(set->names[set->count++], sizeof(set->names[0]), "%.15s", name);
}

/* Those that are up and have an address, IPv4 before IPv6; lo where there is nothing else. */
static void find_interfaces(struct interfaces *set)
{
	static const int families[] = { AF_INET, AF_INET6 };
	for (int loopback = 0; loopback < 2 && !set->count; loopback++)
		for (int f = 0; f < 2; f++)
			for (struct ifaddrs *entry = set->all; entry; entry = entry->ifa_next)
				if (has_address(entry) && entry->ifa_addr->sa_family == families[f] && (entry->ifa_flags & IFF_UP) &&
					!(entry->ifa_flags & IFF_LOOPBACK) == !loopback)
					add_name(set, entry->ifa_name);
}

/* The interfaces of the port that is rank-th among ranks: what the user said, else all for a single port, else one in turn. */
static void choose_interfaces(struct interfaces *set, const struct tp_card_params *params, int rank, int ranks)
{
	char name[16];
	if (params->interfaces && params->interfaces[0]) {
		int first = ranks == 1 ? 0 : rank;
		for (int i = first; tp_params_item(params->interfaces, i, name, sizeof(name)); i++) {
			if (if_nametoindex(name))
				add_name(set, name);
			else
				TP_WARN("TELPHER_VERBS_IFNAME names %s, and there is no such network interface here", name);
			if (ranks > 1)
				break;
		}
		return;
	}
	find_interfaces(set);
	if (ranks > 1 && set->count > 0) {
		memmove(set->names[0], set->names[rank % set->count], sizeof(set->names[0]));
		set->count = 1;
	}
}

static int interface_mtu(const char *name)
{
	struct ifreq request = { 0 };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return 1500;
	snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", name);
	int mtu = ioctl(fd, SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 1500;
	close(fd);
	return mtu;
}

/* The largest RoCE MTU whose packets (IPv6, UDP, longest headers, ICRC) fit. */
static enum ibv_mtu roce_mtu(int interface_bytes)
{
	int payload = interface_bytes - 40 - 8 - 12 - 32 - 4;
	for (int mtu = IBV_MTU_4096; mtu > IBV_MTU_256; mtu--)
		if (128 << mtu <= payload)
			return (enum ibv_mtu)mtu;
	return IBV_MTU_256;
}

/* ---- entries ---- */

static void find_mac(const struct ifaddrs *all, const char *name, uint8_t mac[6])
{
	for (; all; all = all->ifa_next)
		if (all->ifa_addr && all->ifa_addr->sa_family == AF_PACKET && !strcmp(all->ifa_name, name)) {
			const struct sockaddr_ll *link = (const struct sockaddr_ll *)(const void *)all->ifa_addr;
			if (link->sll_halen == 6)
				memcpy(mac, link->sll_addr, 6);
		}
}

static void add_entry(struct tp_port *port, const struct ifaddrs *all, const char *name, const union tp_addr *addr, enum ibv_gid_type type)
{
	if (port->ngids == TP_CARD_GIDS)
		return;
	struct tp_gid *gid = &port->gids[port->ngids++];
	memset(gid, 0, sizeof(*gid));
	tp_gid_from_addr(addr, &gid->gid);
	gid->type = type;
	gid->ifindex = if_nametoindex(name);
	snprintf(gid->ifname, sizeof(gid->ifname), "%s", name);
	gid->addr = *addr;
	find_mac(all, name, gid->mac);
}

static bool is_link_local(const union tp_addr *addr)
{
	return addr->sa.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&addr->v6.sin6_addr);
}

/* Addresses of one interface: link-local ones, IPv4 ones, then the rest. */
enum group { LINK_LOCAL, IPV4, GLOBAL };
static void add_group(struct tp_port *port, const struct ifaddrs *all, const char *name, enum group group, enum tp_gid_mode mode)
{
	for (const struct ifaddrs *entry = all; entry; entry = entry->ifa_next) {
		union tp_addr addr = { 0 };
		if (!has_address(entry) || strcmp(entry->ifa_name, name))
			continue;
		memcpy(&addr, entry->ifa_addr, entry->ifa_addr->sa_family == AF_INET ? sizeof(addr.v4) : sizeof(addr.v6));
		enum group its = addr.sa.sa_family == AF_INET ? IPV4 : is_link_local(&addr) ? LINK_LOCAL : GLOBAL;
		if (its != group)
			continue;
		if (mode == TP_GIDS_ROCE)
			add_entry(port, all, name, &addr, IBV_GID_TYPE_ROCE_V1);
		add_entry(port, all, name, &addr, IBV_GID_TYPE_ROCE_V2);
	}
}

/* Is the interface up and connected? */
static bool is_running(const struct ifaddrs *all, const char *name)
{
	for (; all; all = all->ifa_next)
		if (!strcmp(all->ifa_name, name))
			return (all->ifa_flags & (IFF_UP | IFF_RUNNING)) == (IFF_UP | IFF_RUNNING);
	return false;
}

/* Entries and state from the interfaces that port->ifname names. */
static void read_interfaces(struct tp_port *port, const struct tp_card_params *params, const struct ifaddrs *all)
{
	static const enum group roce_order[] = { LINK_LOCAL, IPV4, GLOBAL }, plain_order[] = { IPV4, GLOBAL, LINK_LOCAL };
	const enum group *order = params->gids == TP_GIDS_ROCE ? roce_order : plain_order;
	int smallest = 65536;
	bool running = false;
	char name[16];
	for (int i = 0; tp_params_item(port->ifname, i, name, sizeof(name)); i++) {
		for (int g = 0; g < 3; g++)
			add_group(port, all, name, order[g], params->gids);
		smallest = TP_MIN(smallest, interface_mtu(name));
		running |= is_running(all, name);
	}
	port->gid_table_len = params->gids == TP_GIDS_ONE ? 1 : TP_CARD_GIDS;
	if (params->gids == TP_GIDS_ONE)
		port->ngids = TP_MIN(port->ngids, 1);
	port->mtu = params->mtu ? (enum ibv_mtu)params->mtu : roce_mtu(smallest);
	bool down = params->down || !running || tp_fault(TP_FAULT_DOWN, port->device->ibv.name, 0);
	atomic_store_explicit(&port->state, down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE, memory_order_relaxed);
}

void tp_gid_fill(struct tp_port *port, const struct tp_card_params *params, int rank, int ranks)
{
	struct interfaces set = { 0 };
	port->gids = tp_alloc(TP_CARD_GIDS, sizeof(*port->gids), "a GID table");
	if (!port->gids || getifaddrs(&set.all)) {
		TP_WARN("the network interfaces can't be read: %m");
		return;
	}
	if (!port->ifname[0])
		choose_interfaces(&set, params, rank, ranks);
	for (int i = 0; i < set.count; i++) {
		size_t used = strlen(port->ifname);
		if (used + strlen(set.names[i]) + 2 <= sizeof(port->ifname))
			snprintf(port->ifname + used, sizeof(port->ifname) - used, "%s%s", used ? "," : "", set.names[i]);
	}
	read_interfaces(port, params, set.all);
	freeifaddrs(set.all);
}

bool tp_port_gid(struct tp_port *port, uint32_t index, struct tp_gid *out)
{
	pthread_rwlock_rdlock(&port->gid_lock);
	bool found = index < (uint32_t)port->ngids && port->gids[index].addr.sa.sa_family;
	if (found)
		*out = port->gids[index];
	pthread_rwlock_unlock(&port->gid_lock);
	return found;
}

int tp_port_find_gid(struct tp_port *port, const union ibv_gid *gid, int type)
{
	int found = -1;
	pthread_rwlock_rdlock(&port->gid_lock);
	for (int i = 0; i < port->ngids && found < 0; i++)
		if (port->gids[i].addr.sa.sa_family && !memcmp(&port->gids[i].gid, gid, sizeof(*gid)) &&
			(type < 0 || (int)port->gids[i].type == type))
			found = i;
	pthread_rwlock_unlock(&port->gid_lock);
	return found;
}

/* ---- changes while the process runs ---- */

static bool same_entry(const struct tp_gid *a, const struct tp_gid *b)
{
	return a->type == b->type && a->ifindex == b->ifindex && !memcmp(&a->gid, &b->gid, sizeof(a->gid));
}

static bool holds_entry(const struct tp_port *port, const struct tp_gid *entry)
{
	for (int i = 0; i < port->ngids; i++)
		if (port->gids[i].addr.sa.sa_family && same_entry(&port->gids[i], entry))
			return true;
	return false;
}

/* Puts entry in the first empty place, else at the end. */
static void place_entry(struct tp_port *port, const struct tp_gid *entry)
{
	int at = 0;
	while (at < port->ngids && port->gids[at].addr.sa.sa_family)
		at++;
	if (at == TP_CARD_GIDS)
		return;
	port->gids[at] = *entry;
	port->ngids = TP_MAX(port->ngids, at + 1);
}

void tp_port_refresh(struct tp_port *port)
{
	struct tp_card_params params;
	struct tp_port now = { .device = port->device, .number = port->number };
	tp_params_read(&params);
	memcpy(now.ifname, port->ifname, sizeof(now.ifname));
	tp_gid_fill(&now, &params, 0, 1);
	if (!now.gids)
		return;
	int changes = 0;
	pthread_rwlock_wrlock(&port->gid_lock);
	for (int i = 0; i < port->ngids; i++)
		if (port->gids[i].addr.sa.sa_family && !holds_entry(&now, &port->gids[i])) {
			memset(&port->gids[i], 0, sizeof(port->gids[i]));
			changes++;
		}
	for (int i = 0; i < now.ngids; i++)
		if (!holds_entry(port, &now.gids[i])) {
			place_entry(port, &now.gids[i]);
			changes++;
		}
	pthread_rwlock_unlock(&port->gid_lock);
	free(now.gids);
	int after = atomic_load_explicit(&now.state, memory_order_relaxed);
	int before = atomic_exchange_explicit(&port->state, after, memory_order_relaxed);
	if (changes)
		tp_event_port(port, IBV_EVENT_GID_CHANGE);
	if (before != after) {
		if (after == IBV_PORT_DOWN)
			tp_counter_add(port, TP_CNT_LINK_DOWNED, 1);
		tp_event_port(port, after == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
	}
}
