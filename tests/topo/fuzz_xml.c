/* Any bytes as a description: refused with a message, or a graph whose paths and decisions can be asked for, and whose text reads
 * back to the same. */
#include <stdlib.h>

#include "topo/topo.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void ask_everything(struct tp_topo *topo)
{
	struct tp_topo_policy policy;
	struct tp_topo_warning *warnings = NULL;
	int count;
	tp_topo_policy_default(&policy);
	if (topo->nnodes > 200 || tp_topo_compute_paths(topo, &policy) != ncclSuccess) return;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		int32_t gpu = topo->of_kind[TP_TOPO_GPU][g];
		struct tp_topo_p2p p2p;
		struct tp_topo_gdr gdr;
		for (int32_t p = 0; p < topo->count[TP_TOPO_GPU]; p++) tp_topo_decide_p2p(topo, &policy, gpu, topo->of_kind[TP_TOPO_GPU][p], &p2p);
		for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) tp_topo_decide_gdr(topo, &policy, gpu, topo->of_kind[TP_TOPO_NET][n], n & 1, &gdr);
		tp_topo_local_net(topo, gpu, 3);
	}
	if (tp_topo_find_faults(topo, &policy, &warnings, &count) == ncclSuccess) free(warnings);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tp_topo_doc *doc, *again;
	struct tp_topo *topo;
	char *text;
	size_t text_bytes;
	if (tp_topo_doc_parse((const char *)data, bytes, "fuzz.xml", &doc) != ncclSuccess) return 0;
	if (tp_topo_doc_text(doc, &text, &text_bytes) != ncclSuccess || tp_topo_doc_parse(text, text_bytes, "again.xml", &again) != ncclSuccess) abort();
	if (tp_topo_doc_merge(again, doc) != ncclSuccess && tp_topo_build(again, &topo) == ncclSuccess) tp_topo_free(topo);
	if (tp_topo_build(doc, &topo) == ncclSuccess) {
		ask_everything(topo);
		tp_topo_free(topo);
	}
	free(text);
	tp_topo_doc_free(again);
	tp_topo_doc_free(doc);
	return 0;
}
