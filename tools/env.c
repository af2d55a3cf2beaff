/* `telpher env`: every parameter with its value and where it comes from, and for every NCCL_* name whether it is honoured or
 * has no effect here, and why. The same tables make the manual page telpher-env(7). */
#include "tools.h"

#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#define WIDTH 100

/* Sections in the order of this list, a component that isn't in it last and under its own name. */
static const struct { const char *component, *title; } sections[] = {
	{ "files", "Configuration files" },
	{ "log", "Log" },
	{ "launch", "The process's place in the job (telpher run sets these)" },
	{ "host", "Host" },
	{ "engine", "The engine thread" },
	{ "boot", "Start-up and life signs" },
	{ "comm", "Communicators" },
	{ "gpu", "GPUs" },
	{ "exec", "GPU kernels" },
	{ "mem", "Registered memory" },
	{ "plan", "Choice of algorithms" },
	{ "link", "Links between ranks" },
	{ "topo", "The machine" },
	{ "net", "Networks" },
	{ "socket", "TCP sockets" },
	{ "ib", "InfiniBand and RoCE" },
	{ "plugin", "Telpher's transports for the original NCCL (libnccl-net-telpher.so)" },
	{ "verbs", "The software card (libibverbs.so.1)" },
	{ "watch", "Guarantees and diagnosis" },
};

struct entry { size_t section; const char *component; struct tp_param *param; };

static size_t section_of(const char *component)
{
	size_t i = 0;
	while (i < TP_ARRAY_LEN(sections) && strcmp(sections[i].component, component)) i++;
	return i;
}

static int by_section_and_name(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;
	if (x->section != y->section) return x->section < y->section ? -1 : 1;
	int order = strcmp(x->component, y->component);
	return order ? order : strcmp(x->param->name, y->param->name);
}

/* All parameters, sorted; freed by the caller. NULL: out of memory. */
static struct entry *sorted_parameters(size_t *count)
{
	size_t total = 0, n = 0;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next) total += t->count;
	struct entry *all = calloc(total ? total : 1, sizeof(*all));
	for (const struct tp_param_table *t = tp_param_first_table(); t && all; t = t->next)
		for (size_t i = 0; i < t->count; i++) all[n++] = (struct entry){ section_of(t->component), t->component, &t->params[i] };
	if (all) qsort(all, n, sizeof(*all), by_section_and_name);
	*count = n;
	return all;
}

/* The title of the section that begins at this entry; NULL: none does. */
static const char *title_at(const struct entry *all, size_t i)
{
	if (i && all[i].section == all[i - 1].section && !strcmp(all[i].component, all[i - 1].component)) return NULL;
	return all[i].section < TP_ARRAY_LEN(sections) ? sections[all[i].section].title : all[i].component;
}

/* Prints words from column `at` on, further lines from column `indent` on, none wider than WIDTH where words allow it. */
static void print_wrapped(int at, int indent, const char *text)
{
	bool first = true;
	for (;;) {
		text += strspn(text, " ");
		int bytes = (int)strcspn(text, " "), columns = 0;
		if (!bytes) break;
		for (int i = 0; i < bytes; i++) columns += ((unsigned char)text[i] & 0xc0) != 0x80;
		if (!first && at + 1 + columns > WIDTH) {
			printf("\n%*s", indent, "");
			at = indent;
			first = true;
		}
		printf("%s%.*s", first ? "" : " ", bytes, text);
		at += columns + !first;
		first = false;
		text += bytes;
	}
	printf("\n");
}

/* "from 1 to 128", with "bytes" for a size; "a, b or c"; "text". */
static void describe_kind(const struct tp_param *p, char *text, size_t size)
{
	size_t used = 0;
	switch (p->kind) {
	case TP_PARAM_BOOL:
		snprintf(text, size, "0 or 1");
		break;
	case TP_PARAM_STRING:
		snprintf(text, size, "text");
		break;
	case TP_PARAM_ENUM:
		text[0] = 0;
		for (const char *c = p->choices; *c && used < size;) {
			int length = (int)strcspn(c, "|");
			bool last = !c[length];
			used += (size_t)snprintf(text + used, size - used, "%s%.*s", c == p->choices ? "" : last ? " or " : ", ", length, c);
			c += length + !last;
		}
		break;
	default:
		snprintf(text, size, "%lld to %lld%s", (long long)p->min, (long long)p->max, p->kind == TP_PARAM_BYTES ? " bytes" : "");
	}
}

