/* Private calls of rdma-core that programs and drivers' libraries really make, under every private node. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "private.h"
#include "verbs/api.h"

/* type: 0 InfiniBand or RoCE v1 (the kernel calls them one), 1 RoCE v2. */
int tp_private_ibv_query_gid_type(struct ibv_context *context, uint8_t number, unsigned int index, int *type);
int tp_private_ibv_query_gid_type(struct ibv_context *context, uint8_t number, unsigned int index, int *type)
{
	struct tp_port *port = tp_card_port(context, number);
	struct tp_gid gid;
	if (!port || index >= (unsigned)port->gid_table_len) {
		errno = EINVAL;
		return -1;
	}
	/* An empty entry has the first type. */
	*type = tp_port_gid(port, index, &gid) && gid.type == IBV_GID_TYPE_ROCE_V2 ? 1 : 0;
	return 0;
}
TP_PRIVATE(ibv_query_gid_type);

void tp_private___verbs_log(void *context, uint32_t level, const char *format, ...) __attribute__((format(printf, 3, 4)));
void tp_private___verbs_log(void *context, uint32_t level, const char *format, ...)
{
	char text[512];
	va_list args;
	(void)context;
	(void)level;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	text[strcspn(text, "\n")] = 0;
	TP_INFO(TP_NET, "a driver's library says: %s", text);
}
TP_PRIVATE(__verbs_log);

int tp_private_ibv_read_ibdev_sysfs_file(char *text, size_t bytes, void *sysfs_device, const char *format, ...);
int tp_private_ibv_read_ibdev_sysfs_file(char *text, size_t bytes, void *sysfs_device, const char *format, ...)
{
	(void)text;
	(void)bytes;
	(void)sysfs_device;
	(void)format;
	errno = ENOENT;     /* only drivers have such a device in hand */
	return -1;
}
TP_PRIVATE(ibv_read_ibdev_sysfs_file);

const char *tp_private_ibv_wr_opcode_str(enum ibv_wr_opcode opcode);
const char *tp_private_ibv_wr_opcode_str(enum ibv_wr_opcode opcode)
{
	static const char *const names[] = { "RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "SEND", "SEND_WITH_IMM", "RDMA_READ", "ATOMIC_CMP_AND_SWP",
		"ATOMIC_FETCH_AND_ADD", "LOCAL_INV", "BIND_MW", "SEND_WITH_INV", "TSO", "DRIVER1", NULL, NULL, "FLUSH", "ATOMIC_WRITE" };
	return (unsigned)opcode < TP_ARRAY_LEN(names) && names[opcode] ? names[opcode] : "unknown";
}
TP_PRIVATE(ibv_wr_opcode_str);
