/* The connection manager's messages have InfiniBand's layout, and nothing that isn't one is taken for one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "verbs/cm_mad.h"

static const enum tp_cm_kind kinds[] = { TP_CM_REQ, TP_CM_MRA, TP_CM_REJ, TP_CM_REP, TP_CM_RTU, TP_CM_DREQ, TP_CM_DREP, TP_CM_SIDR_REQ, TP_CM_SIDR_REP };
#define KINDS (sizeof(kinds) / sizeof(kinds[0]))

static void a_request_has_its_fields_where_ib_cm_reads_them(void **state)
{
	(void)state;
	uint8_t b[TP_MAD_BYTES];
	struct tp_cm_mad mad = { .kind = TP_CM_REQ, .transaction = 0x0102030405060708, .local_id = 0xa1a2a3a4, .service_id = tp_cm_service(0x0106, 7174),
		.qpn = 0x123456, .psn = 0xabcdef, .responder_resources = 3, .initiator_depth = 4, .retry_count = 7, .rnr_retry_count = 6,
		.local_timeout = 20, .remote_timeout = 19, .max_cm_retries = 15, .mtu = 5, .pkey = 0xffff, .ack_timeout = 18, .hop_limit = 64,
		.traffic_class = 0x68, .flow_label = 0xfedcb, .packet_rate = 3, .sl = 3, .srq = true, .private_bytes = 1, .private_data = { 0x5a } };
	tp_cm_build(&mad, b);
	static const uint8_t header[24] = { 1, 7, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x10 };
	assert_memory_equal(b, header, 24);
	const uint8_t *m = b + 24;
	static const uint8_t service[8] = { 0, 0, 0, 0, 1, 6, 0x1c, 0x06 };
	assert_memory_equal(m, "\xa1\xa2\xa3\xa4", 4);
	assert_memory_equal(m + 8, service, 8);
	assert_memory_equal(m + 32, "\x12\x34\x56\x03", 4);
	assert_int_equal(m[39], 4);
	assert_int_equal(m[43], 19 << 3);
	assert_memory_equal(m + 44, "\xab\xcd\xef", 3);
	assert_int_equal(m[47], 20 << 3 | 7);
	assert_int_equal(m[50], 5 << 4 | 6);
	assert_int_equal(m[51], 15 << 4 | 8);
	assert_memory_equal(m + 88, "\xfe\xdc\xb0\x03", 4);
	assert_int_equal(m[92], 0x68);
	assert_int_equal(m[93], 64);
	assert_int_equal(m[95], 18 << 3);
	assert_int_equal(m[140], 0x5a);
}

static void each_message_comes_back_as_it_went(void **state)
{
	(void)state;
	for (size_t i = 0; i < KINDS; i++) {
		uint8_t b[TP_MAD_BYTES], again[TP_MAD_BYTES];
		struct tp_cm_mad mad = { .kind = kinds[i], .transaction = 99, .local_id = 7, .remote_id = 8, .service_id = 0x01060000 + 5, .qpn = 0x10203,
			.qkey = 0x80010000, .psn = 0x30201, .reason = TP_REJ_CONSUMER, .about = TP_CM_ABOUT_REP, .status = 1, .service_timeout = 5,
			.private_bytes = (uint8_t)tp_cm_private_room(kinds[i]) }, out;
		memset(mad.private_data, 0x77, mad.private_bytes);
		tp_cm_build(&mad, b);
		assert_true(tp_cm_parse(b, sizeof(b), &out));
		assert_int_equal(out.kind, kinds[i]);
		assert_int_equal(out.local_id, 7);
		assert_int_equal(out.private_bytes, mad.private_bytes);
		assert_memory_equal(out.private_data, mad.private_data, mad.private_bytes);
		tp_cm_build(&out, again);
		assert_memory_equal(b, again, sizeof(b));
	}
}

static void what_is_no_message_is_refused(void **state)
{
	(void)state;
	uint8_t b[TP_MAD_BYTES];
	struct tp_cm_mad mad = { .kind = TP_CM_REJ, .ari_bytes = 72 }, out;
	tp_cm_build(&mad, b);
	assert_true(tp_cm_parse(b, sizeof(b), &out));
	assert_false(tp_cm_parse(b, sizeof(b) - 1, &out));
	b[24 + 9] = 73 << 1;                /* more information than a REJ holds */
	assert_false(tp_cm_parse(b, sizeof(b), &out));
	tp_cm_build(&mad, b);
	static const uint8_t places[] = { 0, 1, 2, 3, 16 };
	for (size_t i = 0; i < sizeof(places); i++) {
		b[places[i]] ^= 0x40;
		assert_false(tp_cm_parse(b, sizeof(b), &out));
		b[places[i]] ^= 0x40;
	}
	b[17] = 0x19;                       /* LAP: alternate paths aren't for RoCE */
	assert_false(tp_cm_parse(b, sizeof(b), &out));
}

static void addresses_lie_in_the_36_bytes_of_rdma_cm(void **state)
{
	(void)state;
	uint8_t b[TP_MAD_IP_BYTES];
	struct tp_cm_ip ip = { .port = 0x1234, .from = { [12] = 10, 0, 0, 1 }, .to = { [12] = 10, 0, 0, 2 } }, out;
	tp_cm_build_ip(&ip, b);
	static const uint8_t head[4] = { 0, 0x40, 0x12, 0x34 };
	assert_memory_equal(b, head, 4);
	assert_memory_equal(b + 16, "\x0a\0\0\x01", 4);
	assert_memory_equal(b + 32, "\x0a\0\0\x02", 4);
	assert_true(tp_cm_parse_ip(b, sizeof(b), &out));
	assert_memory_equal(&ip, &out, sizeof(ip));
	assert_false(tp_cm_parse_ip(b, sizeof(b) - 1, &out));
	b[0] = 1;
	assert_false(tp_cm_parse_ip(b, sizeof(b), &out));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_request_has_its_fields_where_ib_cm_reads_them), cmocka_unit_test(each_message_comes_back_as_it_went),
		cmocka_unit_test(what_is_no_message_is_refused), cmocka_unit_test(addresses_lie_in_the_36_bytes_of_rdma_cm),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
