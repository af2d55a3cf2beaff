/* Addresses of any content (numeric hosts only: no name server is asked): no crash, and what is accepted can be written. */
#include <stdlib.h>
#include <string.h>
#include "base/internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	char *text = malloc(bytes + 1), formatted[TP_ADDR_TEXT];
	union tp_addr addr;
	if (!text)
		return 0;
	memcpy(text, data, bytes);
	text[bytes] = 0;
	if (tp_addr_parse_numeric(text, "fuzz", &addr) == ncclSuccess) {
		if (addr.sa.sa_family != AF_INET && addr.sa.sa_family != AF_INET6)
			abort();
		if (strlen(tp_addr_format(&addr, formatted)) < strlen("::<0>"))
			abort();
	}
	free(text);
	return 0;
}
