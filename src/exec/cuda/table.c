/* Up to which sizes each kind of kernel moves each collective, by kind of machine: rows of text, {which machines, which ranks, thresholds}. Those built in
 * say what was measured; those of the user (TELPHER_CUDA_TABLE, or a file that it names and telpher tune --gpu writes) are read after them. Rows are
 * applied in order, each that fits the machine over what those before it say. One grammar serves both. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/cuda/internal.h"

enum { KB = 1 << 10, MB = 1 << 20, GB = 1 << 30, LARGEST_TABLE = 64 << 10 };
#define NEVER UINT64_MAX

/* Two ranks with NVLink between them. Copies carry 320 GB/s, pipes 330, so copies are for what is so large that this hardly counts, and leave the
 * multiprocessors free; a broadcast they carry at 300. */
#define TWO_BY_NVLINK "two_shot=96K:1G:536870913,gather=96K:1G:16M,scatter=96K:1G:32M,pairs=96K:1G:16M,rooted=96K:16M:8M,reduce=16M,copies=256M\n"

static const char built_in[] =
	/* Whatever isn't known better. Lines of 128 bytes count where they are allowed, without NVLink the first column alone. Copies, predicted: two kernels
	 * and the first copy take 12 us, and a further copy's start 2; then a link carries 392 GB/s, where lines were measured to need 7 us and 3.4 us a MB
	 * with four ranks. A broadcast to several sends its bytes twice less a slice, which the lines' two steps beat at all sizes. */
	"one_shot=96K:1M,two_shot=96K:1024G,gather=96K:1024G,scatter=96K:1024G,pairs=96K:1024G,rooted=96K:16M,two_step=0:1024G,two_step_from=512K,stream=16K,reduce=never,"
	"window=1M,cut=1G,transfers=never,copies=16M,copies_rooted=never,offer=4M,pipes=1,threads=128:256\n"
	/* Two ranks send in one shot as much as in two; with more, two shots soon send less. */
	"[ranks=2] one_shot=96K:8M\n"
	/* Sends and receives, predicted: between two H200 a kernel that pushes as pipes do carried 128 MB in 429 us, lines in 671. With more it is the same
	 * link, one way and peer by peer. */
	"[ranks=2-8 join=nvlink] transfers=12M\n"
	/* Measured on H200. Its kin is taken for its like until somebody measures it. */
	"[cc=9.0 ranks=2 join=nvlink] " TWO_BY_NVLINK
	"[gpu=H200 ranks=2 join=nvlink] " TWO_BY_NVLINK
	"[gpu=H200 ranks=4 join=nvlink] one_shot=96K:1M,two_shot=96K:1024G,gather=96K:1024G,scatter=96K:1024G,pairs=96K:1024G,rooted=96K:16M,two_step=0:1024G,two_step_from=512K\n"
	/* On one GPU nothing crosses a wire: LL's second half costs memory bandwidth only, of which there is plenty. Lines of 128 bytes only where
	 * TELPHER_LL128=on asks for them. Measured with two and four ranks: they are as good as steps between two, twice as good between four, and worse
	 * where all is reduced. */
	"[join=shared] one_shot=4M:4M:never,two_shot=4M:8M:never,gather=4M:1024G:never,scatter=4M:1024G:never,pairs=4M:1024G:never,rooted=1M:16M:never,"
	"two_step=0:16M:never,stream=1M,transfers=never,pipes=0,copies=never,copies_rooted=never\n";

enum tp_cuda_pipes tp_fused_table_pipes(const struct tp_fused_table *t)
{
	const struct tp_fused_limit *l = t->limits;
	if (!t->pipes) return TP_CUDA_PIPES_NONE;
	if (t->reduce != NEVER || l[TP_FUSED_TWO_SHOT].pipes != NEVER || l[TP_FUSED_SCATTER].pipes != NEVER || l[TP_FUSED_OWNERS].pipes != NEVER)
		return TP_CUDA_PIPES_ALL;
	if (l[TP_FUSED_GATHER].pipes != NEVER || l[TP_FUSED_PAIRS].pipes != NEVER || l[TP_FUSED_ROOTED].pipes != NEVER) return TP_CUDA_PIPES_MOVE;
	return t->transfers != NEVER ? TP_CUDA_PIPES_TRANSFER : TP_CUDA_PIPES_NONE;
}

