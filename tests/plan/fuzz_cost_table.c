/* A table of constants: any bytes are read or refused; what is read survives being printed. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tp_cost_model model;
	struct tp_cost_record record, other;
	tp_cost_defaults(&model);
	if (tp_cost_parse_table((const char *)data, size, "input", &model) == ncclSuccess) {
		char *text = tp_cost_table_text(&model);
		tp_cost_pack(&model, &record);
		if (!text || tp_cost_parse_table(text, strlen(text), "text", &model) != ncclSuccess) abort();
		tp_cost_pack(&model, &other);
		if (memcmp(&record, &other, sizeof(record))) abort();
		free(text);
	}
	return 0;
}
