/* Addresses and network interfaces. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/internal.h"

enum { P_IFNAME, P_FAMILY };
static struct tp_param addr_params[] = {
	[P_IFNAME] = { .name = "NCCL_SOCKET_IFNAME", .kind = TP_PARAM_STRING,
		.doc = "interfaces to use: list of prefixes; ^ in front excludes them, = demands the exact name" },
	[P_FAMILY] = { .name = "NCCL_SOCKET_FAMILY", .kind = TP_PARAM_ENUM, .choices = "any|AF_INET|AF_INET6", .fallback = "any",
		.doc = "addresses to use: IPv4 or IPv6 only" },
};
TP_PARAM_TABLE("socket", addr_params)

socklen_t tp_addr_len(const union tp_addr *addr)
{
	return addr->sa.sa_family == AF_INET6 ? sizeof(addr->v6) : sizeof(addr->v4);
}

static unsigned port_of(const union tp_addr *addr)
{
	return ntohs(addr->sa.sa_family == AF_INET6 ? addr->v6.sin6_port : addr->v4.sin_port);
}

const char *tp_addr_format(const union tp_addr *addr, char *text)
{
	char host[INET6_ADDRSTRLEN] = "", scope[IF_NAMESIZE + 16] = "", name[IF_NAMESIZE];
	if (addr->sa.sa_family == AF_INET) {
		inet_ntop(AF_INET, &addr->v4.sin_addr, host, sizeof(host));
	} else if (addr->sa.sa_family == AF_INET6) {
		inet_ntop(AF_INET6, &addr->v6.sin6_addr, host, sizeof(host));
		if (addr->v6.sin6_scope_id && if_indextoname(addr->v6.sin6_scope_id, name))
			snprintf(scope, sizeof(scope), "%%%s", name);
		else if (addr->v6.sin6_scope_id)
			snprintf(scope, sizeof(scope), "%%%u", addr->v6.sin6_scope_id);
	} else {
		snprintf(text, TP_ADDR_TEXT, "address family %d", addr->sa.sa_family);
		return text;
	}
	snprintf(text, TP_ADDR_TEXT, "%s%s<%u>", host, scope, port_of(addr));
	return text;
}

/* Splits "host:port" and "[host]:port". */
static bool split(const char *text, char *host, size_t host_bytes, unsigned *port)
{
	const char *end, *colon;
	if (*text == '[') {
		end = strchr(++text, ']');
		if (!end || end[1] != ':')
			return false;
		colon = end + 1;
	} else {
		colon = end = strchr(text, ':');
		if (!colon || strchr(colon + 1, ':'))
			return false;
	}
	size_t bytes = (size_t)(end - text), digits = strspn(colon + 1, "0123456789");
	if (bytes == 0 || bytes >= host_bytes || digits == 0 || digits > 5 || colon[1 + digits])
		return false;
	memcpy(host, text, bytes);
	host[bytes] = 0;
	*port = (unsigned)atoi(colon + 1);
	return *port <= 65535;
}

static ncclResult_t parse(const char *text, const char *what, int flags, union tp_addr *out)
{
	char host[256];
	unsigned port;
	if (!text || !split(text, host, sizeof(host), &port))
		return TP_FAIL(ncclInvalidArgument, "%s=%.128s: expected host:port, or [address]:port for IPv6, with a port from 0 to 65535", what,
			text ? text : "(none)");
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags }, *found = NULL;
	int64_t family = tp_param_int(&addr_params[P_FAMILY]);
	int error = getaddrinfo(host, NULL, &hints, &found);
	if (error)
		return TP_FAIL(ncclInvalidArgument, "%s=%.128s: can't find the host %s: %s", what, text, host,
			error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error));
	const struct addrinfo *chosen = NULL;
	for (const struct addrinfo *a = found; a && !chosen; a = a->ai_next)
		if ((a->ai_family == AF_INET && family != 2) || (a->ai_family == AF_INET6 && family != 1))
			chosen = a;
	/* A written address is what its writer wants, whatever the family asked for. */
	if (!chosen && found && (flags & AI_NUMERICHOST))
		chosen = found;
	if (!chosen || chosen->ai_addrlen > sizeof(*out)) {
		freeaddrinfo(found);
		return TP_FAIL(ncclInvalidArgument, "%s=%.128s: %s has no address of the family that NCCL_SOCKET_FAMILY asks for", what, text, host);
	}
	memset(out, 0, sizeof(*out));
	memcpy(out, chosen->ai_addr, chosen->ai_addrlen);
	freeaddrinfo(found);
	if (out->sa.sa_family == AF_INET6)
		out->v6.sin6_port = htons((uint16_t)port);
	else
		out->v4.sin_port = htons((uint16_t)port);
	return ncclSuccess;
}

