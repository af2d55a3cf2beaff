/* Which of a port's GIDs is used. On RoCE a GID is an address: of the wrong kind, nothing ever arrives; so it is chosen by
 * family, version and range, and never one that is good on one link only. On InfiniBand the first one is the port's own. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/ib/ib.h"

enum { GIDS_MAX = 256 };
static const uint8_t v4_mapped[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };

static bool is_zero(const uint8_t raw[16])
{
	static const uint8_t zero[16];
	return memcmp(raw, zero, sizeof(zero)) == 0;
}

static bool is_v4(const uint8_t raw[16]) { return memcmp(raw, v4_mapped, sizeof(v4_mapped)) == 0; }
static bool is_link_local(const uint8_t raw[16]) { return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80; }

const char *tp_ib_gid_format(const uint8_t raw[16], char text[48])
{
	return inet_ntop(AF_INET6, raw, text, 48) ? text : "?";
}

const char *tp_ib_gid_type_name(int type)
{
	static const char *const names[] = { "IB", "RoCE v1", "RoCE v2", "of unknown type" };
	return type >= 0 && (size_t)type < TP_ARRAY_LEN(names) ? names[type] : "of unknown type";
}

bool tp_ib_gid_range(const char *text, uint8_t range[16], int *bits, int *family)
{
	char address[64], *end;
	const char *slash = strchr(text, '/');
	size_t length = slash ? (size_t)(slash - text) : strlen(text);
	uint8_t raw[16] = { 0 };
	long n;

	if (length == 0 || length >= sizeof(address)) return false;
	memcpy(address, text, length);
	address[length] = 0;
	bool v4 = inet_pton(AF_INET, address, raw + 12) == 1;
	if (v4) memcpy(raw, v4_mapped, sizeof(v4_mapped));
	else if (inet_pton(AF_INET6, address, raw) != 1) return false;
	n = slash ? strtol(slash + 1, &end, 10) : v4 ? 32 : 128;
	if (slash && (end == slash + 1 || *end)) return false;
	if (n < 0 || n > (v4 ? 32 : 128)) return false;
	memcpy(range, raw, sizeof(raw));
	*bits = (int)n + (v4 ? 96 : 0);
	*family = v4 ? AF_INET : AF_INET6;
	return true;
}

int tp_ib_gid_common_bits(const uint8_t a[16], const uint8_t b[16])
{
	for (int i = 0; i < 16; i++) {
		unsigned differ = (unsigned)(a[i] ^ b[i]);
		if (differ) return 8 * i + __builtin_clz(differ) - 24;
	}
	return 128;
}

static const char *doubt_of(const struct tp_ib_gid *gid)
{
	if (gid->type == TP_IB_GID_ROCE_V1) return "it is of RoCE v1, which no router passes on";
	if (is_link_local(gid->raw)) return "it is link-local: it reaches nobody beyond the next router or switch with another subnet";
	return NULL;
}

static void list_gids(const struct tp_ib_gid *gids, int count, char *out, size_t bytes)
{
	size_t used = 0;
	char text[48];

	out[0] = 0;
	for (int i = 0; i < count && used < bytes; i++)
		used += (size_t)snprintf(out + used, bytes - used, "%s[%d] %s (%s)", i ? ", " : "", gids[i].index, tp_ib_gid_format(gids[i].raw, text),
			tp_ib_gid_type_name(gids[i].type));
	if (count == 0) snprintf(out, bytes, "none");
}

static bool fits(const struct tp_ib_gid *gid, const struct tp_ib_gid_wish *wish, int family)
{
	enum tp_ib_gid_type type = wish->version == 1 ? TP_IB_GID_ROCE_V1 : TP_IB_GID_ROCE_V2;

	if (is_zero(gid->raw) || is_link_local(gid->raw)) return false;
	if (gid->type != type && gid->type != TP_IB_GID_UNKNOWN) return false;
	if (is_v4(gid->raw) != (family == AF_INET)) return false;
	return wish->range_bits < 0 || tp_ib_gid_common_bits(gid->raw, wish->range) >= wish->range_bits;
}

int tp_ib_gid_choose(const struct tp_ib_gid *gids, int count, const struct tp_ib_gid_wish *wish, char *why, size_t bytes, char *doubt, size_t doubt_bytes)
{
	static const int families[] = { AF_INET, AF_INET6 };
	char all[256];
	const char *odd;

	doubt[0] = 0;
	list_gids(gids, count, all, sizeof(all));
	if (wish->index >= 0) {
		for (int i = 0; i < count; i++) {
			if (gids[i].index != wish->index || is_zero(gids[i].raw)) continue;
			odd = wish->ethernet ? doubt_of(&gids[i]) : NULL;
			if (odd) snprintf(doubt, doubt_bytes, "%s. The port has: %s", odd, all);
			return i;
		}
		snprintf(why, bytes, "NCCL_IB_GID_INDEX=%d: there is no such GID; the port has: %s", wish->index, all);
		return -1;
	}
	if (!wish->ethernet) {
		if (count > 0) return 0;
		snprintf(why, bytes, "the port has no GID");
		return -1;
	}
	for (size_t f = 0; f < TP_ARRAY_LEN(families); f++) {
		if (wish->family && wish->family != families[f]) continue;
		for (int i = 0; i < count; i++)
			if (fits(&gids[i], wish, families[f])) return i;
	}
	snprintf(why, bytes, "no GID of RoCE v%d with %s address%s%.100s that isn't link-local; the port has: %s. Give its network interface an address, or name a GID by "
		"NCCL_IB_GID_INDEX", wish->version, wish->family == AF_INET ? "an IPv4" : wish->family == AF_INET6 ? "an IPv6" : "an", wish->range_bits >= 0
		? " in NCCL_IB_ADDR_RANGE=" : "", wish->range_bits >= 0 && wish->range_text ? wish->range_text : "", all);
	return -1;
}

/* ---- a port's table ---- */

