/* `telpher probe`: which command it is, and the small things that all of them need; see probe.h. */
#include "probe/probe.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

static char name[48] = "probe", last[1200];

void probe_set_name(const char *given) { snprintf(name, sizeof(name), "%s", given); }

static void remember(const char *format, va_list args)
{
	vsnprintf(last, sizeof(last), format, args);
	fflush(stdout);
	fprintf(stderr, "telpher %s: %s\n", name, last);
}

int probe_fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	remember(format, args);
	va_end(args);
	return 1;
}

int probe_fail_below(const char *what)
{
	return what ? probe_fail("%s: %s", what, tp_log_last_error()) : probe_fail("%s", tp_log_last_error());
}

const char *probe_last_error(void) { return last; }

void probe_note(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fflush(stdout);
	fprintf(stderr, "telpher %s: ", name);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
}

int probe_usage(const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return tool_usage_error(name, "%s", text);
}

double probe_now_us(void) { return (double)tp_clock_ns() / 1000; }

const char *probe_digits(double value, char text[32])
{
	double size = fabs(value);
	int decimals = size > 0 ? 2 - (int)floor(log10(size)) : 0;
	/* Rounding may give one digit more before the point: 9.996 is 10.0. */
	if (size > 0 && decimals >= 0 && decimals < 15 && round(size * pow(10, decimals)) >= 1000) decimals--;
	snprintf(text, 32, "%.*f", decimals < 0 ? 0 : decimals > 12 ? 12 : decimals, value);
	return text;
}

const char *probe_size_text(size_t bytes, char text[32])
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
	int unit = 0;
	while (unit < 4 && bytes >= 1024 && bytes % 1024 == 0) {
		bytes /= 1024;
		unit++;
	}
	snprintf(text, 32, "%zu %s", bytes, units[unit]);
	return text;
}

int probe_print_json(cJSON *json)
{
	char *text = cJSON_Print(json);
	cJSON_Delete(json);
	errno = 0;
	bool bad = !text || printf("%s\n", text) < 0 || fflush(stdout);
	cJSON_free(text);
	return bad ? probe_fail("the JSON can't be written: %s", strerror(errno ? errno : ENOSPC)) : 0;
}

static const struct { const char *name; int (*main)(int argc, char **argv); const char *words, *doc; } commands[] = {
	{ "write", probe_write, "[-d DEV] [-g GID] [-s BYTES] [SERVER]", "one block by RDMA, checked; --sweep: every size; --op read, send" },
	{ "paths", probe_paths, "[FILE|MODEL]", "TCP, RDMA staged through the host, GPUDirect: what each costs and where its bound is" },
	{ "reg", probe_reg, "", "registration of memory: its time by size and kind of page, and when it pays" },
	{ "connect", probe_connect, "", "a connection's cost, step by step, and what a job of a given size needs" },
	{ "cost", probe_cost, "[COLLECTIVE]", "each collective's time from alpha, beta, ranks and hosts, by each algorithm" },
	{ "matrix", probe_matrix, "", "every GPU (or NUMA node) by every NIC, measured; --record: onto a map" },
};

static int help(FILE *to)
{
	fprintf(to, "usage: telpher probe COMMAND [ARGUMENTS]\n\n");
	for (size_t i = 0; i < TP_ARRAY_LEN(commands); i++) fprintf(to, "  %-8s %-38s %s\n", commands[i].name, commands[i].words, commands[i].doc);
	fprintf(to, "\n`telpher probe COMMAND --help` has the options. Without RDMA hardware: -d telpher0, or `telpher verbs run telpher probe …`.\n");
	return to == stdout ? 0 : TOOL_USAGE;
}

int tool_probe(int argc, char **argv)
{
	char full[48];
	if (argc < 2) return help(stderr);
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) return help(stdout);
	for (size_t i = 0; i < TP_ARRAY_LEN(commands); i++) {
		if (strcmp(argv[1], commands[i].name)) continue;
		snprintf(full, sizeof(full), "telpher probe %s", commands[i].name);
		probe_set_name(full + strlen("telpher "));
		/* What --help and --usage call it. */
		argv[1] = full;
		return commands[i].main(argc - 1, argv + 1);
	}
	return tool_usage_error("probe", "there is no command '%s'", argv[1]);
}

int tool_rdma_write(int argc, char **argv)
{
	probe_set_name("probe write");
	return probe_write(argc, argv);
}
