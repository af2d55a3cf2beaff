#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/helper_base.h"

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	return 0;
}

static void a_mac_depends_on_key_and_every_bit(void **s)
{
	(void)s;
	uint8_t key[TP_SECRET_BYTES] = { 1 }, other[TP_SECRET_BYTES] = { 2 }, a[TP_SECRET_BYTES], b[TP_SECRET_BYTES];
	char data[16] = "challenge";
	tp_secret_mac(key, data, sizeof(data), a);
	tp_secret_mac(key, data, sizeof(data), b);
	assert_true(tp_secret_equal(a, b));
	tp_secret_mac(other, data, sizeof(data), b);
	assert_false(tp_secret_equal(a, b));
	data[15] ^= 1;
	tp_secret_mac(key, data, sizeof(data), b);
	assert_false(tp_secret_equal(a, b));
	tp_secret_mac(key, NULL, 0, b);
	assert_false(tp_secret_equal(a, b));
}

static void a_mac_is_keyed_blake2b(void **s)
{
	(void)s;
	/* Python: hashlib.blake2b(bytes(range(3)), digest_size=32, key=bytes(range(32))) */
	static const uint8_t expected[TP_SECRET_BYTES] = {
		0xe1, 0x4f, 0xc9, 0x16, 0x15, 0x64, 0xdd, 0x08, 0x12, 0x04, 0xf2, 0xdd, 0x61, 0x46, 0xa9, 0xff,
		0xbe, 0xf6, 0x6f, 0x95, 0xd5, 0xdc, 0x80, 0xe0, 0xa2, 0x25, 0xe2, 0x13, 0xc0, 0x9d, 0xad, 0x7b,
	};
	uint8_t key[TP_SECRET_BYTES], mac[TP_SECRET_BYTES];
	for (int i = 0; i < TP_SECRET_BYTES; i++)
		key[i] = (uint8_t)i;
	tp_secret_mac(key, "\0\1\2", 3, mac);
	assert_memory_equal(mac, expected, sizeof(mac));
}

static void random_bytes_differ(void **s)
{
	(void)s;
	uint8_t a[TP_SECRET_BYTES] = { 0 }, b[TP_SECRET_BYTES] = { 0 };
	tp_secret_random(a, sizeof(a));
	tp_secret_random(b, sizeof(b));
	assert_false(tp_secret_equal(a, b));
}

static void a_forked_child_draws_other_random_bytes(void **s)
{
	(void)s;
	uint64_t ours = 0, theirs = 0;
	int fds[2];
	tp_secret_random(&ours, sizeof(ours));
	assert_int_equal(pipe(fds), 0);
	pid_t child = fork();
	tp_secret_random(&ours, sizeof(ours));
	if (child == 0)
		_exit(write(fds[1], &ours, sizeof(ours)) == sizeof(ours) ? 0 : 1);
	assert_int_equal(read(fds[0], &theirs, sizeof(theirs)), sizeof(theirs));
	waitpid(child, NULL, 0);
	assert_int_not_equal(ours, theirs);
	close(fds[0]);
	close(fds[1]);
}

