/* What of the environment and the files reaches us, what doesn't, and what was probably meant. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/internal.h"

#define NAMES_MAX 1024

/* What `telpher run` tells the ranks that it starts. They are read where they are needed, and known here. */
static struct tp_param launch_params[] = {
	{ .name = "TELPHER_RANK", .kind = TP_PARAM_STRING, .doc = "rank of this process in the job" },
	{ .name = "TELPHER_NRANKS", .kind = TP_PARAM_STRING, .doc = "number of ranks in the job" },
	{ .name = "TELPHER_LOCAL_RANK", .kind = TP_PARAM_STRING, .doc = "place of this process among the ranks of its host" },
	{ .name = "TELPHER_LOCAL_NRANKS", .kind = TP_PARAM_STRING, .doc = "number of ranks on the host of this process" },
	{ .name = "TELPHER_JOB", .kind = TP_PARAM_STRING, .doc = "name of the job, by which ranks of one machine and user find each other" },
};
TP_PARAM_TABLE("launch", launch_params)

static pthread_mutex_t report_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_env_name env_names[NAMES_MAX];
static bool reported;

void tp_report_before_fork(void) { pthread_mutex_lock(&report_lock); }
void tp_report_after_fork(void) { pthread_mutex_unlock(&report_lock); }

const struct tp_env_name *tp_env_names(size_t *count)
{
	size_t n = TP_MIN(tp_env_reason_count, (size_t)NAMES_MAX);
	static bool made;
	pthread_mutex_lock(&report_lock);
	/* Once: tables register before main, so what is honoured doesn't change. */
	for (size_t i = 0; i < n && !made; i++) {
		bool honoured = tp_param_find(tp_env_reasons[i].name) != NULL;
		env_names[i] = (struct tp_env_name){ tp_env_reasons[i].name, honoured ? TP_ENV_HONOURED : TP_ENV_NO_EFFECT,
			honoured ? NULL : tp_env_reasons[i].why };
	}
	made = true;
	pthread_mutex_unlock(&report_lock);
	*count = n;
	return env_names;
}

static const struct tp_env_reason *find_reason(const char *name)
{
	for (size_t i = 0; i < tp_env_reason_count; i++)
		if (strcmp(tp_env_reasons[i].name, name) == 0)
			return &tp_env_reasons[i];
	return NULL;
}

/* Edit distance (insert, delete, replace, swap of neighbours), at most limit + 1. */
static int distance(const char *a, const char *b, int limit)
{
	enum { MAX = 64 };
	size_t m = strlen(a), n = strlen(b);
	int row[3][MAX + 1];
	if (m > MAX || n > MAX || (m > n ? m - n : n - m) > (size_t)limit)
		return limit + 1;
	for (size_t j = 0; j <= n; j++)
		row[0][j] = (int)j;
	for (size_t i = 1; i <= m; i++) {
		int *now = row[i % 3], *before = row[(i + 2) % 3], *two = row[(i + 1) % 3];
		now[0] = (int)i;
		for (size_t j = 1; j <= n; j++) {
			int best = TP_MIN(before[j], now[j - 1]) + 1;
			best = TP_MIN(best, before[j - 1] + (a[i - 1] != b[j - 1]));
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				best = TP_MIN(best, two[j - 2] + 1);
			now[j] = best;
		}
	}
	return TP_MIN(row[m % 3][n], limit + 1);
}

const char *tp_param_nearest(const char *name, const char *const *names, size_t count)
{
	/* One slip in four letters behind the prefix, two at least: farther away, it's another word. */
	int limit = TP_MAX(2, (int)strlen(name) / 4);
	const char *nearest = NULL;
	for (size_t i = 0; i < count; i++) {
		int d = distance(name, names[i], limit);
		if (d <= limit) {
			limit = d - 1;
			nearest = names[i];
		}
	}
	return nearest;
}

static const char *nearest_known(const char *name)
{
	const char *names[NAMES_MAX];
	size_t count = 0, prefix = strcspn(name, "_") + 1;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next)
		for (size_t i = 0; i < t->count && count < NAMES_MAX; i++)
			if (strncmp(t->params[i].name, name, prefix) == 0)
				names[count++] = t->params[i].name;
	for (size_t i = 0; i < tp_env_reason_count && count < NAMES_MAX; i++)
		if (strncmp(tp_env_reasons[i].name, name, prefix) == 0)
			names[count++] = tp_env_reasons[i].name;
	return tp_param_nearest(name, names, count);
}

