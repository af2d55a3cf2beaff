/* Any text as a file of channels, for a machine of two GPUs: read or refused, never worse. */
#include <stdlib.h>
#include <string.h>

#include "topo/search.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static struct tp_topo *machine(void)
{
	static const char text[] = "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"AuthenticAMD\">"
		"<pci busid=\"0000:11:00.0\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"><gpu dev=\"0\" sm=\"80\" rank=\"0\" gdr=\"1\"/></pci>"
		"<pci busid=\"0000:12:00.0\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"><gpu dev=\"1\" sm=\"80\" rank=\"1\" gdr=\"1\"/></pci>"
		"<nic><net name=\"a\" dev=\"0\" speed=\"100000\" port=\"1\" guid=\"0x1\" gdr=\"1\"/></nic></cpu></system>";
	struct tp_topo_policy policy;
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	tp_topo_policy_default(&policy);
	if (tp_topo_doc_parse(text, strlen(text), "machine.xml", &doc) != ncclSuccess || tp_topo_build(doc, &topo) != ncclSuccess ||
		tp_topo_compute_paths(topo, &policy) != ncclSuccess)
		abort();
	tp_topo_doc_free(doc);
	return topo;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static struct tp_topo *topo;
	struct tp_topo_policy policy;
	if (!topo) topo = machine();
	tp_topo_policy_default(&policy);
	for (enum tp_pattern pattern = TP_PATTERN_TREE; pattern <= TP_PATTERN_PAIRS; pattern++) {
		struct tp_channels *channels;
		char why[256];
		if (tp_channels_parse(topo, (const char *)data, bytes, "fuzz.xml", pattern, &channels) != ncclSuccess || !channels) continue;
		(void)tp_channels_check(topo, &policy, channels, why);
		tp_channels_free(channels);
	}
	return 0;
}