static void a_hash_depends_on_length_seed_and_every_bit(void **s)
{
	(void)s;
	uint8_t data[64] = { 0 };
	for (size_t bytes = 0; bytes < 64; bytes++) {
		uint64_t hash = tp_hash64(data, bytes, 0);
		assert_true(hash != tp_hash64(data, bytes + 1, 0));
		assert_true(hash != tp_hash64(data, bytes, 1));
		for (size_t bit = 0; bit < bytes * 8; bit++) {
			data[bit / 8] ^= (uint8_t)(1 << bit % 8);
			int flipped = __builtin_popcountll(hash ^ tp_hash64(data, bytes, 0));
			data[bit / 8] ^= (uint8_t)(1 << bit % 8);
			assert_in_range(flipped, 8, 56);
		}
	}
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void like_keys_do_not_collide_even_in_their_low_32_bits_often(void **s)
{
	(void)s;
	enum { COUNT = 100000 };
	uint64_t *hashes = malloc(COUNT * sizeof(*hashes));
	int collisions = 0;
	for (uint64_t i = 0; i < COUNT; i++) {
		uint64_t key[3] = { i, 0, i * 4096 };
		hashes[i] = tp_hash64(key, sizeof(key), 0) & UINT32_MAX;
	}
	qsort(hashes, COUNT, sizeof(*hashes), by_value);
	for (int i = 1; i < COUNT; i++)
		collisions += hashes[i] == hashes[i - 1];
	/* Expected: 1.2. */
	assert_in_range(collisions, 0, 12);
	free(hashes);
}

static void the_host_is_one_unless_it_is_given_a_name(void **s)
{
	(void)s;
	uint64_t real = tp_host_hash();
	assert_true(real == tp_host_hash());
	test_set("NCCL_HOSTID", "a");
	uint64_t a = tp_host_hash();
	test_set("NCCL_HOSTID", "b");
	assert_true(a != real && a != tp_host_hash());
	test_set("NCCL_HOSTID", "a");
	assert_true(a == tp_host_hash());
	test_set("NCCL_HOSTID", "");
	assert_true(real == tp_host_hash());
}

static uint64_t from_child(uint64_t (*call)(void), int unshare_flags)
{
	int fds[2];
	uint64_t value = 0;
	assert_int_equal(pipe(fds), 0);
	pid_t child = fork();
	if (child == 0) {
		if (unshare_flags && unshare(unshare_flags) < 0)
			_exit(1);
		value = call();
		_exit(write(fds[1], &value, sizeof(value)) == sizeof(value) ? 0 : 1);
	}
	close(fds[1]);
	if (read(fds[0], &value, sizeof(value)) != sizeof(value))
		value = 0;
	close(fds[0]);
	waitpid(child, NULL, 0);
	return value;
}

static void another_process_is_of_the_same_host_but_another_process(void **s)
{
	(void)s;
	assert_true(from_child(tp_host_hash, 0) == tp_host_hash());
	assert_true(tp_process_hash() == tp_process_hash());
	assert_true(from_child(tp_process_hash, 0) != tp_process_hash());
}

static void another_network_namespace_is_another_host(void **s)
{
	(void)s;
	uint64_t other = from_child(tp_host_hash, CLONE_NEWNET);
	if (other == 0)
		other = from_child(tp_host_hash, CLONE_NEWUSER | CLONE_NEWNET);
	if (other == 0)
		skip();
	assert_true(other != tp_host_hash());
}

static void the_host_name_has_no_domain(void **s)
{
	(void)s;
	assert_true(strlen(tp_host_name()) > 0);
	assert_null(strchr(tp_host_name(), '.'));
}

static void the_instruction_set_can_be_lowered_but_not_raised(void **s)
{
	(void)s;
	enum tp_isa best = tp_cpu_isa();
	static const char *const names[] = { "scalar", "avx2", "avx512" };
	for (int i = 0; i < 3; i++) {
		test_set("TELPHER_ISA", names[i]);
		assert_int_equal(tp_cpu_isa(), TP_MIN(best, (enum tp_isa)i));
	}
}

static uint64_t count_on_one_cpu(void)
{
	cpu_set_t all, one;
	sched_getaffinity(0, sizeof(all), &all);
	CPU_ZERO(&one);
	for (int i = 0; i < CPU_SETSIZE; i++) {
		if (CPU_ISSET(i, &all)) {
			CPU_SET(i, &one);
			break;
		}
	}
	sched_setaffinity(0, sizeof(one), &one);
	return (uint64_t)tp_cpu_count();
}

static void processors_are_counted_by_affinity(void **s)
{
	(void)s;
	assert_int_equal(from_child(count_on_one_cpu, 0), 1);
	assert_in_range(tp_cpu_count(), 1, sysconf(_SC_NPROCESSORS_CONF));
}

static void types_have_sizes_and_nccl_tests_names(void **s)
{
	(void)s;
	static const struct { ncclDataType_t type; size_t bytes; const char *name; } cases[] = {
		{ ncclInt8, 1, "int8" }, { ncclUint8, 1, "uint8" }, { ncclInt32, 4, "int32" }, { ncclUint32, 4, "uint32" }, { ncclInt64, 8, "int64" },
		{ ncclUint64, 8, "uint64" }, { ncclHalf, 2, "half" }, { ncclFloat, 4, "float" }, { ncclDouble, 8, "double" }, { ncclBfloat16, 2, "bfloat16" },
		{ ncclFloat8e4m3, 1, "f8e4m3" }, { ncclFloat8e5m2, 1, "f8e5m2" },
	};
	assert_int_equal(TP_ARRAY_LEN(cases), ncclNumTypes);
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		assert_int_equal(tp_type_bytes(cases[i].type), cases[i].bytes);
		assert_string_equal(tp_type_name(cases[i].type), cases[i].name);
	}
	assert_int_equal(tp_type_bytes(ncclNumTypes), 0);
	assert_int_equal(tp_type_bytes((ncclDataType_t)-1), 0);
	assert_non_null(tp_type_name((ncclDataType_t)99));
}

