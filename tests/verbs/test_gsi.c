/* Packets for QP 1: which are messages, whom they go to, and what is said where nobody is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "verbs/card.h"
#include "verbs/cm_name.h"
#include "verbs/fault.h"
#include "verbs/gsi.h"

enum { SPACE = 0x106, SERVICE = 41234 };

static union tp_addr addr_of(const char *text, uint16_t port)
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_port = htons(port) } };
	assert_int_equal(inet_pton(AF_INET, text, &addr.v4.sin_addr), 1);
	return addr;
}

static struct tp_cm_mad message(enum tp_cm_kind kind)
{
	return (struct tp_cm_mad){ .kind = kind, .transaction = 7, .local_id = 0x11112222, .remote_id = 0x33334444,
		.service_id = tp_cm_service(SPACE, SERVICE) };
}

/* The packet of a message, from 127.77.1.1 to 127.77.1.2. */
static void make(const struct tp_packet *changed, const struct tp_cm_mad *mad, uint8_t data[TP_GSI_PACKET_BYTES], struct tp_ingress *in)
{
	struct tp_packet packet = { .opcode = TP_WIRE_UD << 5 | TP_OP_SEND_ONLY, .pkey = 0xffff, .qpn = 1, .src_qpn = 1, .qkey = TP_CARD_QKEY_GSI,
		.bytes = TP_MAD_BYTES };
	struct tp_icrc icrc;
	if (changed)
		packet = *changed;
	*in = (struct tp_ingress){ .from = addr_of("127.77.1.1", 50000), .to = addr_of("127.77.1.2", 4791), .data = data, .bytes = TP_GSI_PACKET_BYTES };
	size_t head = tp_wire_build(&packet, data);
	tp_cm_build(mad, data + head);
	tp_icrc_prepare(&in->from, &in->to, &icrc);
	tp_icrc_store(data + head + TP_MAD_BYTES, tp_icrc_of(&icrc, 0, data, head + TP_MAD_BYTES));
}

static void only_whole_messages_for_queue_pair_1_are_taken(void **state)
{
	(void)state;
	uint8_t data[TP_GSI_PACKET_BYTES];
	struct tp_ingress in;
	struct tp_cm_mad mad = message(TP_CM_REQ), out;
	const struct tp_packet good = { .opcode = TP_WIRE_UD << 5 | TP_OP_SEND_ONLY, .pkey = 0xffff, .qpn = 1, .src_qpn = 1, .qkey = TP_CARD_QKEY_GSI,
		.bytes = TP_MAD_BYTES };
	make(&good, &mad, data, &in);
	assert_true(tp_gsi_parse(&in, &out));
	assert_int_equal(out.local_id, mad.local_id);
	in.bytes--;
	assert_false(tp_gsi_parse(&in, &out));
	in.bytes++;
	for (size_t i = 0; i < sizeof(data); i++) {
		data[i] ^= 4;
		/* Byte 4 isn't covered: routers may change it. */
		if (i != 4)
			assert_false(tp_gsi_parse(&in, &out));
		data[i] ^= 4;
	}
	for (int wrong = 0; wrong < 4; wrong++) {
		struct tp_packet packet = good;
		switch (wrong) {
		case 0: packet.qkey = 0x1111; break;
		case 1: packet.qpn = 2; break;
		case 2: packet.pkey = 0x1234; break;
		default: packet.opcode = TP_WIRE_UC << 5 | TP_OP_SEND_ONLY; break;
		}
		make(&packet, &mad, data, &in);
		assert_false(tp_gsi_parse(&in, &out));
	}
}

static int hold(const struct tp_cm_name *name)
{
	struct sockaddr_un address;
	socklen_t length = tp_cm_name_address(name, &address);
	int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	assert_true(s >= 0);
	assert_int_equal(bind(s, (struct sockaddr *)&address, length), 0);
	return s;
}

static bool comes(int s)
{
	struct pollfd poll_fd = { .fd = s, .events = POLLIN };
	return poll(&poll_fd, 1, 0) == 1;
}

static void a_message_goes_to_whom_it_is_for_and_is_read_there(void **state)
{
	(void)state;
	uint8_t data[TP_GSI_PACKET_BYTES], parcel[1024], raw[TP_MAD_BYTES];
	struct tp_ingress in;
	struct tp_cm_mad request = message(TP_CM_REQ), reply = message(TP_CM_REP), out;
	union ibv_gid from, to;
	int port = hold(&(struct tp_cm_name){ .port = true, .space = SPACE, .number = SERVICE });
	int process = hold(&(struct tp_cm_name){ .number = 0x3333 });
	make(NULL, &request, data, &in);
	tp_gsi_route(&in, false);
	assert_true(comes(port));
	ssize_t got = recv(port, parcel, sizeof(parcel), 0);
	assert_int_equal(tp_gsi_take(parcel, (size_t)got, raw, &from, &to), 1);
	assert_true(tp_cm_parse(raw, sizeof(raw), &out));
	assert_int_equal(out.kind, TP_CM_REQ);
	assert_int_equal(from.raw[15], 1);
	assert_int_equal(to.raw[15], 2);
	assert_int_equal(tp_gsi_take(parcel, (size_t)got - 1, raw, &from, &to), 0);
	/* Faults of packets that come in strike it, once. */
	assert_int_equal(tp_fault_text_set("duplicate=1,side=in"), 0);
	assert_int_equal(tp_gsi_take(parcel, (size_t)got, raw, &from, &to), 2);
	assert_int_equal(tp_fault_text_set("corrupt=1,side=in"), 0);
	assert_int_equal(tp_gsi_take(parcel, (size_t)got, raw, &from, &to), 0);
	assert_int_equal(tp_fault_text_set("none"), 0);
	make(NULL, &reply, data, &in);
	tp_gsi_route(&in, false);
	assert_true(comes(process));
	assert_false(comes(port));
	close(port);
	close(process);
}