static const char *quote_for(const char *fallback) { return fallback && strchr(fallback, ' ') ? "\"" : ""; }

static void print_parameter(struct tp_param *p)
{
	char kind[128], line[640];
	bool set = tp_param_is_set(p);
	const char *value = tp_param_is_secret(p) && set ? "(not shown)" : tp_param_string(p);
	const char *from = !set ? "default" : p->origin == TP_FROM_FILE ? p->origin_file : "environment";
	printf("  %-32s %-30s %s\n", p->name, !value ? "(unset)" : *value ? value : "(empty)", from);
	describe_kind(p, kind, sizeof(kind));
	const char *quote = quote_for(p->fallback);
	bool any = p->kind == TP_PARAM_STRING;
	if (p->fallback) snprintf(line, sizeof(line), "%s (%s%sdefault %s%s%s)", p->doc, any ? "" : kind, any ? "" : "; ", quote, p->fallback, quote);
	else snprintf(line, sizeof(line), "%s%s%s%s", p->doc, any ? "" : " (", any ? "" : kind, any ? "" : ")");
	printf("      ");
	print_wrapped(6, 6, line);
}

static int print_parameters(void)
{
	size_t count;
	struct entry *all = sorted_parameters(&count);
	if (!all) return 1;
	for (size_t i = 0; i < count; i++) {
		const char *title = title_at(all, i);
		if (title) printf("%s%s\n", i ? "\n" : "", title);
		print_parameter(all[i].param);
	}
	free(all);
	return 0;
}

static void print_name(const char *status, const char *name, const char *why)
{
	if (!*why) { printf("  %-10s %s\n", status, name); return; }
	int at = printf("  %-10s %-40s", status, name);
	if (at < 54) printf(" ");
	else printf("\n%*s", 54, "");
	print_wrapped(54, 54, why);
}

static void print_unknown(void *arg, const char *name, const char *where, enum tp_env_status status, const char *nearest)
{
	int *count = arg;
	char text[256];
	if (status != TP_ENV_UNKNOWN) return;
	if (!(*count)++) printf("\nSet, and unknown\n");
	if (nearest) snprintf(text, sizeof(text), "did you mean %s? (%s)", nearest, where);
	else snprintf(text, sizeof(text), "nothing reads it (%s)", where);
	print_name("unknown", name, text);
}

static bool is_of(const struct tp_param *p, const char *component)
{
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next)
		if (p >= t->params && p < t->params + t->count) return !strcmp(t->component, component);
	return false;
}

/* Ranks report and expect what the topology says under most of the topology's; how data goes follows from what was tried at init. These say
 * which devices links use, and whether cards reach GPU memory. */
static bool only_reports(const struct tp_env_name *name, const struct tp_param *p)
{
	static const char *const heeded[] = { "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_NET_GDR_C2C", "NCCL_NET_FORCE_FLUSH", "NCCL_GDR_FLUSH_DISABLE",
		"NCCL_CROSS_NIC", "NCCL_NETDEVS_POLICY" };

	for (size_t i = 0; i < sizeof(heeded) / sizeof(heeded[0]); i++)
		if (!strcmp(name->name, heeded[i])) return false;
	return is_of(p, "topo") && strncmp(name->name, "NCCL_TOPO_", 10) != 0 && !strstr(name->name, "_DUMP_FILE");
}

static void print_honoured(const struct tp_env_name *name, struct tp_param *p)
{
	const char *set = tp_param_is_set(p) ? "(set)" : "", *by = only_reports(name, p) ? "in what is reported and expected, not in the way data goes" : "";
	char text[96];
	snprintf(text, sizeof(text), "%s%s%s", set, *set && *by ? " " : "", by);
	print_name("honoured", name->name, text);
}

static void print_names(void)
{
	size_t count;
	const struct tp_env_name *names = tp_env_names(&count);
	printf("NCCL's names\n");
	for (size_t i = 0; i < count; i++) {
		struct tp_param *p = tp_param_find(names[i].name);
		if (p) print_honoured(&names[i], p);
		else print_name("no effect", names[i].name, names[i].why);
	}
	int unknown = 0;
	tp_env_visit_set(print_unknown, &unknown);
}