ncclResult_t tp_addr_parse(const char *text, const char *what, union tp_addr *out) { return parse(text, what, 0, out); }
ncclResult_t tp_addr_parse_numeric(const char *text, const char *what, union tp_addr *out) { return parse(text, what, AI_NUMERICHOST, out); }

static bool listed(const char *list, bool exact, const char *name)
{
	while (*list) {
		size_t length = strcspn(list, ",");
		if (length && strncmp(list, name, length) == 0 && (!exact || name[length] == 0))
			return true;
		list += length + (list[length] == ',');
	}
	return false;
}

bool tp_interface_allowed(const char *spec, const char *name)
{
	bool negate = *spec == '^';
	spec += negate;
	bool exact = *spec == '=';
	spec += exact;
	return listed(spec, exact, name) != negate;
}

static bool usable(const struct ifaddrs *i, int64_t family, bool asked)
{
	if (!i->ifa_addr || !(i->ifa_flags & IFF_UP))
		return false;
	if (i->ifa_addr->sa_family == AF_INET)
		return family != 2;
	if (i->ifa_addr->sa_family != AF_INET6 || family == 1)
		return false;
	/* ::1 only where somebody wants it: a peer elsewhere can't reach it. */
	const struct sockaddr_in6 *v6 = (const void *)i->ifa_addr;
	return asked || family == 2 || !IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

static bool link_local(const union tp_addr *addr)
{
	return addr->sa.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&addr->v6.sin6_addr);
}

static int collect(const struct ifaddrs *all, const char *spec, bool asked, struct tp_interface *out, int max)
{
	int count = 0;
	int64_t family = tp_param_int(&addr_params[P_FAMILY]);
	for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
		if (!usable(i, family, asked) || !tp_interface_allowed(spec, i->ifa_name))
			continue;
		struct tp_interface one = { 0 };
		snprintf(one.name, sizeof(one.name), "%s", i->ifa_name);
		memcpy(&one.addr, i->ifa_addr, i->ifa_addr->sa_family == AF_INET ? sizeof(one.addr.v4) : sizeof(one.addr.v6));
		int known = 0;
		while (known < count && strcmp(out[known].name, one.name) != 0)
			known++;
		/* One address an interface: the first, but a routable one rather than a link-local one. */
		if (known < count && link_local(&out[known].addr) && !link_local(&one.addr))
			out[known] = one;
		else if (known == count && count < max)
			out[count++] = one;
	}
	return count;
}

static ncclResult_t none_found(const struct ifaddrs *all, const char *spec)
{
	char list[512] = "";
	size_t used = 0;
	for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
		if (!i->ifa_addr || (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6))
			continue;
		union tp_addr addr = { 0 };
		char text[TP_ADDR_TEXT];
		memcpy(&addr, i->ifa_addr, i->ifa_addr->sa_family == AF_INET ? sizeof(addr.v4) : sizeof(addr.v6));
		int n = snprintf(list + used, sizeof(list) - used, "%s%s:%s%s", used ? ", " : "", i->ifa_name, tp_addr_format(&addr, text),
			i->ifa_flags & IFF_UP ? "" : " (down)");
		used = TP_MIN(used + (size_t)n, sizeof(list) - 1);
	}
	return TP_FAIL(ncclInvalidUsage, "no network interface on %s fits NCCL_SOCKET_IFNAME=%s and NCCL_SOCKET_FAMILY=%s; there are: %s", tp_host_name(),
		spec ? spec : "(unset)", tp_param_string(&addr_params[P_FAMILY]), used ? list : "none");
}

