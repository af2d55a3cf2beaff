/* The parameter registry. A parameter is read once: the environment, else the configuration files, else its default.
 * After that a read is one acquire load of its state. */
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/internal.h"

/* read_lock is the outermost: the configuration files are read under it, and texts kept. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t read_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_param_table *first_table;

static struct tp_param conf_params[] = {
	{ .name = "NCCL_CONF_FILE", .kind = TP_PARAM_STRING, .doc = "configuration file that is read instead of ~/.nccl.conf" },
};
TP_PARAM_TABLE("files", conf_params)

void tp_param_before_fork(void)
{
	pthread_mutex_lock(&read_lock);
	tp_report_before_fork();
	tp_conf_before_fork();
	pthread_mutex_lock(&table_lock);
	pthread_mutex_lock(&text_lock);
}

void tp_param_after_fork(void)
{
	pthread_mutex_unlock(&text_lock);
	pthread_mutex_unlock(&table_lock);
	tp_conf_after_fork();
	tp_report_after_fork();
	pthread_mutex_unlock(&read_lock);
}

struct interned { struct interned *next; char text[]; };

const char *tp_intern(const char *text)
{
	static struct interned *all;
	pthread_mutex_lock(&text_lock);
	struct interned *at = all;
	while (at && strcmp(at->text, text) != 0)
		at = at->next;
	if (!at && (at = malloc(sizeof(*at) + strlen(text) + 1))) {
		strcpy(at->text, text);
		at->next = all;
		all = at;
	}
	pthread_mutex_unlock(&text_lock);
	return at ? at->text : NULL;
}

void tp_param_register(struct tp_param_table *table)
{
	pthread_mutex_lock(&table_lock);
	struct tp_param_table **at = &first_table;
	while (*at && *at != table)
		at = &(*at)->next;
	if (!*at) {
		table->next = NULL;
		*at = table;
	}
	pthread_mutex_unlock(&table_lock);
}

const struct tp_param_table *tp_param_first_table(void) { return first_table; }

struct tp_param *tp_param_find(const char *name)
{
	for (const struct tp_param_table *table = first_table; table; table = table->next)
		for (size_t i = 0; i < table->count; i++)
			if (strcmp(table->params[i].name, name) == 0)
				return &table->params[i];
	return NULL;
}

static bool parse_int(const char *text, bool suffix, int64_t *number)
{
	char *end;
	errno = 0;
	long long value = strtoll(text, &end, 0);
	if (end == text || errno == ERANGE)
		return false;
	int shift = 0;
	if (suffix && *end) {
		const char *unit = strchr("KMGT", toupper((unsigned char)*end));
		if (unit && *unit) {
			shift = 10 * (int)(unit - "KMGT" + 1);
			end++;
			if (toupper((unsigned char)end[0]) == 'I' && toupper((unsigned char)end[1]) == 'B')
				end += 2;
			else if (toupper((unsigned char)end[0]) == 'B')
				end++;
		}
	}
	while (isspace((unsigned char)*end))
		end++;
	if (*end || value > (INT64_MAX >> shift) || value < -(INT64_MAX >> shift))
		return false;
	*number = value * (1ll << shift);
	return true;
}

static bool parse_bool(const char *text, int64_t *number)
{
	static const char *const words[][2] = { { "0", "1" }, { "false", "true" }, { "no", "yes" }, { "off", "on" } };
	for (size_t i = 0; i < TP_ARRAY_LEN(words); i++) {
		for (int value = 0; value < 2; value++) {
			if (strcasecmp(text, words[i][value]) == 0) {
				*number = value;
				return true;
			}
		}
	}
	return false;
}

static bool parse_choice(const char *choices, const char *text, int64_t *number)
{
	size_t bytes = strlen(text);
	for (int index = 0; *choices; index++) {
		size_t length = strcspn(choices, "|");
		if (length == bytes && strncasecmp(choices, text, length) == 0) {
			*number = index;
			return true;
		}
		choices += length + (choices[length] == '|');
	}
	return false;
}

bool tp_param_parse(const struct tp_param *param, const char *text, int64_t *number)
{
	switch (param->kind) {
	case TP_PARAM_INT:
	case TP_PARAM_BYTES:
		return parse_int(text, param->kind == TP_PARAM_BYTES, number) && *number >= param->min && *number <= param->max;
	case TP_PARAM_BOOL:
		return parse_bool(text, number);
	case TP_PARAM_ENUM:
		return parse_choice(param->choices, text, number);
	case TP_PARAM_STRING:
		*number = 0;
		return true;
	}
	return false;
}

static void warn_value(const struct tp_param *param, const char *text)
{
	const char *fallback = param->fallback ? param->fallback : "unset";
	switch (param->kind) {
	case TP_PARAM_INT:
	case TP_PARAM_BYTES:
		TP_WARN("%s=%.128s: expected %s from %lld to %lld; using %s", param->name, text,
			param->kind == TP_PARAM_BYTES ? "a size (K, M, G allowed)" : "a whole number", (long long)param->min, (long long)param->max, fallback);
		break;
	case TP_PARAM_BOOL:
		TP_WARN("%s=%.128s: expected 0 or 1; using %s", param->name, text, fallback);
		break;
	case TP_PARAM_ENUM:
		TP_WARN("%s=%.128s: expected one of %s; using %s", param->name, text, param->choices, fallback);
		break;
	case TP_PARAM_STRING:
		break;
	}
}

/* Returns a text that wasn't a value, or NULL. */
static const char *read_locked(struct tp_param *param)
{
	int64_t number = 0;
	const char *text = getenv(param->name), *bad = NULL;
	param->origin = TP_FROM_ENVIRONMENT;
	param->origin_file = NULL;
	if (!text && tp_conf_find(param->name, &text, &param->origin_file))
		param->origin = TP_FROM_FILE;
	/* An empty number is as good as unset; an empty string may mean something. */
	if (text && param->kind != TP_PARAM_STRING && !*text)
		text = NULL;
	if (text && !tp_param_parse(param, text, &number)) {
		bad = text;
		text = NULL;
	}
	if (text) {
		/* The environment may be changed under our feet; a value that was read stays. */
		param->text = tp_intern(text);
	} else {
		param->origin = TP_FROM_DEFAULT;
		param->origin_file = NULL;
		param->text = param->fallback;
		number = 0;
		if (param->fallback && !tp_param_parse(param, param->fallback, &number))
			TP_WARN("%s: its default %s isn't in its own range", param->name, param->fallback);
	}
	param->number = number;
	/* Pairs with the acquire in read_once. */
	__atomic_store_n(&param->state, 1, __ATOMIC_RELEASE);
	return bad;
}

