/* Devices by address. They are opened once and stay open, as programs expect: id->verbs outlives every id. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/rdmacm/cm.h"

static struct ibv_context *open_devices[64];
static struct ibv_pd *pds[64];
static int open_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t pd_lock = PTHREAD_MUTEX_INITIALIZER;

static void open_all(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	for (int i = 0; i < count && open_count < 64; i++)
		if ((open_devices[open_count] = ibv_open_device(list[i])) != NULL)
			open_count++;
	if (list)
		ibv_free_device_list(list);
}

void cm_device_forget(void)
{
	pthread_mutex_init(&pd_lock, NULL);
	once = (pthread_once_t)PTHREAD_ONCE_INIT;
	open_count = 0;
	memset(pds, 0, sizeof(pds));
}

struct ibv_context **cm_devices(int *count)
{
	pthread_once(&once, open_all);
	*count = open_count;
	return open_devices;
}

struct ibv_pd *cm_device_pd(struct ibv_context *verbs)
{
	struct ibv_pd *pd = NULL;
	pthread_mutex_lock(&pd_lock);
	for (int i = 0; i < open_count; i++)
		if (open_devices[i] == verbs)
			pd = pds[i] ? pds[i] : (pds[i] = ibv_alloc_pd(verbs));
	pthread_mutex_unlock(&pd_lock);
	return pd;
}

void cm_gid_of(const struct sockaddr *addr, union ibv_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	if (addr->sa_family == AF_INET6) {
		memcpy(gid->raw, &((const struct sockaddr_in6 *)(const void *)addr)->sin6_addr, 16);
		return;
	}
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &((const struct sockaddr_in *)(const void *)addr)->sin_addr, 4);
}

static struct ibv_context *search(const union ibv_gid *wanted, union ibv_gid *found, uint8_t *port, uint8_t *index)
{
	int count;
	struct ibv_context **devices = cm_devices(&count);
	for (int d = 0; d < count; d++) {
		struct ibv_device_attr attr;
		if (ibv_query_device(devices[d], &attr))
			continue;
		for (uint8_t p = 1; p <= attr.phys_port_cnt; p++)
			for (uint32_t i = 0; i < 256; i++) {
				struct ibv_gid_entry entry;
				if (ibv_query_gid_ex(devices[d], p, i, &entry, 0) || entry.gid_type != IBV_GID_TYPE_ROCE_V2 ||
					(wanted && memcmp(&entry.gid, wanted, sizeof(*wanted))))
					continue;
				*port = p;
				*index = (uint8_t)i;
				if (found)
					*found = entry.gid;
				return devices[d];
			}
	}
	errno = ENODEV;
	return NULL;
}

struct ibv_context *cm_device_of(const union ibv_gid *gid, uint8_t *port, uint8_t *index) { return search(gid, NULL, port, index); }
struct ibv_context *cm_device_any(union ibv_gid *gid, uint8_t *port, uint8_t *index) { return search(NULL, gid, port, index); }
