/* Packets and their ICRC. Known packets come from captures of another implementation, checked with scapy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <arpa/inet.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "verbs/crc.h"
#include "verbs/wire.h"

static uint32_t crc_bitwise(const uint8_t *data, size_t bytes)
{
	uint32_t state = ~0u;
	for (size_t i = 0; i < bytes; i++) {
		state ^= data[i];
		for (int bit = 0; bit < 8; bit++)
			state = state & 1 ? state >> 1 ^ 0xedb88320u : state >> 1;
	}
	return ~state;
}

static void crc_has_the_check_value_of_its_catalogue_entry(void **state)
{
	(void)state;
	assert_int_equal(~tp_crc_update(~0u, "123456789", 9), 0xcbf43926u);
	assert_int_equal(~tp_crc_update_plain(~0u, "123456789", 9), 0xcbf43926u);
}

static void crc_is_right_for_every_length_and_alignment(void **state)
{
	(void)state;
	static uint8_t data[700];
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 131 + (i >> 3));
	for (size_t bytes = 0; bytes <= 640; bytes++)
		for (size_t at = 0; at < 17; at += 4) {
			uint32_t expected = crc_bitwise(data + at, bytes);
			assert_int_equal(~tp_crc_update(~0u, data + at, bytes), expected);
			assert_int_equal(~tp_crc_update(tp_crc_update(~0u, data + at, bytes / 3), data + at + bytes / 3, bytes - bytes / 3), expected);
			assert_int_equal(~tp_crc_update_plain(~0u, data + at, bytes), expected);
		}
}

static void every_packet_that_is_built_is_parsed_alike(void **state)
{
	(void)state;
	uint8_t data[TP_WIRE_PACKET_MAX];
	int known = 0;
	for (int opcode = 0; opcode < 256; opcode++) {
		uint32_t parts = tp_wire_parts((uint8_t)opcode);
		if (!parts)
			continue;
		known++;
		struct tp_packet in = { .opcode = (uint8_t)opcode, .solicited = opcode & 1, .ack_request = opcode & 2, .fecn = opcode & 4, .becn = opcode & 8,
			.pkey = 0xffff, .qpn = 0x123456, .psn = 0xabcdef, .addr = 0x1122334455667788, .rkey = 0xdeadbeef, .length = 0x7fffffff,
			.swap_add = 0x0102030405060708, .compare = 0x1112131415161718, .original = 0x2122232425262728, .syndrome = 0x61, .msn = 0x777777,
			.qkey = 0x80010000, .src_qpn = 0xfffffe, .srqn = 0x54321, .imm = htonl(0xcafe), .bytes = parts & TP_HAS_PAYLOAD ? 13 : 0 }, out;
		size_t headers = tp_wire_build(&in, data);
		assert_int_equal(headers, tp_wire_header_bytes((uint8_t)opcode));
		assert_true(headers <= TP_WIRE_HEADERS_MAX);
		size_t pad = -in.bytes & 3;
		memset(data + headers, 0x5a, in.bytes + pad + TP_WIRE_ICRC_BYTES);
		assert_true(tp_wire_parse(data, headers + in.bytes + pad + TP_WIRE_ICRC_BYTES, &out));
		assert_int_equal(out.bytes, in.bytes);
		assert_int_equal(out.pad, pad);
		assert_ptr_equal(out.payload, data + headers);
		assert_int_equal(out.qpn, in.qpn);
		assert_int_equal(out.psn, in.psn);
		assert_int_equal(out.solicited, in.solicited);
		assert_int_equal(out.ack_request, in.ack_request);
		assert_int_equal(out.fecn, in.fecn);
		assert_int_equal(out.becn, in.becn);
		if (parts & (TP_HAS_RETH | TP_HAS_ATOMIC))
			assert_true(out.addr == in.addr && out.rkey == in.rkey);
		if (parts & TP_HAS_RETH)
			assert_int_equal(out.length, in.length);
		if (parts & TP_HAS_ATOMIC)
			assert_true(out.swap_add == in.swap_add && out.compare == in.compare);
		if (parts & TP_HAS_AETH)
			assert_true(out.syndrome == in.syndrome && out.msn == in.msn);
		if (parts & TP_HAS_ATOMIC_ACK)
			assert_true(out.original == in.original);
		if (parts & TP_HAS_DETH)
			assert_true(out.qkey == in.qkey && out.src_qpn == in.src_qpn);
		if (parts & TP_HAS_XRCETH)
			assert_int_equal(out.srqn, in.srqn);
		if (parts & TP_HAS_IMM)
			assert_int_equal(out.imm, in.imm);
		if (parts & TP_HAS_IETH)
			assert_int_equal(out.rkey, in.rkey);
	}
	assert_int_equal(known, 23 + 23 + 13 + 3 + 1);
}

static void packets_that_are_cut_off_or_of_another_version_are_refused(void **state)
{
	(void)state;
	uint8_t data[TP_WIRE_PACKET_MAX] = { 0 };
	struct tp_packet in = { .opcode = TP_OP_WRITE_ONLY_IMM, .pkey = 0xffff, .bytes = 7 }, out;
	size_t whole = tp_wire_build(&in, data) + 8 + TP_WIRE_ICRC_BYTES;
	for (size_t bytes = 0; bytes < whole - 7; bytes++)
		assert_false(tp_wire_parse(data, bytes, &out));
	assert_true(tp_wire_parse(data, whole, &out));
	data[1] |= 1;
	assert_false(tp_wire_parse(data, whole, &out));
	in = (struct tp_packet){ .opcode = TP_OP_ACK };
	whole = tp_wire_build(&in, data) + TP_WIRE_ICRC_BYTES;
	assert_true(tp_wire_parse(data, whole, &out));
	assert_false(tp_wire_parse(data, whole + 4, &out));
	data[0] = 0xff;
	assert_false(tp_wire_parse(data, whole, &out));
}

static union tp_addr v4(const char *text, uint16_t port)
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_port = htons(port) } };
	assert_int_equal(inet_pton(AF_INET, text, &addr.v4.sin_addr), 1);
	return addr;
}

static void icrc_covers_what_the_wire_shows(void **state)
{
	(void)state;
	/* An RC SEND only of 4 bytes from 10.0.0.1:49152 to 10.0.0.2:4791, checked with scapy's contrib.roce. */
	union tp_addr from = v4("10.0.0.1", 49152), to = v4("10.0.0.2", 4791);
	struct tp_icrc icrc;
	tp_icrc_prepare(&from, &to, &icrc);
	uint8_t data[64];
	struct tp_packet packet = { .opcode = TP_OP_SEND_ONLY, .pkey = 0xffff, .qpn = 0x11, .psn = 0x222, .ack_request = true, .bytes = 4 };
	size_t bytes = tp_wire_build(&packet, data);
	memcpy(data + bytes, "abcd", 4);
	assert_int_equal(tp_icrc_of(&icrc, 0, data, bytes + 4), 0x7092a985u);
	assert_int_equal(tp_icrc_of(&icrc, 0x2b10, data, bytes + 4), 0x21543659u);
	data[4] |= 0xc0;   /* what a congested switch and its receiver change isn't covered */
	assert_int_equal(tp_icrc_of(&icrc, 0, data, bytes + 4), 0x7092a985u);
}

