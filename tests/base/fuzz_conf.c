/* Configuration files of any content: no crash, and what is read has the parser's own limits. */
#include <stdlib.h>
#include <string.h>
#include "base/internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tp_conf conf = { 0 };
	tp_conf_parse(&conf, (const char *)data, bytes, "fuzz");
	for (size_t i = 0; i < conf.count; i++) {
		size_t name = strlen(conf.entries[i].name), value = strlen(conf.entries[i].value);
		if (name == 0 || name > 128 || value > 4096 || strpbrk(conf.entries[i].value, "#\n") || strchr(conf.entries[i].name, '='))
			abort();
		for (size_t j = 0; j < i; j++)
			if (strcmp(conf.entries[i].name, conf.entries[j].name) == 0)
				abort();
		struct tp_param number = { .name = "N", .kind = TP_PARAM_BYTES, .min = 0, .max = 1ll << 40 };
		int64_t read;
		if (tp_param_parse(&number, conf.entries[i].value, &read) && (read < 0 || read > 1ll << 40))
			abort();
	}
	if (conf.nwarnings > TP_CONF_WARNINGS)
		abort();
	tp_conf_free(&conf);
	return 0;
}