static void report_parameter(struct tp_param *param)
{
	if (!tp_param_is_set(param))
		return;
	const char *value = tp_param_is_secret(param) ? "(not shown)" : param->text;
	const char *stop = param->kind == TP_PARAM_STRING || param->kind == TP_PARAM_ENUM ? "" : ".";
	if (param->origin == TP_FROM_FILE)
		TP_INFO(TP_ENV, "%s set by %s to %s%s", param->name, param->origin_file, value, stop);
	else
		TP_INFO(TP_ENV, "%s set by environment to %s%s", param->name, value, stop);
}

/* Variables of builds, images and test programs, which no NCCL reads at run time, and those of other libraries of ours. */
static bool not_ours(const char *name)
{
	static const char *const prefixes[] = { "NCCL_VERSION", "NCCL_ROOT", "NCCL_HOME", "NCCL_INCLUDE", "NCCL_LIB", "NCCL_TESTS_", "NCCL_PATH" };
	for (size_t i = 0; i < TP_ARRAY_LEN(prefixes); i++)
		if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
			return true;
	/* The software card's and the exported plug-in's, unless they are in this program too: libraries of their own, with tables of their own. */
	static const char *const libraries[] = { "TELPHER_VERBS_", "TELPHER_PLUGIN_" };
	const char *its = NULL;
	for (size_t i = 0; i < TP_ARRAY_LEN(libraries); i++)
		if (strncmp(name, libraries[i], strlen(libraries[i])) == 0)
			its = libraries[i];
	if (!its)
		return false;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next)
		for (size_t i = 0; i < t->count; i++)
			if (strncmp(t->params[i].name, its, strlen(its)) == 0)
				return false;
	return true;
}

static void judge_name(const char *name, const char *where, tp_env_visit *visit, void *arg)
{
	if (not_ours(name))
		return;
	const struct tp_env_reason *reason = find_reason(name);
	if (tp_param_find(name))
		visit(arg, name, where, TP_ENV_HONOURED, NULL);
	else if (reason)
		visit(arg, name, where, TP_ENV_NO_EFFECT, reason->why);
	else
		visit(arg, name, where, TP_ENV_UNKNOWN, nearest_known(name));
}

static bool ours(const char *name) { return strncmp(name, "NCCL_", 5) == 0 || strncmp(name, "TELPHER_", 8) == 0; }

void tp_env_visit_set(tp_env_visit *visit, void *arg)
{
	for (char **e = environ; e && *e; e++) {
		char name[128];
		size_t bytes = strcspn(*e, "=");
		if (!ours(*e) || bytes >= sizeof(name))
			continue;
		memcpy(name, *e, bytes);
		name[bytes] = 0;
		judge_name(name, "environment", visit, arg);
	}
	const char *name, *file;
	/* A file may set other libraries' names too. */
	for (size_t i = 0; tp_conf_name_at(i, &name, &file); i++)
		if (ours(name))
			judge_name(name, file, visit, arg);
}

static void report_name(void *arg, const char *name, const char *where, enum tp_env_status status, const char *text)
{
	(void)arg;
	if (status == TP_ENV_NO_EFFECT)
		TP_INFO(TP_ENV, "%s (%s) has no effect here: %s", name, where, text);
	else if (status == TP_ENV_UNKNOWN && text)
		TP_WARN("%s (%s) is unknown and has no effect; did you mean %s?", name, where, text);
	else if (status == TP_ENV_UNKNOWN)
		TP_WARN("%s (%s) is unknown and has no effect; `telpher env` lists the names there are", name, where);
}

void tp_param_report_environment(void)
{
	pthread_mutex_lock(&report_lock);
	bool first = !reported;
	reported = true;
	pthread_mutex_unlock(&report_lock);
	if (!first)
		return;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next)
		for (size_t i = 0; i < t->count; i++)
			report_parameter(&t->params[i]);
	tp_env_visit_set(report_name, NULL);
}

void tp_param_report_again(void)
{
	pthread_mutex_lock(&report_lock);
	reported = false;
	pthread_mutex_unlock(&report_lock);
}