static void the_identification_is_found_from_the_difference(void **state)
{
	(void)state;
	union tp_addr from = v4("192.0.2.1", 50000), to = v4("192.0.2.2", 4791);
	struct tp_icrc icrc;
	tp_icrc_prepare(&from, &to, &icrc);
	static uint8_t data[4096 + 28];
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 7);
	const size_t lengths[] = { 16, 20, 28, 1036, 4108, sizeof(data) };
	for (size_t l = 0; l < TP_ARRAY_LEN(lengths); l++) {
		uint32_t plain = tp_icrc_of(&icrc, 0, data, lengths[l]);
		for (uint32_t id = 0; id < 65536; id += l < 2 ? 1 : 257)
			assert_int_equal(tp_icrc_find_id(lengths[l], plain ^ tp_icrc_of(&icrc, (uint16_t)id, data, lengths[l])), id);
	}
}

static void a_damaged_packet_is_hardly_ever_taken_for_one_with_another_identification(void **state)
{
	(void)state;
	union tp_addr from = v4("192.0.2.1", 50000), to = v4("192.0.2.2", 4791);
	struct tp_icrc icrc;
	tp_icrc_prepare(&from, &to, &icrc);
	uint8_t data[272];
	memset(data, 0x33, sizeof(data));
	uint32_t sent = tp_icrc_of(&icrc, 7, data, sizeof(data));
	int missed = 0;
	for (size_t bit = 0; bit < sizeof(data) * 8; bit++) {
		if (bit / 8 == 4)
			continue;
		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
		int id = tp_icrc_find_id(sizeof(data), sent ^ tp_icrc_of(&icrc, 0, data, sizeof(data)));
		missed += id >= 0;
		assert_false(id >= 0 && id < 64);
		data[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	assert_true(missed <= 2);
}

static void ipv6_covers_addresses_and_no_identification(void **state)
{
	(void)state;
	union tp_addr from = { .v6 = { .sin6_family = AF_INET6, .sin6_port = htons(50000) } }, to = from;
	assert_int_equal(inet_pton(AF_INET6, "2001:db8::1", &from.v6.sin6_addr), 1);
	assert_int_equal(inet_pton(AF_INET6, "2001:db8::2", &to.v6.sin6_addr), 1);
	to.v6.sin6_port = htons(4791);
	uint8_t data[32] = { 0 };
	struct tp_icrc icrc;
	tp_icrc_prepare(&from, &to, &icrc);
	uint32_t plain = tp_icrc_of(&icrc, 0, data, sizeof(data));
	assert_int_equal(plain, tp_icrc_of(&icrc, 5, data, sizeof(data)));
	/* The same by the definition. */
	uint8_t image[8 + 40 + 8 + 32];
	memset(image, 0xff, 8);
	memcpy(image + 8, (uint8_t[]){ 0x6f, 0xff, 0xff, 0xff, 0, 44, 17, 0xff }, 8);
	memcpy(image + 16, &from.v6.sin6_addr, 16);
	memcpy(image + 32, &to.v6.sin6_addr, 16);
	memcpy(image + 48, (uint8_t[]){ 0xc3, 0x50, 0x12, 0xb7, 0, 44, 0xff, 0xff }, 8);
	memset(image + 56, 0, 32);
	image[60] = 0xff;
	assert_int_equal(plain, crc_bitwise(image, sizeof(image)));
}

static void psn_distances_wrap(void **state)
{
	(void)state;
	assert_int_equal(tp_psn_diff(5, 0xfffffe), 7);
	assert_int_equal(tp_psn_diff(0xfffffe, 5), -7);
	assert_int_equal(tp_psn_add(0xffffff, 1), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(crc_has_the_check_value_of_its_catalogue_entry),
		cmocka_unit_test(crc_is_right_for_every_length_and_alignment),
		cmocka_unit_test(every_packet_that_is_built_is_parsed_alike),
		cmocka_unit_test(packets_that_are_cut_off_or_of_another_version_are_refused),
		cmocka_unit_test(icrc_covers_what_the_wire_shows),
		cmocka_unit_test(the_identification_is_found_from_the_difference),
		cmocka_unit_test(a_damaged_packet_is_hardly_ever_taken_for_one_with_another_identification),
		cmocka_unit_test(ipv6_covers_addresses_and_no_identification),
		cmocka_unit_test(psn_distances_wrap),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
