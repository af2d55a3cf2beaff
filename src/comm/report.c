/* Which path each pair of ranks takes and what the topology says of it: checked against TELPHER_EXPECT at init, logged there (INFO,
 * GRAPH), written to a file as JSON where TELPHER_PATHS_FILE names one, printed at the end where TELPHER_REPORT_PATHS asks for it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "comm/internal.h"
#include "telpher.h"
#include "topo/topo.h"

#define MOST_RANKS 256          /* of a report: its pairs are many */
#define MOST_CHANNELS 64

enum { P_REPORT, P_FILE };
static struct tp_param params[] = {
	[P_REPORT] = { .name = "TELPHER_REPORT_PATHS", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: rank 0 prints which path each pair of ranks used and why not a better one, when its communicator ends" },
	[P_FILE] = { .name = "TELPHER_PATHS_FILE", .kind = TP_PARAM_STRING,
		.doc = "file to which rank 0 adds the paths of all pairs of ranks at init, as a line of JSON for each communicator" },
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

/* ---- JSON */

static ncclResult_t write_pair(struct ncclComm *comm, int from, int to, FILE *out)
{
	struct tp_watch_path path;
	struct tp_link_path link;
	struct tp_watch_refusal refusals[TP_REFUSALS_MAX];
	struct tp_watch_channel channels[MOST_CHANNELS];
	TP_TRY(tp_report_path(comm, from, to, &path));
	TP_TRY(tp_links_path(comm->links, from, to, &link));
	int nrefusals = tp_comm_topo_refusals(comm, &path, link.text, refusals);
	int nchannels = tp_comm_topo_channels(comm, &path, channels, MOST_CHANNELS);
	tp_watch_json_path(out, &path, refusals, nrefusals, channels, nchannels);
	return ncclSuccess;
}

static void write_head(const struct ncclComm *comm, FILE *out)
{
	const struct tp_boot *boot = comm->boot;
	fprintf(out, "{\"telpher\":\"%s\",\"time_s\":%lld,\"communicator\":\"0x%" PRIx64 "\",\"name\":", TELPHER_VERSION, (long long)time(NULL), boot->comm_hash);
	if (comm->config.comm_name[0]) tp_watch_json_string(out, comm->config.comm_name);
	else fputs("null", out);
	fprintf(out, ",\"ranks_are\":\"%s\",\"rank\":%d,\"nranks\":%d,\"nhosts\":%d,\"nchannels\":%d,\"ranks\":[", comm->gpu ? "gpus" : "host processes",
		comm->rank, comm->nranks, boot->nhosts, comm->nchannels);
	for (int r = 0; r < comm->nranks; r++) {
		const struct tp_boot_peer *peer = &boot->peers[r];
		char name[sizeof(peer->host_name)];
		snprintf(name, sizeof(name), "%.*s", (int)sizeof(peer->host_name) - 1, peer->host_name);
		fprintf(out, "%s{\"rank\":%d,\"host\":%d,\"host_name\":", r ? "," : "", r, peer->host);
		tp_watch_json_string(out, name);
		fprintf(out, ",\"pid\":%d,\"device\":%d,\"address\":", (int)peer->pid, (int)peer->device);
		char address[160];
		if (tp_comm_topo_address(comm, r, address, sizeof(address))) tp_watch_json_string(out, address);
		else fputs("null", out);
		fputc('}', out);
	}
	fputs("],\"paths\":[", out);
}

ncclResult_t tp_report_json(struct ncclComm *comm, int from, char **text, size_t *bytes)
{
	char *made = NULL;
	size_t size = 0;
	FILE *out = open_memstream(&made, &size);
	if (!out) return TP_FAIL(ncclSystemError, "out of memory: the path report of %d ranks as JSON", comm->nranks);
	ncclResult_t result = ncclSuccess;
	bool any = false;
	write_head(comm, out);
	for (int a = from < 0 ? 0 : from; a < (from < 0 ? comm->nranks : from + 1) && result == ncclSuccess; a++) {
		for (int b = 0; b < comm->nranks && result == ncclSuccess; b++) {
			if (a == b) continue;
			if (any) fputc(',', out);
			any = true;
			result = write_pair(comm, a, b, out);
		}
	}
	fputs("]}\n", out);
	bool failed = ferror(out) != 0;
	if (fclose(out) || failed) {
		free(made);
		return TP_FAIL(ncclSystemError, "out of memory: the path report of %d ranks as JSON", comm->nranks);
	}
	if (result != ncclSuccess) {
		free(made);
		return result;
	}
	*text = made;
	*bytes = size;
	return ncclSuccess;
}

/* A pipe would keep us waiting for its reader, or end the process when that one goes. */
static int open_file(const char *path)
{
	struct stat is;
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666);
	if (fd < 0) return fd;
	if (fstat(fd, &is) == 0 && (S_ISREG(is.st_mode) || S_ISCHR(is.st_mode))) {
		fcntl(fd, F_SETFL, O_APPEND);
		return fd;
	}
	close(fd);
	errno = ESPIPE;
	return -1;
}

/* Several processes may add to one file, each whole lines. */
static bool add_line(const char *path, const char *text, size_t bytes)
{
	int fd = open_file(path);
	if (fd < 0) return false;
	flock(fd, LOCK_EX);
	while (bytes) {
		ssize_t n = write(fd, text, bytes);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0) break;
		text += n;
		bytes -= (size_t)n;
	}
	int error = errno;
	/* Some file systems tell at the end only. */
	bool good = close(fd) == 0 && bytes == 0;
	if (bytes) errno = error;
	return good;
}

