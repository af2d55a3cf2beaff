/* Expectations: what the user demands to be so. One grammar for all of them, whoever looks: here what is of a communicator (paths, the
 * network, algorithms); other folders bring tables of what they can look at. Questions are asked at init; a file is read once. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "watch/internal.h"

enum { P_EXPECT, P_MODE };
enum mode { MODE_FAIL, MODE_WARN };
static struct tp_param expect_params[] = {
	[P_EXPECT] = { .name = "TELPHER_EXPECT", .kind = TP_PARAM_STRING,
		.doc = "what must be so, else init fails: a list such as \"net=IB gdr=on p2p=nvlink nics>=8\", or a file that telpher topo expect wrote" },
	[P_MODE] = { .name = "TELPHER_EXPECT_MODE", .kind = TP_PARAM_ENUM, .fallback = "fail", .choices = "fail|warn",
		.doc = "what becomes of an expectation that isn't met: init fails, or a warning says so" },
};
TP_PARAM_TABLE("watch", expect_params)

#define LARGEST_FILE 65536

static const struct tp_expect_key own_keys[] = {
	{ "path", TP_EXPECT_TEXT, NULL, "the path of every pair of ranks, as in SHM or NET/IB" },
	{ "local", TP_EXPECT_TEXT, NULL, "the path of pairs on one host" },
	{ "remote", TP_EXPECT_TEXT, NULL, "the path of pairs on different hosts" },
	{ "net", TP_EXPECT_TEXT, NULL, "the network transport" },
	{ "algo", TP_EXPECT_TEXT, NULL, "the algorithm of every collective" },
};

/* ---- The list */

struct list { const struct list *next; char *name, *text; };
static _Atomic(const struct list *) lists;      /* files that were read; lists are added only, a child forked meanwhile can go on */

static char *read_file(const char *path)
{
	FILE *in = fopen(path, "re");
	char *text = in ? calloc(1, LARGEST_FILE + 2) : NULL;
	size_t bytes = text ? fread(text, 1, LARGEST_FILE + 1, in) : 0;
	bool failed = !text || ferror(in) || bytes > LARGEST_FILE;
	if (failed)
		TP_WARN("TELPHER_EXPECT=%.200s is no list (key=value …) and no file that can be read: %s", path, bytes > LARGEST_FILE ? "it is too large" : strerror(errno));
	if (in) fclose(in);
	if (!failed) return text;
	free(text);
	return NULL;
}

/* NULL: nothing is expected. *result: the file that is named can't be read. */
static const char *expected(ncclResult_t *result)
{
	const char *given = tp_param_string(&expect_params[P_EXPECT]);
	*result = ncclSuccess;
	if (!given || !given[strspn(given, " \t\r\n,")]) return NULL;
	if (strpbrk(given, "=<>")) return given;
	const struct list *l = atomic_load_explicit(&lists, memory_order_acquire);      /* pairs with the exchange below */
	while (l && strcmp(l->name, given)) l = l->next;
	if (l) return l->text;
	/* One word that is no file is a key whose value was forgotten, mostly. */
	struct list *made = tp_alloc(1, sizeof(*made), "expectations");
	if (made) *made = (struct list){ .name = strdup(given), .text = read_file(given) };
	if (!made || !made->name || !made->text) {
		*result = made && made->name ? ncclInvalidArgument : ncclSystemError;
		if (made) free(made->name);
		if (made) free(made->text);
		free(made);
		return NULL;
	}
	made->next = atomic_load_explicit(&lists, memory_order_relaxed);
	while (!atomic_compare_exchange_weak_explicit(&lists, &made->next, made, memory_order_acq_rel, memory_order_relaxed)) ;
	return made->text;
}

ncclResult_t tp_watch_expect_text(const char **out)
{
	ncclResult_t result;
	*out = expected(&result);
	return result;
}

bool tp_watch_expect_is_set(void)
{
	const char *given = tp_param_string(&expect_params[P_EXPECT]);
	return given && given[strspn(given, " \t\r\n,")];
}

/* ---- The grammar */

static const char between[] = " \t\r\n,";

bool tp_expect_one_of(const char *alternatives, size_t bytes, const char *word)
{
	for (size_t at = 0; at <= bytes;) {
		const char *bar = memchr(alternatives + at, '|', bytes - at);
		size_t length = bar ? (size_t)(bar - alternatives) - at : bytes - at;
		if (length == strlen(word) && strncasecmp(alternatives + at, word, length) == 0) return true;
		at += length + 1;
	}
	return false;
}