static _Thread_local bool reading;

static inline void read_once(struct tp_param *param)
{
	if (__builtin_expect(__atomic_load_n(&param->state, __ATOMIC_ACQUIRE) == 1, 1))
		return;
	/* A warning about a configuration file makes the logger read its own parameters: this thread may come back here. */
	bool outer = !reading;
	const char *bad = NULL;
	if (outer)
		pthread_mutex_lock(&read_lock);
	reading = true;
	if (__atomic_load_n(&param->state, __ATOMIC_ACQUIRE) != 1)
		bad = read_locked(param);
	if (outer) {
		reading = false;
		pthread_mutex_unlock(&read_lock);
	}
	if (bad)
		warn_value(param, bad);
}

int64_t tp_param_int(struct tp_param *param)
{
	read_once(param);
	return param->number;
}

const char *tp_param_string(struct tp_param *param)
{
	read_once(param);
	return param->text;
}

bool tp_param_is_set(struct tp_param *param)
{
	read_once(param);
	return param->origin != TP_FROM_DEFAULT;
}

bool tp_param_is_secret(const struct tp_param *param)
{
	/* The name of a file with a secret is none. */
	size_t length = strlen(param->name);
	return length > 7 && strcmp(param->name + length - 7, "_SECRET") == 0;
}

void tp_param_forget(struct tp_param *params, size_t count)
{
	for (size_t i = 0; i < count; i++)
		__atomic_store_n(&params[i].state, 0, __ATOMIC_RELEASE);
}

void tp_param_reload(void)
{
	tp_conf_reload();
	tp_param_report_again();
	for (const struct tp_param_table *table = first_table; table; table = table->next)
		tp_param_forget(table->params, table->count);
}
