/* What a peer says of its plug-in: any bytes are either refused with words or name this very plug-in. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "net/plugin/plugin.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tp_plug_offer offer;
	char why[400];
	const char *wrong;

	if (size < sizeof(offer)) return 0;
	memcpy(&offer, data, sizeof(offer));
	wrong = tp_plug_offer_check(&offer, "Loop", why, sizeof(why));
	if (wrong ? strlen(wrong) == 0 : strcmp(offer.name, "Loop") != 0) abort();
	return 0;
}