bool tp_expect_holds(const struct tp_expect_item *item, double number)
{
	switch (item->relation) {
	case TP_EXPECT_AT_LEAST: return number >= item->number - 1e-6 * item->number;
	case TP_EXPECT_AT_MOST: return number <= item->number * (1 + 1e-6);
	default: return number == item->number;
	}
}

static ncclResult_t read_value(const char *name, struct tp_expect_item *item)
{
	char value[64], *end;
	const struct tp_expect_key *key = item->key;
	snprintf(value, sizeof(value), "%.*s", (int)TP_MIN(item->value_bytes, sizeof(value) - 1), item->value);
	bool number = key->unit == TP_EXPECT_COUNT || key->unit == TP_EXPECT_LEAST;
	if (!number && item->relation != TP_EXPECT_EQUAL)
		return TP_FAIL(ncclInvalidArgument, "%s: '%.*s': %s is a word%s%s%s, say %s=…", name, item->text_bytes, item->text, key->name, key->words ? " (" : "",
			key->words ? key->words : "", key->words ? ")" : "", key->name);
	if (number) {
		item->number = strtod(value, &end);
		if (end == value || *end) return TP_FAIL(ncclInvalidArgument, "%s: '%.*s': %s is a number", name, item->text_bytes, item->text, key->name);
	}
	for (char *rest = value, *word; key->unit == TP_EXPECT_WORD && (word = strsep(&rest, "|"));)
		if (!tp_expect_one_of(key->words, strlen(key->words), word))
			return TP_FAIL(ncclInvalidArgument, "%s: '%.*s': %s can't be '%s'; it can be %s", name, item->text_bytes, item->text, key->name, word, key->words);
	return ncclSuccess;
}

static const struct tp_expect_key *find_key(const char *text, size_t bytes, const struct tp_expect_key *keys, size_t nkeys)
{
	for (size_t k = 0; k < nkeys; k++)
		if (strlen(keys[k].name) == bytes && strncasecmp(keys[k].name, text, bytes) == 0) return &keys[k];
	return NULL;
}

/* "net, algo, gpus": what can be said. */
static const char *name_keys(const struct tp_expect_key *keys, size_t nkeys, char *text, size_t bytes)
{
	size_t used = 0;
	text[0] = 0;
	for (size_t k = 0; k < nkeys && used < bytes; k++) used += (size_t)snprintf(text + used, bytes - used, "%s%s", k ? ", " : "", keys[k].name);
	return text;
}

static ncclResult_t next_item(const char **list, const char *name, const struct tp_expect_key *keys, size_t nkeys, bool own_first, struct tp_expect_item *out)
{
	const char *p = *list + strspn(*list, between);
	*out = (struct tp_expect_item){ .key = NULL };
	while (*p == '#') {
		p += strcspn(p, "\n");
		p += strspn(p, between);
	}
	size_t bytes = strcspn(p, " \t\r\n,#"), length = 0;
	*list = p + bytes;
	if (!bytes) return ncclSuccess;
	while (length < bytes && !strchr("=<>", p[length])) length++;
	struct tp_expect_item item = { .text = p, .text_bytes = (int)TP_MIN(bytes, (size_t)80) };
	if (own_first) item.key = find_key(p, length, own_keys, TP_ARRAY_LEN(own_keys));
	if (!item.key) item.key = find_key(p, length, keys, nkeys);
	if (!item.key) item.key = find_key(p, length, own_keys, TP_ARRAY_LEN(own_keys));
	char known[320];
	if (!item.key)
		return TP_FAIL(ncclInvalidArgument, "%s: nothing can be expected of '%.*s'; known are path, local, remote, net, algo%s%s", name, (int)TP_MIN(length, (size_t)40), p,
			nkeys ? ", " : "", name_keys(keys, nkeys, known, sizeof(known)));
	const char *relation = p + length;
	if (bytes - length >= 2 && strncmp(relation, ">=", 2) == 0) item.relation = TP_EXPECT_AT_LEAST;
	else if (bytes - length >= 2 && strncmp(relation, "<=", 2) == 0) item.relation = TP_EXPECT_AT_MOST;
	else if (bytes - length < 1 || *relation != '=')
		return TP_FAIL(ncclInvalidArgument, "%s: '%.*s' should be %s=, >= or <= and a value", name, item.text_bytes, p, item.key->name);
	item.value = relation + (item.relation == TP_EXPECT_EQUAL ? 1 : 2);
	item.value_bytes = bytes - (size_t)(item.value - p);
	if (!item.value_bytes) return TP_FAIL(ncclInvalidArgument, "%s: '%.*s' has no value", name, item.text_bytes, p);
	TP_TRY(read_value(name, &item));
	*out = item;
	return ncclSuccess;
}

