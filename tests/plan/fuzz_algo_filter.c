/* NCCL_ALGO and NCCL_PROTO: any text is read or refused; what is read is a set of algorithms that there are. */
#include <stdlib.h>
#include <string.h>

#include "plan/filter.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tp_filter filter;
	uint32_t named;
	char *text = malloc(size + 1);
	if (!text) return 0;
	memcpy(text, data, size);
	text[size] = 0;
	if (tp_filter_parse_algo(text, &filter) == ncclSuccess)
		for (int c = 0; c < TP_NCOLLS; c++)
			if (filter.algos[c] >> TP_NALGOS) abort();
	if (tp_filter_parse_proto(text, &named) == ncclSuccess && named >> 3) abort();
	free(text);
	return 0;
}