int tp_interface_choose(const struct ifaddrs *all, struct tp_interface *out, int max)
{
	/* NCCL's order: InfiniBand's, then any real one, then the containers', then loopback. */
	static const char *const guesses[] = { "ib", "^docker,lo,virbr", "docker", "lo", "virbr" };
	const char *spec = tp_param_string(&addr_params[P_IFNAME]);
	if (spec && *spec)
		return collect(all, spec, *spec != '^', out, max);
	int found = 0;
	for (size_t i = 0; i < TP_ARRAY_LEN(guesses) && found == 0; i++)
		found = collect(all, guesses[i], false, out, max);
	return found;
}

ncclResult_t tp_socket_interfaces(struct tp_interface *out, int max, int *count)
{
	const char *spec = tp_param_string(&addr_params[P_IFNAME]);
	struct ifaddrs *all;
	if (getifaddrs(&all) < 0)
		return TP_FAIL(ncclSystemError, "can't list the network interfaces of %s: %s", tp_host_name(), strerror(errno));
	int found = tp_interface_choose(all, out, max);
	ncclResult_t result = found > 0 ? ncclSuccess : none_found(all, spec && *spec ? spec : NULL);
	freeifaddrs(all);
	if (result == ncclSuccess)
		*count = found;
	return result;
}

static bool same_subnet(const struct ifaddrs *i, const union tp_addr *remote)
{
	if (!i->ifa_addr || !i->ifa_netmask || i->ifa_addr->sa_family != remote->sa.sa_family)
		return false;
	if (remote->sa.sa_family == AF_INET) {
		const struct sockaddr_in *local = (const void *)i->ifa_addr, *mask = (const void *)i->ifa_netmask;
		return ((local->sin_addr.s_addr ^ remote->v4.sin_addr.s_addr) & mask->sin_addr.s_addr) == 0;
	}
	const struct sockaddr_in6 *local = (const void *)i->ifa_addr, *mask = (const void *)i->ifa_netmask;
	for (int b = 0; b < 16; b++)
		if ((local->sin6_addr.s6_addr[b] ^ remote->v6.sin6_addr.s6_addr[b]) & mask->sin6_addr.s6_addr[b])
			return false;
	return !link_local(remote) || !remote->v6.sin6_scope_id || remote->v6.sin6_scope_id == local->sin6_scope_id;
}

ncclResult_t tp_socket_interface_for(const union tp_addr *remote, struct tp_interface *out)
{
	struct tp_interface list[32];
	int count;
	TP_TRY(tp_socket_interfaces(list, TP_ARRAY_LEN(list), &count));
	struct ifaddrs *all;
	if (getifaddrs(&all) < 0)
		return TP_FAIL(ncclSystemError, "can't list the network interfaces of %s: %s", tp_host_name(), strerror(errno));
	const char *spec = tp_param_string(&addr_params[P_IFNAME]);
	bool found = false;
	for (const struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
		/* With no list given, loopback counts too: a remote on this machine is reached through it. */
		if (!usable(i, tp_param_int(&addr_params[P_FAMILY]), true) || (spec && *spec && !tp_interface_allowed(spec, i->ifa_name)) || !same_subnet(i, remote))
			continue;
		memset(out, 0, sizeof(*out));
		snprintf(out->name, sizeof(out->name), "%s", i->ifa_name);
		memcpy(&out->addr, i->ifa_addr, remote->sa.sa_family == AF_INET ? sizeof(out->addr.v4) : sizeof(out->addr.v6));
		found = true;
	}
	freeifaddrs(all);
	if (!found)
		*out = list[0];
	return ncclSuccess;
}
