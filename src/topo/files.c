/* The files that users and hypervisors give and want: NCCL_TOPO_FILE, virtualTopology.xml, NCCL_TOPO_DUMP_FILE. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "topo/doc.h"
#include "topo/merge.h"

#define HYPERVISOR_FILE "/var/run/nvidia-topologyd/virtualTopology.xml"

enum { P_FILE, P_DUMP, P_DUMP_RANK };
static struct tp_param file_params[] = {
	[P_FILE] = { .name = "NCCL_TOPO_FILE", .kind = TP_PARAM_STRING,
		.doc = "description of the machine to start from; where it and the machine differ the file is right" },
	[P_DUMP] = { .name = "NCCL_TOPO_DUMP_FILE", .kind = TP_PARAM_STRING, .doc = "where to write the machine as it was found" },
	[P_DUMP_RANK] = { .name = "NCCL_TOPO_DUMP_FILE_RANK", .kind = TP_PARAM_INT, .fallback = "0", .max = INT_MAX,
		.doc = "the rank that writes NCCL_TOPO_DUMP_FILE" },
};
TP_PARAM_TABLE("topo", file_params)

ncclResult_t tp_topo_doc_load_base(const char *root, struct tp_topo_doc **out)
{
	char path[PATH_MAX];
	const char *given = tp_param_string(&file_params[P_FILE]);
	if (given && *given) {
		TP_TRY(tp_topo_doc_read(given, out));
		TP_INFO(TP_GRAPH, "NCCL_TOPO_FILE: %s", given);
		return ncclSuccess;
	}
	snprintf(path, sizeof(path), "%s%s", root ? root : "", HYPERVISOR_FILE);
	if (access(path, R_OK) != 0) {
		if (errno != ENOENT && errno != ENOTDIR) TP_WARN("%s is there and can't be read: %s; the machine is taken as it shows itself", path, strerror(errno));
		*out = NULL;
		return ncclSuccess;
	}
	TP_TRY(tp_topo_doc_read(path, out));
	TP_INFO(TP_GRAPH, "the hypervisor's description of this virtual machine: %s", path);
	return ncclSuccess;
}

/* What is there only where a rank found it. */
static bool is_of_the_job(const struct tp_element *e)
{
	return strcmp(e->name, "gpu") == 0 || strcmp(e->name, "net") == 0 || strcmp(e->name, "hostrank") == 0;
}

/* Innermost first: a bridge whose last device went goes too, and so do other hosts. True where element itself is of no use. */
static bool trim(struct tp_element *element, const char *host)
{
	bool had_children = element->first;
	for (struct tp_element *child = element->first, *next; child; child = next) {
		next = child->next;
		if (trim(child, host)) tp_doc_remove(child);
	}
	const char *keep = tp_element_get(element, "keep"), *of = tp_element_get(element, "host_hash");
	bool found = keep && strcmp(keep, "1") == 0;
	tp_doc_unset(element, "keep");
	if (found) return false;
	if (strcmp(element->name, "cpu") == 0) return host && of && strtoull(of, NULL, 16) != strtoull(host, NULL, 16);
	if (is_of_the_job(element)) return true;
	if (strcmp(element->name, "nic") == 0) return had_children && !element->first;
	if (strcmp(element->name, "pci") == 0) return !element->first;
	return false;
}

ncclResult_t tp_topo_doc_settle(const char *root, struct tp_topo_doc **found)
{
	struct tp_topo_doc *base = NULL;
	TP_TRY(tp_topo_doc_load_base(root, &base));
	if (!base) return ncclSuccess;
	ncclResult_t result = ncclSuccess;
	const struct tp_element *here = tp_element_child((*found)->root, "cpu");
	/* NCCL's mark of what is there; a file that was written elsewhere may bring its own. */
	for (struct tp_element *e = base->root; e; e = tp_doc_walk(base, e)) tp_doc_unset(e, "keep");
	for (struct tp_element *e = (*found)->root; e && result == ncclSuccess; e = tp_doc_walk(*found, e))
		if (is_of_the_job(e)) result = tp_doc_set(*found, e, "keep", "1");
	if (result == ncclSuccess) result = tp_doc_merge_found(base, *found);
	if (result == ncclSuccess) {
		trim(base->root, here ? tp_element_get(here, "host_hash") : NULL);
		result = tp_doc_check(base);
	}
	if (result != ncclSuccess) {
		for (struct tp_element *e = (*found)->root; e; e = tp_doc_walk(*found, e)) tp_doc_unset(e, "keep");
		tp_topo_doc_free(base);
		return result;
	}
	tp_topo_doc_free(*found);
	*found = base;
	return ncclSuccess;
}

bool tp_topo_dump_is_wanted(int rank)
{
	const char *path = tp_param_string(&file_params[P_DUMP]);
	return path && *path && rank == tp_param_int(&file_params[P_DUMP_RANK]);
}

ncclResult_t tp_topo_doc_dump(const struct tp_topo_doc *doc, int rank)
{
	return tp_topo_dump_is_wanted(rank) ? tp_topo_doc_write(doc, tp_param_string(&file_params[P_DUMP])) : ncclSuccess;
}
