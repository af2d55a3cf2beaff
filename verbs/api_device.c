/* Exported calls: devices, contexts, queries. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "verbs/api.h"
#include "verbs/fault.h"

TP_API(struct ibv_device **, get_device_list, (int *count))
{
	struct tp_device *devices;
	int all = tp_card_devices(&devices), shown = 0;
	struct ibv_device **list = calloc((size_t)all + 1, sizeof(struct ibv_device *));
	if (!list) {
		errno = ENOMEM;
		return NULL;
	}
	for (int i = 0; i < all; i++)
		if (!tp_fault(TP_FAULT_MISSING, devices[i].ibv.name, 0))
			list[shown++] = &devices[i].ibv;
	if (count)
		*count = shown;
	return list;
}

TP_API(void, free_device_list, (struct ibv_device **list)) { free(list); }
TP_API(const char *, get_device_name, (struct ibv_device *device)) { return device->name; }
TP_API(int, get_device_index, (struct ibv_device *device)) { return ((struct tp_device *)device)->index; }
TP_API(uint64_t, get_device_guid, (struct ibv_device *device)) { return ((struct tp_device *)device)->guid; }
TP_API(struct ibv_context *, open_device, (struct ibv_device *device)) { return tp_context_open((struct tp_device *)device); }
TP_API(int, close_device, (struct ibv_context *context)) { return tp_context_close(tp_context_of(context)); }

TP_API(int, get_async_event, (struct ibv_context *context, struct ibv_async_event *event))
{
	return tp_event_take(tp_context_of(context), event);
}
TP_API(void, ack_async_event, (struct ibv_async_event *event)) { tp_event_ack(event); }

TP_API(int, query_device, (struct ibv_context *context, struct ibv_device_attr *attr))
{
	struct ibv_device_attr_ex wide;
	tp_query_device(tp_device_of(context), &wide);
	*attr = wide.orig_attr;
	return 0;
}

/* The function has the structure of old, without port_cap_flags2; the header's macro of the same name goes by verbs_context. */
TP_API(int, query_port, (struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr))
{
	return tp_query_port(context, port, attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

TP_API(int, query_port_speed, (struct ibv_context *context, uint32_t number, uint64_t *speed))
{
	struct tp_port *port = tp_card_port(context, number);
	if (!port)
		return EINVAL;
	*speed = port->rate_gbps * 10ull;   /* in units of 100 Mb/s */
	return 0;
}

TP_API(int, query_gid, (struct ibv_context *context, uint8_t number, int index, union ibv_gid *gid))
{
	struct tp_port *port = tp_card_port(context, number);
	struct tp_gid entry;
	if (!port || index < 0 || index >= port->gid_table_len) {
		errno = EINVAL;
		return -1;
	}
	/* An empty entry is all zeros. */
	memset(gid, 0, sizeof(*gid));
	if (tp_port_gid(port, (uint32_t)index, &entry))
		*gid = entry.gid;
	return 0;
}

TP_API_NAMED(int, query_gid_ex, "_ibv_query_gid_ex", (struct ibv_context *context, uint32_t port, uint32_t index,
	struct ibv_gid_entry *entry, uint32_t flags, size_t bytes))
{
	struct ibv_gid_entry found;
	if (flags)
		return EINVAL;
	int error = tp_query_gid_entry(context, port, index, &found);
	if (error)
		return error;
	memset(entry, 0, bytes);
	memcpy(entry, &found, TP_MIN(bytes, sizeof(found)));
	return 0;
}

TP_API_NAMED(ssize_t, query_gid_table, "_ibv_query_gid_table", (struct ibv_context *context, struct ibv_gid_entry *entries, size_t max,
	uint32_t flags, size_t bytes))
{
	size_t count = 0;
	if (flags)
		return -EINVAL;
	for (int p = 1; p <= tp_device_of(context)->nports; p++) {
		struct tp_port *port = tp_card_port(context, (uint32_t)p);
		for (int i = 0; i < port->gid_table_len; i++) {
			struct ibv_gid_entry found;
			if (tp_query_gid_entry(context, (uint32_t)p, (uint32_t)i, &found))
				continue;
			if (count == max)
				return -EINVAL;
			uint8_t *to = (uint8_t *)entries + count++ * bytes;
			memset(to, 0, bytes);
			memcpy(to, &found, TP_MIN(bytes, sizeof(found)));
		}
	}
	return (ssize_t)count;
}

TP_API(int, query_pkey, (struct ibv_context *context, uint8_t number, int index, uint16_t *pkey))
{
	if (!tp_card_port(context, number) || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = TP_CARD_PKEY;       /* the same in either byte order */
	return 0;
}

TP_API(int, get_pkey_index, (struct ibv_context *context, uint8_t number, uint16_t pkey))
{
	if (tp_card_port(context, number) && pkey == TP_CARD_PKEY)
		return 0;
	errno = EINVAL;
	return -1;
}

/* ---- fork: memory isn't pinned, so a child's copy-on-write does no harm ---- */

TP_API(int, fork_init, (void)) { return 0; }
TP_API(enum ibv_fork_status, is_fork_initialized, (void)) { return IBV_FORK_UNNEEDED; }
TP_API(int, dontfork_range, (void *base, size_t bytes))
{
	(void)base;
	(void)bytes;
	return 0;
}
TP_API(int, dofork_range, (void *base, size_t bytes))
{
	(void)base;
	(void)bytes;
	return 0;
}

/* ---- sysfs, for those who look there by our help ---- */

TP_API(const char *, get_sysfs_path, (void)) { return "/sys"; }

TP_API(int, read_sysfs_file, (const char *dir, const char *file, char *text, size_t bytes))
{
	char path[512];
	if (snprintf(path, sizeof(path), "%s/%s", dir, file) >= (int)sizeof(path))
		return -1;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t got = read(fd, text, bytes);
	close(fd);
	if (got > 0 && text[got - 1] == '\n')
		text[--got] = 0;
	else if (got >= 0 && (size_t)got < bytes)
		text[got] = 0;
	return (int)got;
}

TP_API(int, resolve_eth_l2_from_gid, (struct ibv_context *context, struct ibv_ah_attr *attr, uint8_t mac[6], uint16_t *vid))
{
	(void)context;
	(void)attr;
	(void)mac;
	(void)vid;
	errno = EOPNOTSUPP;         /* the kernel finds the way, nobody here knows Ethernet addresses */
	return -1;
}

/* ---- sharing of objects with another process: a real device's kernel does that ---- */

#define TP_API_REFUSED(type, name, arguments) TP_API(type, name, arguments) { errno = EOPNOTSUPP; return NULL; }
TP_API_REFUSED(struct ibv_context *, import_device, (int fd __attribute__((unused))))
TP_API_REFUSED(struct ibv_pd *, import_pd, (struct ibv_context *context __attribute__((unused)), uint32_t handle __attribute__((unused))))
TP_API_REFUSED(struct ibv_mr *, import_mr, (struct ibv_pd *pd __attribute__((unused)), uint32_t handle __attribute__((unused))))
TP_API_REFUSED(struct ibv_dm *, import_dm, (struct ibv_context *context __attribute__((unused)), uint32_t handle __attribute__((unused))))
TP_API(void, unimport_pd, (struct ibv_pd *pd)) { (void)pd; }
TP_API(void, unimport_mr, (struct ibv_mr *mr)) { (void)mr; }
TP_API(void, unimport_dm, (struct ibv_dm *dm)) { (void)dm; }
