/* Which path each pair of ranks takes: checked against TELPHER_EXPECT at init, printed at the end where
 * TELPHER_REPORT_PATHS asks for it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string.h>

#include "comm/internal.h"

static struct tp_param params[] = {
	{ .name = "TELPHER_REPORT_PATHS", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: rank 0 prints which path each pair of ranks used and why not a better one, when its communicator ends" },
};
TP_PARAM_TABLE("watch", params)

static ncclResult_t add_pair(struct ncclComm *comm, struct tp_watch_paths *paths, int from, int to)
{
	struct tp_link_path link;
	TP_TRY(tp_links_path(comm->links, from, to, &link));
	struct tp_watch_path path = { .from = from, .to = to, .same_host = comm->boot->peers[from].host == comm->boot->peers[to].host };
	snprintf(path.via, sizeof(path.via), "%s", link.via);
	snprintf(path.why, sizeof(path.why), "%s", link.text);
	return tp_watch_paths_add(paths, &path);
}

/* Where no pair uses a network there is none to expect anything of. */
static ncclResult_t check_network(struct ncclComm *comm)
{
	static const char prefix[] = "NET/";
	for (int r = 0; r < comm->nranks; r++) {
		struct tp_link_path path;
		TP_TRY(tp_links_path(comm->links, comm->rank, r, &path));
		if (strncmp(path.via, prefix, sizeof(prefix) - 1)) continue;
		char subject[64];
		snprintf(subject, sizeof(subject), "rank %d -> %d", comm->rank, r);
		return tp_watch_expect("net", path.via + sizeof(prefix) - 1, subject, NULL);
	}
	return ncclSuccess;
}

ncclResult_t tp_report_check(struct ncclComm *comm)
{
	TP_TRY(tp_watch_expect_check());
	struct tp_watch_paths *paths;
	TP_TRY(tp_watch_paths_create(&paths));
	ncclResult_t result = ncclSuccess;
	for (int r = 0; r < comm->nranks && result == ncclSuccess; r++)
		if (r != comm->rank) result = add_pair(comm, paths, comm->rank, r);
	if (result == ncclSuccess) result = tp_watch_expect_paths(paths);
	if (result == ncclSuccess) result = check_network(comm);
	tp_watch_paths_destroy(paths);
	return result;
}

void tp_report_paths(struct ncclComm *comm)
{
	if (!tp_param_int(&params[0]) || comm->rank != 0 || comm->nranks > 256) return;
	struct tp_watch_paths *paths;
	if (tp_watch_paths_create(&paths) != ncclSuccess) return;
	ncclResult_t result = ncclSuccess;
	for (int a = 0; a < comm->nranks && result == ncclSuccess; a++)
		for (int b = 0; b < comm->nranks && result == ncclSuccess; b++)
			if (a != b) result = add_pair(comm, paths, a, b);
	if (result == ncclSuccess) tp_watch_paths_print(paths, stdout);
	fflush(stdout);
	tp_watch_paths_destroy(paths);
}
