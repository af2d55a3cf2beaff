/* `telpher env`: every parameter with its value and where it comes from, and for every NCCL_* name whether it is honoured,
 * has no effect here (why), or is unknown. */
#include "tools.h"

#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

extern char **environ;

static const char *kind_text(const struct tp_param *p, char *text, size_t size)
{
	switch (p->kind) {
	case TP_PARAM_BOOL: return "0 or 1";
	case TP_PARAM_ENUM: return p->choices;
	case TP_PARAM_STRING: return "text";
	default:
		snprintf(text, size, "%lld to %lld%s", (long long)p->min, (long long)p->max, p->kind == TP_PARAM_BYTES ? " bytes" : "");
		return text;
	}
}

static void print_parameter(struct tp_param *p)
{
	bool set = tp_param_is_set(p);
	const char *value = tp_param_is_secret(p) && set ? "(secret)" : tp_param_string(p);
	const char *from = !set ? "default" : p->origin == TP_FROM_FILE ? p->origin_file : "environment";
	printf("%-34s %-18s %-12s %s\n", p->name, value ? value : "(unset)", from, p->doc);
}

static void print_all(void)
{
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next) {
		printf("# %s\n", t->component);
		for (size_t i = 0; i < t->count; i++) print_parameter(&t->params[i]);
	}
}

static void print_names(void)
{
	size_t count;
	const struct tp_env_name *names = tp_env_names(&count);
	printf("# NCCL's names\n");
	for (size_t i = 0; i < count; i++) {
		const char *status = names[i].status == TP_ENV_HONOURED ? "honoured" : names[i].status == TP_ENV_NO_EFFECT ? "no effect" : "unknown";
		printf("%-42s %-10s %s\n", names[i].name, status, names[i].why ? names[i].why : "");
	}
	for (char **e = environ; *e; e++) {
		if (strncmp(*e, "NCCL_", 5)) continue;
		size_t length = strcspn(*e, "="), k = 0;
		while (k < count && (strlen(names[k].name) != length || strncmp(names[k].name, *e, length))) k++;
		if (k == count) printf("%-42.*s %-10s set here, and no name of NCCL's\n", (int)length, *e, "unknown");
	}
}

/* troff for the manual page telpher-env(7). */
static void print_manual(void)
{
	char text[64];
	printf(".TH TELPHER\\-ENV 7\n.SH NAME\ntelpher\\-env \\- parameters of libnccl.so.2 and the telpher command\n.SH DESCRIPTION\n"
		"Each is an environment variable and a line NAME=value of the files $NCCL_CONF_FILE, ~/.nccl.conf and /etc/nccl.conf; the environment wins.\n");
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next) {
		printf(".SH %s\n", t->component);
		for (size_t i = 0; i < t->count; i++) {
			const struct tp_param *p = &t->params[i];
			printf(".TP\n.B %s\n%s. Takes %s; default %s.\n", p->name, p->doc, kind_text(p, text, sizeof(text)), p->fallback ? p->fallback : "unset");
		}
	}
}

int tool_env(int argc, char **argv)
{
	int manual = 0, names_only = 0;
	struct poptOption options[] = {
		{ "names", 0, POPT_ARG_NONE, &names_only, 0, "only NCCL's names: honoured, no effect (why), unknown", NULL },
		{ "man", 0, POPT_ARG_NONE, &manual, 0, "print the manual page telpher-env(7)", NULL },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher env", argc, (const char **)argv, options, 0);
	int rc = poptGetNextOpt(context);
	if (rc < -1) return tool_usage_error("env", "%s: %s", poptBadOption(context, 0), poptStrerror(rc));
	if (poptPeekArg(context)) return tool_usage_error("env", "takes no '%s'", poptPeekArg(context));
	poptFreeContext(context);
	if (manual) { print_manual(); return 0; }
	if (!names_only) print_all();
	print_names();
	return 0;
}
