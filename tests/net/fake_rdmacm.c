/* A librdmacm for tests: the software card's, whose events can be turned into others, told or spoilt. FAKE_RDMACM_REAL names the card's. */
#include <dlfcn.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

void fake_rdmacm_turn(int from, int to, int status, int times);
void fake_rdmacm_say(int event, int status);
void fake_rdmacm_spoil(int event);

static struct { int from, to, status, times; } turn;
static struct { bool wanted; struct rdma_cm_event event; } said;
static int spoilt = -1;
static struct rdma_cm_id *last;             /* of the connector's: the one over telpher0 that was established last */
static void *real;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void open_real(void) { real = dlopen(getenv("FAKE_RDMACM_REAL"), RTLD_NOW | RTLD_LOCAL); }

/* The real one's function of this name, as the type of the one that asks. */
#define REAL(name) (pthread_once(&once, open_real), (__typeof__(&name))(real ? dlsym(real, #name) : NULL))

/* The next events of one kind are of another. */
void fake_rdmacm_turn(int from, int to, int status, int times)
{
	turn.from = from;
	turn.to = to;
	turn.status = status;
	turn.times = times;
}

/* One that this id is told. */
void fake_rdmacm_say(int event, int status)
{
	said.event = (struct rdma_cm_event){ .id = last, .event = (enum rdma_cm_event_type)event, .status = status };
	said.wanted = true;
}

/* The next event of this kind brings other private data. */
void fake_rdmacm_spoil(int event) { spoilt = event; }

struct rdma_event_channel *rdma_create_event_channel(void) { return REAL(rdma_create_event_channel)(); }
void rdma_destroy_event_channel(struct rdma_event_channel *channel) { REAL(rdma_destroy_event_channel)(channel); }
int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, enum rdma_port_space space) { return REAL(rdma_create_id)(channel, id, context, space); }
int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t bytes) { return REAL(rdma_set_option)(id, level, name, value, bytes); }
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr) { return REAL(rdma_bind_addr)(id, addr); }
int rdma_listen(struct rdma_cm_id *id, int backlog) { return REAL(rdma_listen)(id, backlog); }
__be16 rdma_get_src_port(struct rdma_cm_id *id) { return REAL(rdma_get_src_port)(id); }
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout_ms) { return REAL(rdma_resolve_addr)(id, from, to, timeout_ms); }
int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms) { return REAL(rdma_resolve_route)(id, timeout_ms); }
int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param) { return REAL(rdma_connect)(id, param); }
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param) { return REAL(rdma_accept)(id, param); }
int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t bytes) { return REAL(rdma_reject)(id, data, bytes); }
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask) { return REAL(rdma_init_qp_attr)(id, attr, mask); }
int rdma_ack_cm_event(struct rdma_cm_event *event) { return event == &said.event ? 0 : REAL(rdma_ack_cm_event)(event); }

int rdma_establish(struct rdma_cm_id *id)
{
	if (id->verbs && strcmp(id->verbs->device->name, "telpher0") == 0) last = id;
	return REAL(rdma_establish)(id);
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	if (last == id) last = NULL;
	return REAL(rdma_destroy_id)(id);
}

int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	if (said.wanted && said.event.id && said.event.id->channel == channel) {
		said.wanted = false;
		*event = &said.event;
		return 0;
	}
	if (REAL(rdma_get_cm_event)(channel, event)) return -1;
	if (spoilt == (int)(*event)->event && (*event)->param.conn.private_data) {
		spoilt = -1;
		memset((void *)(uintptr_t)(*event)->param.conn.private_data, 0x41, (*event)->param.conn.private_data_len);
	}
	if (turn.times > 0 && (int)(*event)->event == turn.from) {
		turn.times--;
		(*event)->event = (enum rdma_cm_event_type)turn.to;
		(*event)->status = turn.status;
	}
	return 0;
}