/* ---- the grammar ---- */

static struct tp_param params[] = {
	{ .name = "TELPHER_CUDA_TABLE", .kind = TP_PARAM_STRING,
		.doc = "GPUs: up to which sizes which kernels move what, over what is built in: NAME=LL:LL128 or NAME=LL:LL128:PIPES (bytes that a rank sends, up to "
			"which these lines and from which on pipes are used; one_shot, two_shot, gather, scatter, pairs, rooted, two_step), NAME=BYTES (from which on, or never: "
			"window, two_step_from, stream, copies, copies_rooted: by copy engines, reduce, transfers: through pipes, offer: registered buffers), cut=BYTES (of a launch, over all ranks: what is larger takes several), pipes=0, 1 or 2 (never, over NVLink from compute capability 9.0 on, always), "
			"threads=LL:LL128 (of a block), with commas between; @FILE: a file with such entries, and [gpu=NAME cc=N.N ranks=N join=shared, nvlink or pcie] before those "
			"of one kind of machine, as telpher tune --gpu -o FILE writes it; rank 0's counts" },
};
TP_PARAM_TABLE("exec", params)

static const char *const class_names[TP_FUSED_CLASSES] = { [TP_FUSED_ONE_SHOT] = "one_shot", [TP_FUSED_TWO_SHOT] = "two_shot",
	[TP_FUSED_GATHER] = "gather", [TP_FUSED_SCATTER] = "scatter", [TP_FUSED_PAIRS] = "pairs", [TP_FUSED_ROOTED] = "rooted", [TP_FUSED_OWNERS] = "two_step" };
static const char *const join_names[] = { [TP_FUSED_NVLINK] = "nvlink", [TP_FUSED_PCIE] = "pcie", [TP_FUSED_SHARED] = "shared" };

const char *tp_fused_join_name(enum tp_fused_join join) { return join_names[join]; }

/* Digits, then K, M or G; or "never". */
static bool read_bytes(const char **at, uint64_t *out)
{
	char *end;
	if (strncmp(*at, "never", 5) == 0) {
		*at += 5;
		*out = NEVER;
		return true;
	}
	if (**at < '0' || **at > '9') return false;
	uint64_t v = strtoull(*at, &end, 10), unit = *end == 'K' ? KB : *end == 'M' ? MB : *end == 'G' ? GB : 1;
	if (v > UINT64_MAX / unit) return false;
	*at = end + (unit > 1);
	*out = v * unit;
	return true;
}

static bool read_entry(const char **at, struct tp_fused_table *table)
{
	struct { const char *name; uint64_t *first, *second, *third; } entries[TP_FUSED_CLASSES + 10] = { { .name = "window", .first = &table->window },
		{ .name = "two_step_from", .first = &table->owners }, { .name = "stream", .first = &table->stream },
		{ .name = "reduce", .first = &table->reduce }, { .name = "offer", .first = &table->offer }, { .name = "pipes", .first = &table->pipes },
		{ .name = "copies", .first = &table->copies }, { .name = "copies_rooted", .first = &table->copies_rooted },
		{ .name = "transfers", .first = &table->transfers }, { .name = "cut", .first = &table->cut } };
	for (int c = 0; c < TP_FUSED_CLASSES; c++) {
		entries[10 + c].name = class_names[c];
		entries[10 + c].first = &table->limits[c].ll;
		entries[10 + c].second = &table->limits[c].ll128;
		entries[10 + c].third = &table->limits[c].pipes;
	}
	if (strncmp(*at, "threads=", 8) == 0) {
		uint64_t threads[2];
		*at += 8;
		if (!read_bytes(at, &threads[0]) || *(*at)++ != ':' || !read_bytes(at, &threads[1])) return false;
		for (int p = 0; p < 2; p++) {
			if (threads[p] < 32 || threads[p] > TP_DEV_THREADS) return false;
			table->threads[p] = (uint32_t)threads[p] / 32 * 32;
		}
		return true;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(entries); i++) {
		size_t n = strlen(entries[i].name);
		if (strncmp(*at, entries[i].name, n) != 0 || (*at)[n] != '=') continue;
		*at += n + 1;
		if (!read_bytes(at, entries[i].first)) return false;
		if (!entries[i].second) return true;
		if (*(*at)++ != ':' || !read_bytes(at, entries[i].second)) return false;
		if (**at != ':') return true;
		++*at;
		return read_bytes(at, entries[i].third);
	}
	return false;
}