/* /sys says the type where the library can't; where neither does, it is unknown, which is no error. */
static enum tp_ib_gid_type type_from_sysfs(const struct tp_ib_port *port, int index)
{
	char path[256], text[32];
	int fd;
	ssize_t n;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/%d/gid_attrs/types/%d", port->context->name, port->number, index);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return TP_IB_GID_UNKNOWN;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n <= 0) return TP_IB_GID_UNKNOWN;
	text[n] = 0;
	return strstr(text, "v2") ? TP_IB_GID_ROCE_V2 : strstr(text, "RoCE v1") || strstr(text, "IB/RoCE") ? TP_IB_GID_ROCE_V1 : TP_IB_GID_IB;
}

static enum tp_ib_gid_type type_from_verbs(uint32_t type)
{
	switch (type) {
	case IBV_GID_TYPE_IB: return TP_IB_GID_IB;
	case IBV_GID_TYPE_ROCE_V1: return TP_IB_GID_ROCE_V1;
	case IBV_GID_TYPE_ROCE_V2: return TP_IB_GID_ROCE_V2;
	}
	return TP_IB_GID_UNKNOWN;
}

/* All that a device has in one call, where the library has it. -1: it hasn't. */
static int read_whole(struct tp_ib_port *port, struct tp_ib_gid *out)
{
	const struct tp_verbs *v = port->context->verbs;
	size_t room = (size_t)GIDS_MAX * TP_MAX(port->context->attr.phys_port_cnt, 1);
	struct ibv_gid_entry *entries = v->query_gid_table ? calloc(room, sizeof(*entries)) : NULL;
	ssize_t n = entries ? v->query_gid_table(port->context->ibv, entries, room, 0, sizeof(*entries)) : -1;
	int count = 0;

	for (ssize_t i = 0; i < n && count < GIDS_MAX; i++) {
		if (entries[i].port_num != port->number || entries[i].gid_index >= GIDS_MAX || is_zero(entries[i].gid.raw)) continue;
		out[count] = (struct tp_ib_gid){ .index = (int)entries[i].gid_index, .type = type_from_verbs(entries[i].gid_type) };
		memcpy(out[count++].raw, entries[i].gid.raw, sizeof(out->raw));
	}
	free(entries);
	return n < 0 ? -1 : count;
}

static int read_table(struct tp_ib_port *port, struct tp_ib_gid *out)
{
	const struct tp_verbs *v = port->context->verbs;
	int table = TP_MIN(port->attr.gid_tbl_len, GIDS_MAX), count = read_whole(port, out);

	if (count >= 0) return count;
	count = 0;
	for (int i = 0; i < table; i++) {
		struct ibv_gid_entry entry = { 0 };
		union ibv_gid gid;
		struct tp_ib_gid *g = &out[count];

		if (v->query_gid_ex) {
			if (v->query_gid_ex(port->context->ibv, port->number, (uint32_t)i, &entry, 0, sizeof(entry)) != 0) continue;
			memcpy(g->raw, entry.gid.raw, sizeof(g->raw));
			g->type = type_from_verbs(entry.gid_type);
		} else {
			if (v->query_gid(port->context->ibv, port->number, i, &gid) != 0) continue;
			memcpy(g->raw, gid.raw, sizeof(g->raw));
			g->type = type_from_sysfs(port, i);
		}
		if (is_zero(g->raw)) continue;
		g->index = i;
		count++;
	}
	return count;
}