ncclResult_t tp_expect_next(const char **list, const char *name, const struct tp_expect_key *keys, size_t nkeys, struct tp_expect_item *out)
{
	return next_item(list, name, keys, nkeys, false, out);
}

bool tp_expect_is_own(const struct tp_expect_key *key) { return key >= own_keys && key < own_keys + TP_ARRAY_LEN(own_keys); }

ncclResult_t tp_watch_expect_check_with(const struct tp_expect_key *keys, size_t nkeys)
{
	ncclResult_t result;
	const char *list = expected(&result);
	struct tp_expect_item item = { .key = own_keys };
	while (result == ncclSuccess && list && item.key) result = next_item(&list, "TELPHER_EXPECT", keys, nkeys, true, &item);
	return result;
}

ncclResult_t tp_watch_expect_check(void) { return tp_watch_expect_check_with(NULL, 0); }

/* ---- What is of a communicator */

ncclResult_t tp_watch_expect_unmet(const char *text)
{
	if (tp_param_int(&expect_params[P_MODE]) == MODE_FAIL) return TP_FAIL(ncclInvalidUsage, "TELPHER_EXPECT: %s", text);
	TP_WARN("TELPHER_EXPECT: %s", text);
	return ncclSuccess;
}

static bool matches(const char *value, size_t value_bytes, const char *found)
{
	for (size_t at = 0; at <= value_bytes;) {
		const char *bar = memchr(value + at, '|', value_bytes - at);
		size_t bytes = bar ? (size_t)(bar - value) - at : value_bytes - at;
		if (bytes && strncasecmp(value + at, found, bytes) == 0 && (found[bytes] == 0 || found[bytes] == '/'))
			return true;
		at += bytes + 1;
	}
	return false;
}

/* The value that found doesn't meet, or NULL where all is well. What can't be read has been refused by the check. */
static const char *broken(const char *wanted, const char *found, int *bytes)
{
	ncclResult_t result;
	const char *list = expected(&result);
	while (list) {
		const char *p = list + strspn(list, between);
		if (*p == '#') {
			list = p + strcspn(p, "\n");
			continue;
		}
		size_t length = strcspn(p, " \t\r\n,#"), key = strcspn(p, "=<> \t\r\n,#");
		if (!length) return NULL;
		if (key < length && p[key] == '=' && strlen(wanted) == key && strncasecmp(wanted, p, key) == 0 && !matches(p + key + 1, length - key - 1, found)) {
			*bytes = (int)(length - key - 1);
			return p + key + 1;
		}
		list = p + length;
	}
	return NULL;
}

ncclResult_t tp_watch_expect(const char *key, const char *found, const char *subject, const char *why)
{
	int bytes = 0;
	char text[700];
	const char *value = broken(key, found, &bytes);
	if (!value)
		return ncclSuccess;
	snprintf(text, sizeof(text), "expected %s=%.*s of %s, found %s%s%s", key, bytes, value, subject, found, why && *why ? ": " : "", why ? why : "");
	return tp_watch_expect_unmet(text);
}

ncclResult_t tp_watch_expect_paths(const struct tp_watch_paths *paths)
{
	const struct tp_watch_path *first = NULL;
	const char *first_key = NULL, *first_value = NULL;
	int first_bytes = 0;
	size_t unmet = 0, pairs = 0;
	for (size_t i = 0; i < tp_watch_paths_count(paths); i++) {
		const struct tp_watch_path *p = tp_watch_paths_at(paths, i);
		if (p->from == p->to)
			continue;
		const char *key = "path";
		int bytes = 0;
		pairs++;
		const char *value = broken(key, p->via, &bytes);
		if (!value)
			value = broken(key = p->same_host ? "local" : "remote", p->via, &bytes);
		if (!value)
			continue;
		if (unmet++ == 0) {
			first = p;
			first_key = key;
			first_value = value;
			first_bytes = bytes;
		}
	}
	if (!first)
		return ncclSuccess;
	char text[700];
	snprintf(text, sizeof(text), "expected %s=%.*s, but rank %d -> %d goes via %s%s%s (%zu of %zu pairs aren't as expected)", first_key, first_bytes, first_value,
		first->from, first->to, first->via, *first->why ? ": " : "", first->why, unmet, pairs);
	return tp_watch_expect_unmet(text);
}