/* Is one of the words between | the machine's? The end of a word with blanks in it is a quotation mark. */
static bool read_words(const char **at, bool (*fits)(const struct tp_fused_machine *m, const char *word, size_t n, bool *bad), const struct tp_fused_machine *m,
	bool *fit)
{
	bool bad = false;
	*fit = false;
	for (;;) {
		bool quoted = **at == '"';
		const char *word = *at + quoted;
		size_t n = strcspn(word, quoted ? "\"\n" : "| ]\t\r\n");
		if (!n || (quoted && word[n] != '"')) return false;
		*fit |= fits(m, word, n, &bad);
		*at = word + n + quoted;
		if (bad || **at != '|') return !bad;
		++*at;
	}
}

static bool fits_gpu(const struct tp_fused_machine *m, const char *word, size_t n, bool *bad)
{
	(void)bad;
	return memmem(m->gpu, strlen(m->gpu), word, n) != NULL;
}

/* Two numbers with something between, or one. */
static bool read_pair(const char *word, size_t n, char between, int *first, int *second)
{
	char *end;
	if (*word < '0' || *word > '9') return false;
	*first = *second = (int)strtol(word, &end, 10);
	if (*end == between && end < word + n && end[1] >= '0' && end[1] <= '9') *second = (int)strtol(end + 1, &end, 10);
	return end == word + n;
}

static bool fits_ranks(const struct tp_fused_machine *m, const char *word, size_t n, bool *bad)
{
	int first, last;
	if (!read_pair(word, n, '-', &first, &last) || first < 1 || last < first) return *bad = true, false;
	return m->nranks >= first && m->nranks <= last;
}

/* That compute capability or a later one. */
static bool fits_cc(const struct tp_fused_machine *m, const char *word, size_t n, bool *bad)
{
	int major, minor;
	if (!read_pair(word, n, '.', &major, &minor) || !memchr(word, '.', n)) return *bad = true, false;
	return m->major > major || (m->major == major && m->minor >= minor);
}

static bool fits_join(const struct tp_fused_machine *m, const char *word, size_t n, bool *bad)
{
	for (size_t j = 0; j < TP_ARRAY_LEN(join_names); j++)
		if (strlen(join_names[j]) == n && strncmp(join_names[j], word, n) == 0) return m->join == j;
	return *bad = true, false;
}

/* [gpu=NAME ranks=N join=HOW]; at: behind the bracket. */
static bool read_machine(const char **at, const struct tp_fused_machine *m, bool *fit)
{
	static const struct { const char *name; bool (*fits)(const struct tp_fused_machine *, const char *, size_t, bool *); } conditions[] = {
		{ "gpu=", fits_gpu }, { "ranks=", fits_ranks }, { "cc=", fits_cc }, { "join=", fits_join } };
	*fit = true;
	for (*at += strspn(*at, " \t"); **at != ']'; *at += strspn(*at, " \t")) {
		size_t i = 0;
		bool its;
		while (i < TP_ARRAY_LEN(conditions) && strncmp(*at, conditions[i].name, strlen(conditions[i].name))) i++;
		if (i == TP_ARRAY_LEN(conditions)) return false;
		*at += strlen(conditions[i].name);
		if (!read_words(at, conditions[i].fits, m, &its)) return false;
		*fit = *fit && its;
	}
	++*at;
	return true;
}

