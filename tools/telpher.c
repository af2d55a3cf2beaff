/* `telpher`: runs, measures and explains. This file finds the sub-command; each has a file of its own. */
#include "tools.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct { const char *name; int (*main)(int argc, char **argv); const char *doc; } tools[] = {
	{ "run", tool_run, "start ranks on this machine, as one or several virtual hosts" },
	{ "perf", tool_perf, "measure and check every collective, with nccl-tests' flags and columns" },
	{ "explain", tool_explain, "say which plan a collective would run, what each candidate would cost, and why" },
	{ "tune", tool_tune, "measure every algorithm and make the cost model's constants for this machine of it" },
	{ "topo", tool_topo, "the machine as tree, matrix or picture; why a path is as it is; what differs from a healthy one" },
#ifdef TELPHER_VERBS
	{ "verbs", tool_verbs, "run RDMA programs on the software card, and show the card" },
#endif
#ifdef TELPHER_PROBE
	{ "probe", tool_probe, "what an RDMA card does: bandwidth and latency, registration, connections, the ways to it" },
#endif
	{ "calc", tool_calc, "the arithmetic of links, cards and collectives, each number with its formula and source" },
	{ "env", tool_env, "list every parameter with its value and where it comes from" },
};

bool tool_parse_size(const char *text, size_t *out)
{
	char *end;
	if (*text < '0' || *text > '9') return false;
	errno = 0;
	unsigned long long value = strtoull(text, &end, 10);
	unsigned shift = 0;
	switch (*end) {
	case 'k': case 'K': shift = 10; end++; break;
	case 'm': case 'M': shift = 20; end++; break;
	case 'g': case 'G': shift = 30; end++; break;
	case 't': case 'T': shift = 40; end++; break;
	default: break;
	}
	if (*end == 'i' && shift) end++;
	if ((*end == 'b' || *end == 'B') && shift) end++;
	if (errno || *end || value > (SIZE_MAX >> 1) >> shift) return false;
	*out = (size_t)value << shift;
	return true;
}

struct tool_place tool_place_of(int rank, int nranks, int nhosts)
{
	int least = nranks / nhosts, larger = nranks % nhosts, in_larger = larger * (least + 1);
	if (rank < in_larger) return (struct tool_place){ rank / (least + 1), rank % (least + 1), least + 1 };
	return (struct tool_place){ larger + (rank - in_larger) / least, (rank - in_larger) % least, least };
}

int tool_next_option(poptContext context, struct poptOption *options)
{
	enum { MOST = 64, TEXT = 0x10000 };
	char *had[MOST] = { 0 };
	int code;

	for (int i = 0; i < MOST && (options[i].longName || options[i].shortName || options[i].arg); i++) {
		if ((options[i].argInfo & POPT_ARG_MASK) == POPT_ARG_STRING && options[i].arg && options[i].val == 0) options[i].val = TEXT + i;
		if (options[i].val == TEXT + i) had[i] = *(char **)options[i].arg;      /* of a call before, between options that return */
	}
	while ((code = poptGetNextOpt(context)) >= TEXT) {
		char **text = options[code - TEXT].arg;
		free(had[code - TEXT]);
		had[code - TEXT] = *text;
	}
	return code;
}

int tool_usage_error(const char *name, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "telpher %s: ", name);
	vfprintf(stderr, format, args);
	fprintf(stderr, " (telpher %s --help)\n", name);
	va_end(args);
	return TOOL_USAGE;
}

static int print_help(FILE *to)
{
	fprintf(to, "usage: telpher COMMAND [ARGUMENTS]\n\n");
	for (size_t i = 0; i < sizeof(tools) / sizeof(tools[0]); i++)
		fprintf(to, "  %-9s %s\n", tools[i].name, tools[i].doc);
	fprintf(to, "\n`telpher COMMAND --help` says more.\n");
	return to == stdout ? 0 : TOOL_USAGE;
}

/* A full disk takes what was printed without a word, unless somebody asks. */
static int finish(int status)
{
	errno = 0;
	bool lost = fflush(stdout) != 0 || ferror(stdout);
	if (!lost || status != 0) return status;
	fprintf(stderr, "telpher: what was to be printed couldn't all be written: %s\n", errno ? strerror(errno) : "standard output refused some of it");
	return 1;
}

int main(int argc, char **argv)
{
#ifdef TELPHER_PROBE
	const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
	if (argc > 0 && !strcmp(slash ? slash + 1 : argv[0], "rdma_write")) return finish(tool_rdma_write(argc, argv));
#endif
	if (argc < 2) return print_help(stderr);
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) return finish(print_help(stdout));
	for (size_t i = 0; i < sizeof(tools) / sizeof(tools[0]); i++)
		if (!strcmp(argv[1], tools[i].name)) {
			/* What --help and --usage call it. */
			char name[32];
			snprintf(name, sizeof(name), "telpher %s", tools[i].name);
			argv[1] = name;
			return finish(tools[i].main(argc - 1, argv + 1));
		}
	fprintf(stderr, "telpher: there is no command '%s'\n", argv[1]);
	return print_help(stderr);
}