static void operations_and_results_have_names(void **s)
{
	(void)s;
	static const char *const ops[] = { "sum", "prod", "max", "min", "avg", "mulsum", "mulsum" };
	for (int i = 0; i < 7; i++)
		assert_string_equal(tp_op_name((ncclRedOp_t)i), ops[i]);
	assert_string_equal(tp_op_name((ncclRedOp_t)-1), "unknown operation");
	assert_string_equal(tp_result_name(ncclSuccess), "ncclSuccess");
	assert_string_equal(tp_result_name(ncclInProgress), "ncclInProgress");
	assert_string_equal(tp_result_name((ncclResult_t)77), "unknown result");
}

static void memory_is_zeroed_and_too_much_is_an_error_that_says_what_for(void **s)
{
	(void)s;
	char *memory = tp_alloc(100, 10, "a thing");
	for (int i = 0; i < 1000; i++)
		assert_int_equal(memory[i], 0);
	free(memory);
	/* An overflow of the product, not a request that the allocator might grant. */
	volatile size_t huge = SIZE_MAX / 2;
	assert_null(tp_alloc(huge, 4, "the whole world"));
	assert_non_null(strstr(tp_log_last_error(), "the whole world"));
}

static void lists_of_processors_are_read_and_written(void **state)
{
	(void)state;
	static const struct { const char *text, *rest, *list; } cases[] = {
		{ "0-3,8", "", "0-3,8" }, { "5", "", "5" }, { "", "", "" }, { "2,0,1", "", "0-2" }, { "63-64", "", "63-64" }, { "1023,4000", "", "1023" },
		{ "1,x", "x", "1" }, { "1-", "1-", "" }, { "3-1", "3-1", "" }, { "-1", "-1", "" }, { "0;1", "0;1", "" }, { "7,", "", "7" },
	};
	uint64_t mask[TP_CPU_WORDS];
	char text[64];
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		assert_string_equal(tp_cpu_list_read(cases[i].text, mask), cases[i].rest);
		assert_string_equal(tp_cpu_list_format(mask, text, sizeof(text)), cases[i].list);
	}
	tp_cpu_list_read("0,2,4,6,8,10,12", mask);
	tp_cpu_list_format(mask, text, 8);
	assert_string_equal(text, "0,2,4,6");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_mac_depends_on_key_and_every_bit, clean),
		cmocka_unit_test_setup(a_mac_is_keyed_blake2b, clean),
		cmocka_unit_test_setup(random_bytes_differ, clean),
		cmocka_unit_test_setup(a_forked_child_draws_other_random_bytes, clean),
		cmocka_unit_test_setup(a_hash_depends_on_length_seed_and_every_bit, clean),
		cmocka_unit_test_setup(like_keys_do_not_collide_even_in_their_low_32_bits_often, clean),
		cmocka_unit_test_setup(the_host_is_one_unless_it_is_given_a_name, clean),
		cmocka_unit_test_setup(another_process_is_of_the_same_host_but_another_process, clean),
		cmocka_unit_test_setup(another_network_namespace_is_another_host, clean),
		cmocka_unit_test_setup(the_host_name_has_no_domain, clean),
		cmocka_unit_test_setup(the_instruction_set_can_be_lowered_but_not_raised, clean),
		cmocka_unit_test_setup(processors_are_counted_by_affinity, clean),
		cmocka_unit_test_setup(types_have_sizes_and_nccl_tests_names, clean),
		cmocka_unit_test_setup(operations_and_results_have_names, clean),
		cmocka_unit_test_setup(memory_is_zeroed_and_too_much_is_an_error_that_says_what_for, clean),
		cmocka_unit_test(lists_of_processors_are_read_and_written),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