/* NULL: read to its end; else where it can't be read. */
static const char *read_rows(const char *text, const struct tp_fused_machine *m, struct tp_fused_table *table)
{
	const char *at = text;
	bool fit = true;
	for (;;) {
		struct tp_fused_table ignored = *table;
		at += strspn(at, " \t\r\n,");
		if (*at == '#') at += strcspn(at, "\n");
		const char *entry = at;
		if (!*at) return NULL;
		if (*at == '\n') continue;
		if (*at == '[') {
			at++;
			if (!read_machine(&at, m, &fit)) return entry;
		} else if (!read_entry(&at, fit ? table : &ignored) || (*at && !strchr(" \t\r\n,#[", *at))) {
			return entry;
		}
	}
}

/* ---- what is so, and what the user says ---- */

void tp_fused_defaults(const struct tp_fused_machine *machine, struct tp_fused_table *out)
{
	*out = (struct tp_fused_table){ .max_blocks = TP_DEV_MAX_CHANNELS, .allows_128 = 1 };
	for (int c = 0; c < TP_FUSED_CLASSES; c++) out->limits[c].pipes = NEVER;
	if (read_rows(built_in, machine, out)) abort();
}

static ncclResult_t refuse(const char *where, const char *entry)
{
	return TP_FAIL(ncclInvalidUsage, "TELPHER_CUDA_TABLE: %s can't be read at '%.60s': wanted is NAME=LL:LL128 or NAME=LL:LL128:PIPES (one_shot, two_shot, "
		"gather, scatter, pairs, rooted, two_step), NAME=BYTES or NAME=never (window, two_step_from, stream, copies, copies_rooted, reduce, transfers, offer), cut=BYTES, pipes=0, 1 or 2, "
		"or threads=LL:LL128, with commas between; and, for one kind of machine, [gpu=NAME cc=MAJOR.MINOR ranks=N join=shared, nvlink or pcie] before them",
		where, entry);
}

static ncclResult_t read_file(const char *path, const struct tp_fused_machine *machine, struct tp_fused_table *table)
{
	char where[256];
	FILE *f = fopen(path, "re");
	if (!f) return TP_FAIL(ncclInvalidUsage, "TELPHER_CUDA_TABLE names %s, which can't be opened: %s", path, strerror(errno));
	char *text = tp_alloc(1, LARGEST_TABLE + 2, "a table of kernels");
	size_t bytes = text ? fread(text, 1, LARGEST_TABLE + 1, f) : 0;
	ncclResult_t result = text ? ncclSuccess : ncclSystemError;
	const char *bad = NULL;
	if (text && ferror(f)) result = TP_FAIL(ncclSystemError, "TELPHER_CUDA_TABLE: %s can't be read: %s", path, strerror(errno));
	else if (bytes > LARGEST_TABLE || (text && memchr(text, 0, bytes)))
		result = TP_FAIL(ncclInvalidUsage, "TELPHER_CUDA_TABLE: %s is no table: it has a zero byte, or more than %d bytes", path, LARGEST_TABLE);
	else if (text) bad = read_rows(text, machine, table);
	if (bad) {
		int line = 1;
		for (const char *c = text; c < bad; c++) line += *c == '\n';
		snprintf(where, sizeof(where), "%s:%d", path, line);
		char *end = strchr(bad, '\n');
		if (end) *end = 0;
		result = refuse(where, bad);
	}
	free(text);
	fclose(f);
	return result;
}

ncclResult_t tp_fused_read_table(const struct tp_fused_machine *machine, struct tp_fused_table *table)
{
	const char *text = tp_param_string(&params[0]), *bad;
	struct tp_fused_table t = *table;
	if (!text || !*text) return ncclSuccess;
	if (*text == '@') {
		TP_TRY(read_file(text + 1, machine, &t));
	} else if ((bad = read_rows(text, machine, &t))) {
		char where[128];
		snprintf(where, sizeof(where), "'%.100s'", text);
		return refuse(where, bad);
	}
	*table = t;
	return ncclSuccess;
}
