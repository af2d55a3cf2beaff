/* Any text as a list of expectations: taken or refused with a message, item by item, to its end. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "watch/watch.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static const struct tp_expect_key keys[] = { { "nics", TP_EXPECT_LEAST, NULL, "" }, { "gpus", TP_EXPECT_COUNT, NULL, "" }, { "gdr", TP_EXPECT_WORD, "on|off", "" } };
	char *text = malloc(bytes + 1);
	struct tp_expect_item item = { .key = keys };
	if (!text) return 0;
	memcpy(text, data, bytes);
	text[bytes] = 0;
	for (const char *list = text; item.key && tp_expect_next(&list, "fuzz", keys, TP_ARRAY_LEN(keys), &item) == ncclSuccess;) tp_expect_holds(&item, 1);
	free(text);
	return 0;
}
