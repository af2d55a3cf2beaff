/* Measured values on a description: <measured from to alpha_us gbps>, below <system>. NCCL doesn't know the element and reads past it. */
#include <string.h>

#include "topo/doc.h"

ncclResult_t tp_topo_doc_record(struct tp_topo_doc *doc, const struct tp_topo_measured *value)
{
	struct tp_element *e = tp_doc_add(doc, doc->root, "measured");
	if (!e) return ncclSystemError;
	TP_TRY(tp_doc_set(doc, e, "from", value->from));
	TP_TRY(tp_doc_set(doc, e, "to", value->to));
	if (value->alpha_us > 0) TP_TRY(tp_doc_setf(doc, e, "alpha_us", "%.6g", value->alpha_us));
	return value->gbps > 0 ? tp_doc_setf(doc, e, "gbps", "%.6g", value->gbps) : ncclSuccess;
}

ncclResult_t tp_topo_doc_measured(const struct tp_topo_doc *doc, int index, struct tp_topo_measured *out, bool *is)
{
	char where[TP_WHERE_BYTES];
	*is = false;
	for (const struct tp_element *e = doc->root->first; e; e = e->next) {
		struct tp_topo_measured value = { .alpha_us = 0 };
		const char *from = tp_element_get(e, "from"), *to = tp_element_get(e, "to");
		if (strcmp(e->name, "measured") != 0 || index-- > 0) continue;
		if (!from || !to) return TP_FAIL(ncclInvalidUsage, "%s has no from and to", tp_element_where(doc, e, where));
		TP_TRY(tp_element_real(doc, e, "alpha_us", 0, 1e9, 0, &value.alpha_us));
		TP_TRY(tp_element_real(doc, e, "gbps", 0, 1e9, 0, &value.gbps));
		snprintf(value.from, sizeof(value.from), "%s", from);
		snprintf(value.to, sizeof(value.to), "%s", to);
		*out = value;
		*is = true;
		return ncclSuccess;
	}
	return ncclSuccess;
}
