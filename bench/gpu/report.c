/* What was measured, as tables for readers and as lines of JSON. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench.h"

static FILE *json;
static const char *const modes[NMODES] = { [EAGER] = "eager", [GRAPH] = "graph", [JOINT] = "joint" };

bool report_open(const char *path)
{
	if (!path || (json = fopen(path, "w"))) return true;
	fprintf(stderr, "bench_gpu: %s can't be written: %s\n", path, strerror(errno));
	return false;
}

void report_close(void) { if (json) fclose(json); }

/* As a string of JSON. */
static void put_text(const char *key, const char *text)
{
	fprintf(json, "\"%s\":\"", key);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
		if (*c == '"' || *c == '\\') fprintf(json, "\\%c", *c);
		else if (*c < ' ') fprintf(json, "\\u%04x", *c);
		else fputc(*c, json);
	}
	fprintf(json, "\",");
}

static const char *truth(bool value) { return value ? "true" : "false"; }

void report_cell(const struct group *g, const struct cell *c, const struct answer *a)
{
	if (!json || !a->done) return;
	const struct ran *ran = &a->ran;
	fputc('{', json);
	put_text("library", g->library.name);
	put_text("collective", coll_names[c->coll]);
	put_text("type", g->type == ncclFloat32 ? "float" : "bfloat16");
	put_text("mode", modes[c->mode]);
	put_text("ranks_are", g->threads ? "threads" : "processes");
	put_text("algorithm", ran->how);
	put_text("kernel", ran->kernel);
	fprintf(json, "\"bytes\":%zu,\"ranks\":%d,\"devices\":%d,\"registered\":%s,\"window\":%s,\"cold\":%s,\"device_us\":%.3f,\"host_us\":%.3f,"
		"\"launch_us\":%.3f,\"launch_event_us\":%.3f,\"busbw_gb_s\":%.3f,\"blocks\":%d,\"threads_a_block\":%d,\"sms\":%d,\"kernels\":%d,\"copies\":%d,\"right\":%s}\n", c->bytes, g->nranks, g->ndevices,
		truth(c->registered), truth(c->registered && !g->buffers), truth(c->cold), a->device_us, a->host_us,
		a->launch_us, a->event_us, a->device_us > 0 ? (double)c->bytes / a->device_us / 1e3 * coll_bus_factor(c->coll, g->nranks) : 0, ran->blocks, ran->threads, ran->sms,
		ran->kernels, ran->copies, truth(!a->wrong));
	fflush(json);       /* a child that ends must not write it again */
}

/* ---- tables ---- */

static const char *text_of(size_t bytes, char *to)
{
	if (bytes >= 1 << 30 && bytes % (1 << 30) == 0) sprintf(to, "%zu GB", bytes >> 30);
	else if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) sprintf(to, "%zu MB", bytes >> 20);
	else if (bytes >= 1 << 10 && bytes % (1 << 10) == 0) sprintf(to, "%zu KB", bytes >> 10);
	else sprintf(to, "%zu B", bytes);
	return to;
}

/* One's own word, or the kernel's name without what all have in common. */
static const char *family(const struct answer *a)
{
	static const char *const starts[] = { "tp_", "ncclSymkDevKernel_", "ncclSymDevKernel_", "ncclDevKernel_" };
	const char *name = a->ran.how[0] ? a->ran.how : a->ran.kernel;
	for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++)
		if (strncmp(name, starts[i], strlen(starts[i])) == 0) return name + strlen(starts[i]);
	return name;
}

void print_head(enum coll coll, int nranks, const char *ours, const char *theirs)
{
	printf("\n%s, %d ranks: us a call on the device (slowest rank), us of the host's, blocks/multiprocessors that they fill, what ran\n%-10s %-18s | %-50s |",
		coll_names[coll], nranks, "bytes", "", ours);
	if (theirs) printf(" %-50s | ratio", theirs);
	printf("\n");
}

