/* Which path each pair of ranks takes and what the topology says of it: checked against TELPHER_EXPECT at init, logged there (INFO,
 * GRAPH), printed at the end where TELPHER_REPORT_PATHS asks for it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"
#include "topo/topo.h"

#define MOST_RANKS 256          /* of a report: its pairs are many */

static struct tp_param params[] = {
	{ .name = "TELPHER_REPORT_PATHS", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: rank 0 prints which path each pair of ranks used and why not a better one, when its communicator ends" },
};
TP_PARAM_TABLE("watch", params)

ncclResult_t tp_report_path(struct ncclComm *comm, int from, int to, struct tp_watch_path *out)
{
	struct tp_link_path link;
	TP_TRY(tp_links_path(comm->links, from, to, &link));
	memset(out, 0, sizeof(*out));
	out->from = from;
	out->to = to;
	out->same_host = comm->boot->peers[from].host == comm->boot->peers[to].host;
	snprintf(out->via, sizeof(out->via), "%s", link.via);
	snprintf(out->why, sizeof(out->why), "%s", link.text);
	tp_comm_topo_describe(comm, from, to, out);
	return ncclSuccess;
}

static ncclResult_t add_pair(struct ncclComm *comm, struct tp_watch_paths *paths, int from, int to)
{
	struct tp_watch_path path;
	TP_TRY(tp_report_path(comm, from, to, &path));
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

static ncclResult_t all_pairs(struct ncclComm *comm, struct tp_watch_paths **out)
{
	TP_TRY(tp_watch_paths_create(out));
	ncclResult_t result = ncclSuccess;
	for (int a = 0; a < comm->nranks && result == ncclSuccess; a++)
		for (int b = 0; b < comm->nranks && result == ncclSuccess; b++)
			if (a != b) result = add_pair(comm, *out, a, b);
	if (result != ncclSuccess) tp_watch_paths_destroy(*out);
	return result;
}

/* The table of pairs, then where the network reaches each rank. */
static void print_report(const struct ncclComm *comm, const struct tp_watch_paths *paths, FILE *out)
{
	char text[160];
	bool any = false;
	tp_watch_paths_print(paths, out);
	for (int r = 0; r < comm->nranks; r++) {
		if (!tp_comm_topo_address(comm, r, text, sizeof(text))) continue;
		if (!any) fprintf(out, "rank  address\n");
		fprintf(out, "%4d  %s (%s)\n", r, text, comm->boot->peers[r].host_name);
		any = true;
	}
}

/* A line of the table a line of the log. */
static void log_report(struct ncclComm *comm)
{
	struct tp_watch_paths *paths;
	char *text = NULL, *line, *rest;
	size_t bytes = 0;
	if (comm->rank != 0 || comm->nranks > MOST_RANKS || !tp_log_wants(TP_LOG_INFO, TP_GRAPH) || all_pairs(comm, &paths) != ncclSuccess) return;
	FILE *out = open_memstream(&text, &bytes);
	if (out) {
		print_report(comm, paths, out);
		fclose(out);
	}
	for (rest = text; (line = strsep(&rest, "\n"));)
		if (*line) TP_INFO(TP_GRAPH, "%s", line);
	free(text);
	tp_watch_paths_destroy(paths);
}

ncclResult_t tp_report_check(struct ncclComm *comm)
{
	size_t nkeys;
	const struct tp_expect_key *keys = tp_topo_expect_keys(&nkeys);
	TP_TRY(tp_watch_expect_check_with(keys, nkeys));
	log_report(comm);
	if (!tp_watch_expect_is_set()) return ncclSuccess;
	struct tp_watch_paths *paths;
	TP_TRY(tp_watch_paths_create(&paths));
	ncclResult_t result = ncclSuccess;
	for (int r = 0; r < comm->nranks && result == ncclSuccess; r++)
		if (r != comm->rank) result = add_pair(comm, paths, comm->rank, r);
	if (result == ncclSuccess) result = tp_watch_expect_paths(paths);
	if (result == ncclSuccess) result = check_network(comm);
	if (result == ncclSuccess) result = tp_comm_topo_expect(comm);
	tp_watch_paths_destroy(paths);
	return result;
}

void tp_report_paths(struct ncclComm *comm)
{
	if (!tp_param_int(&params[0]) || comm->rank != 0 || comm->nranks > MOST_RANKS) return;
	struct tp_watch_paths *paths;
	if (all_pairs(comm, &paths) != ncclSuccess) return;
	print_report(comm, paths, stdout);
	fflush(stdout);
	tp_watch_paths_destroy(paths);
}