/* A job doesn't fail for it. */
static void write_file(struct ncclComm *comm)
{
	const char *path = tp_param_string(&params[P_FILE]);
	char *text;
	size_t bytes;
	if (comm->rank != 0 || !path || !*path) return;
	bool all = comm->nranks <= MOST_RANKS;
	if (!all) TP_WARN("comm %p rank 0: TELPHER_PATHS_FILE gets the paths from rank 0 only: those of %d ranks are too many", (void *)comm, comm->nranks);
	if (tp_report_json(comm, all ? -1 : 0, &text, &bytes) != ncclSuccess) return;
	if (!add_line(path, text, bytes)) TP_WARN("comm %p rank 0: TELPHER_PATHS_FILE: %s can't be written: %s", (void *)comm, path, strerror(errno));
	free(text);
}

ncclResult_t tp_report_check(struct ncclComm *comm)
{
	size_t nkeys;
	const struct tp_expect_key *keys = tp_topo_expect_keys(&nkeys);
	TP_TRY(tp_watch_expect_check_with(keys, nkeys));
	log_report(comm);
	write_file(comm);
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
	if (!tp_param_int(&params[P_REPORT]) || comm->rank != 0 || comm->nranks > MOST_RANKS) return;
	struct tp_watch_paths *paths;
	if (all_pairs(comm, &paths) != ncclSuccess) return;
	print_report(comm, paths, stdout);
	fflush(stdout);
	tp_watch_paths_destroy(paths);
}

/* ---- For programs */

static ncclResult_t check_ranks(const struct ncclComm *comm, const char *name, int from, int to)
{
	if (from >= 0 && to >= 0 && from < comm->nranks && to < comm->nranks) return ncclSuccess;
	return TP_FAIL(ncclInvalidArgument, "%s: ranks %d and %d must be in [0, %d)", name, from, to, comm->nranks);
}

ncclResult_t tp_comm_path(ncclComm_t comm, int from, int to, char *text, size_t text_bytes)
{
	static const char name[] = "telpher_comm_path";
	if (!text || !text_bytes) return TP_FAIL(ncclInvalidArgument, "%s: there is no room for the text", name);
	TP_TRY(tp_comm_enter(comm, name));
	struct tp_watch_path path;
	ncclResult_t result = tp_comm_may_call(comm, name);
	if (result == ncclSuccess) result = check_ranks(comm, name, from, to);
	if (result == ncclSuccess) result = tp_report_path(comm, from, to, &path);
	if (result == ncclSuccess) {
		char ends[320];
		int used = snprintf(text, text_bytes, "%s%s%s", path.via, path.why[0] ? ": " : "", path.why);
		if (strncmp(path.via, "NET", 3) == 0 && (size_t)used < text_bytes && tp_comm_topo_meeting(comm, from, to, ends, sizeof(ends)))
			snprintf(text + used, text_bytes - (size_t)used, "; %s", ends);
	}
	tp_comm_leave(comm);
	return result;
}

static ncclResult_t give_text(const char *name, const char *made, size_t bytes, char *text, size_t *room)
{
	size_t needed = bytes + 1, had = *room;
	*room = needed;
	if (!text) return ncclSuccess;
	if (had < needed) return TP_FAIL(ncclInvalidArgument, "%s: the text is %zu bytes with its end, and there is room for %zu", name, needed, had);
	memcpy(text, made, needed);
	return ncclSuccess;
}

ncclResult_t tp_comm_paths(ncclComm_t comm, int from, char *text, size_t *bytes)
{
	static const char name[] = "telpher_comm_paths";
	if (!bytes) return TP_FAIL(ncclInvalidArgument, "%s: bytes is NULL", name);
	TP_TRY(tp_comm_enter(comm, name));
	char *made = NULL;
	size_t size = 0;
	ncclResult_t result = tp_comm_may_call(comm, name);
	if (result == ncclSuccess && from != -1) result = check_ranks(comm, name, from, 0);
	if (result == ncclSuccess) result = tp_report_json(comm, from, &made, &size);
	if (result == ncclSuccess) result = give_text(name, made, size, text, bytes);
	free(made);
	tp_comm_leave(comm);
	return result;
}
