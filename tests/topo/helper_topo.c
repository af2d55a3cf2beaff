#include "topo/helper_topo.h"

#include <string.h>

struct tp_topo_doc *helper_doc(const char *text)
{
	struct tp_topo_doc *doc = NULL;
	assert_int_equal(tp_topo_doc_parse(text, strlen(text), "test.xml", &doc), ncclSuccess);
	return doc;
}

struct tp_topo *helper_topo(const char *text, const struct tp_topo_policy *policy)
{
	struct tp_topo_policy usual;
	struct tp_topo_doc *doc = helper_doc(text);
	struct tp_topo *topo = NULL;
	tp_topo_policy_default(&usual);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	tp_topo_doc_free(doc);
	assert_int_equal(tp_topo_compute_paths(topo, policy ? policy : &usual), ncclSuccess);
	return topo;
}

int32_t helper_node(const struct tp_topo *topo, const char *name)
{
	int32_t node = tp_topo_find_name(topo, name);
	assert_true(node >= 0);
	return node;
}

const char *helper_refusal(const char *text)
{
	struct tp_topo_doc *doc = NULL;
	assert_int_not_equal(tp_topo_doc_parse(text, strlen(text), "test.xml", &doc), ncclSuccess);
	assert_null(doc);
	return tp_log_last_error();
}