static bool print_answer(const struct answer *a)
{
	char places[32] = "";
	if (a->ran.blocks) snprintf(places, sizeof(places), "%d/%d", a->ran.blocks, a->ran.sms);
	if (!a->done) printf(" %9s %7s %7s %-24s |", "-", "-", "", "");
	else if (a->wrong) printf(" %9s %7s %7s %-24s |", "WRONG", "", "", "");
	else printf(" %9.2f %7.2f %7s %-24.24s |", a->device_us, a->host_us, places, family(a));
	return !a->wrong;
}

bool print_row(size_t bytes, const char *kind, const struct answer *ours, const struct answer *theirs)
{
	char text[32];
	printf("%-10s %-18s |", text_of(bytes, text), kind);
	bool right = print_answer(ours);
	if (theirs) {
		right &= print_answer(theirs);
		if (ours->done && theirs->done && !ours->wrong && !theirs->wrong) printf(" %5.2f", theirs->device_us / ours->device_us);
	}
	if (ours->done && !ours->wrong && ours->launch_us > 0)
		printf(" of the host's, launch %.2f, with event %.2f, call %+.2f", ours->launch_us, ours->event_us, ours->host_us - ours->event_us);
	printf("\n");
	fflush(stdout);
	return right;
}

/* ---- communicators ---- */

/* Of each of a rank's lives from `from` on the slowest rank's time, of these the median. */
static double median_life(const struct group *g, bool init, int from)
{
	double slowest[MOST_INITS];
	for (int i = from; i < g->inits; i++) {
		slowest[i - from] = 0;
		for (int r = 0; r < g->nranks; r++) {
			double v = init ? g->lives[r].init_ms[i] : g->lives[r].destroy_ms[i];
			if (v > slowest[i - from]) slowest[i - from] = v;
		}
	}
	return median(slowest, g->inits - from);
}

void report_lives(const struct group *g)
{
	struct stat file = { 0 };
	double cuda_ms = 0, first = 0;
	int64_t bytes = 0, first_bytes = 0;
	for (int r = 0; r < g->nranks; r++) {
		const struct rank_lives *l = &g->lives[r];
		if (l->cuda_ms > cuda_ms) cuda_ms = l->cuda_ms;
		if (l->init_ms[0] > first) first = l->init_ms[0];
		if (l->bytes > bytes) bytes = l->bytes;
		if (l->first_bytes > first_bytes) first_bytes = l->first_bytes;
	}
	const int from = g->inits > 1;      /* the first one stands apart */
	double init = median_life(g, true, from), destroy = median_life(g, false, 0);
	stat(g->library.path, &file);
	printf("%s: version %d, %d ranks on %d devices: CUDA %.0f ms; init %.1f ms the first time, then %.1f (slowest rank, median of %d), destroy %.1f; "
		"%.1f MB a communicator (largest rank), %.1f the first one, with its kernels; library %.1f MB\n", g->library.name, g->version, g->nranks, g->ndevices,
		cuda_ms, first, init, g->inits - from, destroy, (double)bytes / (1 << 20), (double)first_bytes / (1 << 20), (double)file.st_size / (1 << 20));
	if (!json) return;
	fputc('{', json);
	put_text("library", g->library.name);
	put_text("path", g->library.path);
	put_text("device", g->device_name);
	fprintf(json, "\"version\":%d,\"ranks\":%d,\"devices\":%d,\"sms\":%d,\"cuda_ms\":%.2f,\"first_init_ms\":%.2f,\"init_ms\":%.2f,\"inits\":%d,\"destroy_ms\":%.2f,"
		"\"first_memory_bytes\":%lld,\"memory_bytes\":%lld,\"library_bytes\":%lld}\n", g->version, g->nranks, g->ndevices, g->sms, cuda_ms, first, init,
		g->inits, destroy, (long long)first_bytes, (long long)bytes, (long long)file.st_size);
	fflush(json);
}