static void a_refusal_without_our_number_finds_its_way(void **state)
{
	(void)state;
	uint8_t data[TP_GSI_PACKET_BYTES], parcel[1024];
	struct tp_ingress in;
	struct tp_cm_mad request = message(TP_CM_REQ), refusal = message(TP_CM_REJ);
	int port = hold(&(struct tp_cm_name){ .port = true, .space = SPACE, .number = SERVICE });
	int process = hold(&(struct tp_cm_name){ .number = 0x3333 });
	/* Of a request of ours: by its transaction. */
	refusal.local_id = refusal.remote_id = 0;
	refusal.reason = TP_REJ_UNSUPPORTED;
	refusal.transaction = 0x3333000000000009;
	make(NULL, &refusal, data, &in);
	tp_gsi_route(&in, false);
	assert_true(comes(process));
	assert_true(recv(process, parcel, sizeof(parcel), 0) > 0);
	/* Of the peer's own, which it gave up: to whom it had asked. */
	request.local_id = 0x55556666;
	make(NULL, &request, data, &in);
	tp_gsi_route(&in, false);
	assert_true(recv(port, parcel, sizeof(parcel), 0) > 0);
	refusal.reason = TP_REJ_TIMEOUT;
	refusal.local_id = request.local_id + 1;
	make(NULL, &refusal, data, &in);
	tp_gsi_route(&in, false);
	assert_false(comes(port));
	refusal.local_id = request.local_id;
	make(NULL, &refusal, data, &in);
	in.from = addr_of("127.77.1.3", 50000);     /* the same number, but a stranger's: not even its check sum is right */
	tp_gsi_route(&in, false);
	assert_false(comes(port));
	make(NULL, &refusal, data, &in);
	tp_gsi_route(&in, false);
	assert_true(comes(port));
	assert_false(comes(process));
	close(port);
	close(process);
}

/* What is answered to 127.77.1.1; false: nothing. */
static bool answered(int s, struct tp_cm_mad *out)
{
	uint8_t data[TP_GSI_PACKET_BYTES + 1];
	struct tp_ingress in = { .to = addr_of("127.77.1.1", 4791), .data = data };
	socklen_t length = sizeof(in.from);
	ssize_t got = recvfrom(s, data, sizeof(data), MSG_DONTWAIT, &in.from.sa, &length);
	in.bytes = (uint32_t)got;
	return got > 0 && tp_gsi_parse(&in, out);
}

static void where_nobody_is_the_manager_says_so(void **state)
{
	(void)state;
	uint8_t data[TP_GSI_PACKET_BYTES];
	struct tp_ingress in;
	struct tp_cm_mad out;
	union tp_addr asker = addr_of("127.77.1.1", 4791);
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (bind(s, &asker.sa, sizeof(asker.v4)) < 0)
		skip();
	static const struct { enum tp_cm_kind asked, answer; uint16_t reason; } cases[] = {
		{ TP_CM_REQ, TP_CM_REJ, TP_REJ_INVALID_SERVICE }, { TP_CM_REP, TP_CM_REJ, TP_REJ_INVALID_COMM_ID }, { TP_CM_DREQ, TP_CM_DREP, 0 },
		{ TP_CM_SIDR_REQ, TP_CM_SIDR_REP, 0 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct tp_cm_mad mad = message(cases[i].asked);
		make(NULL, &mad, data, &in);
		tp_gsi_route(&in, false);
		assert_true(answered(s, &out));
		assert_int_equal(out.kind, cases[i].answer);
		assert_int_equal(out.reason, cases[i].reason);
		assert_true(out.transaction == 7);
		assert_int_equal(cases[i].answer == TP_CM_SIDR_REP ? out.local_id : out.remote_id, mad.local_id);
	}
	/* Answers are not answered. */
	static const enum tp_cm_kind silent[] = { TP_CM_REJ, TP_CM_RTU, TP_CM_DREP, TP_CM_MRA, TP_CM_SIDR_REP };
	for (size_t i = 0; i < TP_ARRAY_LEN(silent); i++) {
		struct tp_cm_mad mad = message(silent[i]);
		make(NULL, &mad, data, &in);
		tp_gsi_route(&in, false);
		assert_false(answered(s, &out));
	}
	close(s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(only_whole_messages_for_queue_pair_1_are_taken), cmocka_unit_test(a_message_goes_to_whom_it_is_for_and_is_read_there),
		cmocka_unit_test(a_refusal_without_our_number_finds_its_way), cmocka_unit_test(where_nobody_is_the_manager_says_so),
	};
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