/* Text of a manual page: "-" and "\" as they are, no line a request. */
static void print_troff(const char *text)
{
	if (*text == '.' || *text == '\'') printf("\\&");
	for (; *text; text++) {
		if (*text == '\\') printf("\\e");
		else if (*text == '-') printf("\\-");
		else putchar(*text);
	}
}

static void print_manual_parameter(const struct tp_param *p)
{
	char kind[128];
	describe_kind(p, kind, sizeof(kind));
	printf(".TP\n.B %s\n", p->name);
	/* Docs begin like the middle of a sentence; a page doesn't. */
	if (*p->doc >= 'a' && *p->doc <= 'z') putchar(*p->doc - 'a' + 'A');
	print_troff(*p->doc >= 'a' && *p->doc <= 'z' ? p->doc + 1 : p->doc);
	printf(".\n");
	if (p->kind != TP_PARAM_STRING) {
		printf("Value: ");
		print_troff(kind);
		printf(".\n");
	}
	const char *quote = quote_for(p->fallback);
	printf("%s%s", p->fallback ? "Default: " : "Unset by default", quote);
	print_troff(p->fallback ? p->fallback : "");
	printf("%s.\n", quote);
}

/* troff for the manual page telpher-env(7). */
static int print_manual(const char *date)
{
	static const char head[] = ".SH NAME\ntelpher\\-env \\- parameters of libnccl.so.2 and the telpher command\n.SH DESCRIPTION\n"
		"A parameter is an environment variable, or a line\n.I NAME=value\nof a configuration file (# begins a comment).\n"
		"The environment wins; then the file that\n.B NCCL_CONF_FILE\nnames or, where that is unset,\n.IR ~/.nccl.conf ;\n"
		"then\n.IR /etc/nccl.conf .\nValues are read once in the life of a process.\n.PP\n"
		"A value that is none is warned of, and the default holds.\nA flag takes 0, 1, no, yes, off, on, false or true; "
		"a number of bytes may end in K, M, G or T.\n"
		"An unknown name that begins with NCCL_ or TELPHER_ is warned of with the nearest known one.\n.PP\n"
		"Names of NCCL's have NCCL's meaning.\nThose that have no effect here are listed with the reason by\n.BR \"telpher env\" ,\n"
		"which also prints the value of every parameter and where it comes from.\n";
	size_t count;
	struct entry *all = sorted_parameters(&count);
	if (!all) return 1;
	printf(".\\\" Made from the parameter tables by telpher env --man.\n.TH TELPHER\\-ENV 7 \"%s\" \"telpher\"\n%s", date, head);
	for (size_t i = 0; i < count; i++) {
		const char *title = title_at(all, i);
		if (title) {
			printf(".SH \"");
			print_troff(title);
			printf("\"\n");
		}
		print_manual_parameter(all[i].param);
	}
	printf(".SH FILES\n.TP\n.I ~/.nccl.conf\nRead unless\n.B NCCL_CONF_FILE\nnames another.\n.TP\n.I /etc/nccl.conf\nRead last.\n"
		".SH SEE ALSO\n.BR telpher (1),\n.BR telpher\\-explain (1),\n.BR telpher\\-run (1),\n.BR telpher (3)\n");
	free(all);
	return 0;
}

int tool_env(int argc, char **argv)
{
	int manual = 0, names_only = 0;
	char *date = NULL;
	struct poptOption options[] = {
		{ "names", 0, POPT_ARG_NONE, &names_only, 0, "only NCCL's names: honoured, no effect (why), unknown", NULL },
		{ "man", 0, POPT_ARG_NONE, &manual, 0, "print the manual page telpher-env(7)", NULL },
		{ "date", 0, POPT_ARG_STRING | POPT_ARGFLAG_DOC_HIDDEN, &date, 0, NULL, NULL },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher env", argc, (const char **)argv, options, 0);
	int rc = tool_next_option(context, options), status = 0;
	if (rc < -1) status = tool_usage_error("env", "%s: %s", poptBadOption(context, 0), poptStrerror(rc));
	else if (poptPeekArg(context)) status = tool_usage_error("env", "takes no '%s'", poptPeekArg(context));
	poptFreeContext(context);
	if (status) {
		free(date);
		return status;
	}
	if (manual) {
		status = print_manual(date ? date : "");
	} else {
		if (!names_only) status = print_parameters();
		if (!names_only) printf("\n");
		print_names();
	}
	free(date);
	return status;
}