static ncclResult_t choose(struct tp_ib_port *port, struct tp_ib_gid_choice *out, char *why, size_t bytes)
{
	struct tp_ib_params params;
	struct tp_ib_gid *gids = tp_alloc(GIDS_MAX, sizeof(*gids), "a port's GIDs");
	struct tp_ib_gid_wish wish = { .range_bits = -1, .ethernet = port->attr.link_layer == IBV_LINK_LAYER_ETHERNET };
	char doubt[512];
	int family = 0, at = -1;

	if (!gids) {
		snprintf(why, bytes, "no memory for its GIDs");
		return ncclSystemError;
	}
	tp_ib_params_read(&params);
	wish.index = params.gid_index;
	wish.version = params.roce_version;
	wish.family = params.addr_family;
	wish.range_text = params.addr_range;
	if (params.addr_range && *params.addr_range && !tp_ib_gid_range(params.addr_range, wish.range, &wish.range_bits, &family)) {
		snprintf(why, bytes, "NCCL_IB_ADDR_RANGE=%s can't be read; an address and its bits would be right: 192.0.2.0/24", params.addr_range);
	} else {
		if (wish.family == 0) wish.family = family;
		at = tp_ib_gid_choose(gids, read_table(port, gids), &wish, why, bytes, doubt, sizeof(doubt));
	}
	if (at >= 0) {
		out->index = gids[at].index;
		out->type = gids[at].type;
		memcpy(out->raw, gids[at].raw, sizeof(out->raw));
		tp_ib_gid_format(out->raw, out->text);
		if (doubt[0]) TP_WARN("NET/IB : %s : GID %d %s is what NCCL_IB_GID_INDEX asks for, but %s", port->text, out->index, out->text, doubt);
	}
	free(gids);
	return at >= 0 ? ncclSuccess : ncclInvalidUsage;
}

bool tp_ib_port_still_has(struct tp_ib_port *port, const uint8_t raw[16])
{
	struct tp_ib_gid *gids = calloc(GIDS_MAX, sizeof(*gids));
	int count = gids ? read_table(port, gids) : 0;
	bool found = !gids;

	for (int i = 0; i < count && !found; i++) found = memcmp(gids[i].raw, raw, sizeof(gids[i].raw)) == 0;
	free(gids);
	return found;
}

ncclResult_t tp_ib_port_gid(struct tp_ib_port *port, struct tp_ib_gid_choice *out)
{
	char why[768];
	ncclResult_t result = choose(port, out, why, sizeof(why));

	return result == ncclSuccess ? ncclSuccess : TP_FAIL(result, "NET/IB : %s : %s", port->text, why);
}

bool tp_ib_port_has_gid(struct tp_ib_port *port, struct tp_ib_gid_choice *out)
{
	char why[768];

	if (choose(port, out, why, sizeof(why)) == ncclSuccess) return true;
	if (tp_ib_port_count() > 1 && !atomic_exchange_explicit(&port->told_gid, 1, memory_order_relaxed)) TP_WARN("NET/IB : %s is not used: %s", port->text, why);
	return false;
}

/* ---- can they reach each other? ---- */

/* Asks the kernel's routes, with nothing sent: a datagram socket from that address, connected to the other. */
static const char *no_route(const uint8_t from[16], const uint8_t to[16], char *text, size_t bytes)
{
	union tp_addr a, b;
	char t[48], f[48];
	const char *why = NULL;

	memset(&a, 0, sizeof(a));
	memset(&b, 0, sizeof(b));
	if (is_v4(to)) {
		a.v4.sin_family = b.v4.sin_family = AF_INET;
		memcpy(&a.v4.sin_addr, from + 12, 4);
		memcpy(&b.v4.sin_addr, to + 12, 4);
		b.v4.sin_port = htons(4791);
	} else {
		a.v6.sin6_family = b.v6.sin6_family = AF_INET6;
		memcpy(&a.v6.sin6_addr, from, 16);
		memcpy(&b.v6.sin6_addr, to, 16);
		b.v6.sin6_port = htons(4791);
	}
	int fd = socket(b.sa.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0) return NULL;
	/* An address that isn't this network namespace's (a card passed through) says nothing. */
	if (bind(fd, &a.sa, tp_addr_len(&a)) == 0 && connect(fd, &b.sa, tp_addr_len(&b)) != 0 && (errno == ENETUNREACH || errno == EHOSTUNREACH)) {
		snprintf(text, bytes, "the kernel has no route from %s to %s (%s)", tp_ib_gid_format(from, f), tp_ib_gid_format(to, t), strerror(errno));
		why = text;
	}
	close(fd);
	return why;
}

const char *tp_ib_gid_unreachable(const uint8_t from[16], int from_type, const uint8_t to[16], int to_type, bool ethernet, char *text, size_t bytes)
{
	bool both_known = from_type != TP_IB_GID_UNKNOWN && to_type != TP_IB_GID_UNKNOWN;

	if (!ethernet) return NULL;
	if (both_known && from_type != to_type) {
		snprintf(text, bytes, "one is %s, the other %s", tp_ib_gid_type_name(from_type), tp_ib_gid_type_name(to_type));
		return text;
	}
	if (is_v4(from) != is_v4(to)) return "one is an IPv4 address, the other isn't";
	if (is_link_local(from) != is_link_local(to)) return "one is link-local, the other isn't";
	if (is_link_local(from)) return NULL;
	return no_route(from, to, text, bytes);
}
