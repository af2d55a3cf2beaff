/* How fast the reduction is: GB/s of memory touched (sources read and result written), a row for each type and operator, a
 * column for each instruction set; then copies. Usage: bench_reduce [bytes of a source] [sources] [milliseconds a cell] [type]
 * Everything is warm: as large as the caches, it measures them; far larger, the memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "exec/host/reduce.h"

enum { MOST_SOURCES = 64, BATCHES = 5 };

static const ncclRedOp_t ops[] = { ncclSum, ncclProd, ncclMax, ncclAvg };

static struct tp_reduce reduce_of(ncclDataType_t type, ncclRedOp_t op)
{
	struct tp_reduce r = { .type = type, .op = op, .pre_scale = 1, .post_scale = 1, .post_divisor = 1, .pre_integer = 1 };
	if (op == ncclAvg)
		tp_reduce_fill_avg(&r, 3);
	return r;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* The median of some batches, each of at least budget_ns / BATCHES. isa < 0: memcpy of the first source. */
static double measure(int isa, const struct tp_reduce *r, char *dst, const void *const *src, int nsrc, size_t bytes, uint64_t budget_ns)
{
	double rates[BATCHES];
	for (int b = 0; b < BATCHES; b++) {
		uint64_t calls = 0, from = tp_clock_ns(), now;
		do {
			for (size_t done = 0; done == 0 || done < 65536; done += bytes, calls++)
				if (isa < 0)
					memcpy(dst, src[0], bytes);
				else
					tp_reduce_run_isa((enum tp_isa)isa, r, true, dst, src, nsrc, ~(uint64_t)0, bytes);
			now = tp_clock_ns();
		} while (now - from < budget_ns / BATCHES);
		rates[b] = (double)calls * (double)bytes * (isa < 0 ? 2 : nsrc + 1) / (double)(now - from);
	}
	qsort(rates, BATCHES, sizeof(rates[0]), by_value);
	return rates[BATCHES / 2];
}

int main(int argc, char **argv)
{
	const size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 0) / 64 * 64 : 1 << 20;
	const int nsrc = argc > 2 ? atoi(argv[2]) : 2;
	const uint64_t budget_ns = (argc > 3 ? strtoull(argv[3], NULL, 0) : 50) * 1000000u;
	if (bytes == 0 || nsrc < 1 || nsrc > MOST_SOURCES) {
		fprintf(stderr, "usage: bench_reduce [bytes of a source, 64 or more] [sources, 1 to %d] [milliseconds a cell] [type]\n", MOST_SOURCES);
		return 2;
	}
	const void *src[MOST_SOURCES];
	char *dst = aligned_alloc(64, bytes);
	for (int s = 0; s < nsrc; s++) {
		char *from = aligned_alloc(64, bytes);
		if (from == NULL || dst == NULL) {
			fprintf(stderr, "no memory for %d buffers of %zu bytes\n", nsrc + 1, bytes);
			return 1;
		}
		memset(from, 0x31, bytes);
		src[s] = from;
	}
	memset(dst, 0, bytes);
	printf("%d sources of %zu bytes; GB/s, read and written\n%-10s %-5s %10s %10s %10s\n", nsrc, bytes, "type", "op", "scalar", "avx2",
		"avx512");
	for (int type = 0; type < ncclNumTypes; type++) {
		if (argc > 4 && strcmp(argv[4], tp_type_name((ncclDataType_t)type)) != 0)
			continue;
		for (size_t o = 0; o < TP_ARRAY_LEN(ops); o++) {
			struct tp_reduce r = reduce_of((ncclDataType_t)type, ops[o]);
			printf("%-10s %-5s", tp_type_name((ncclDataType_t)type), tp_op_name(ops[o]));
			for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++)
				if ((int)tp_reduce_usable_isa((enum tp_isa)isa) == isa)
					printf(" %10.1f", measure(isa, &r, dst, src, nsrc, bytes, budget_ns));
				else
					printf(" %10s", "-");
			printf("\n");
			fflush(stdout);
		}
	}
	printf("%-16s %10.1f\n", "memcpy", measure(-1, NULL, dst, src, 1, bytes, budget_ns));
	free(dst);
	for (int s = 0; s < nsrc; s++)
		free((void *)(uintptr_t)src[s]);
	return 0;
}
