/* Expectations: what the user demands to be so. The list is read anew at each question; questions are asked at init. */
#include <string.h>
#include <strings.h>
#include "watch/internal.h"

enum { P_EXPECT };
static struct tp_param expect_params[] = {
	[P_EXPECT] = { .name = "TELPHER_EXPECT", .kind = TP_PARAM_STRING,
		.doc = "what must be so, else init fails: a list of path=, local=, remote=, net= and algo= (alternatives: |)" },
};
TP_PARAM_TABLE("watch", expect_params)

static const char *const keys[] = { "path", "local", "remote", "net", "algo" };

/* The next key=value of *list, blanks left out; false at the end. value_bytes 0: there is none. */
static bool next_item(const char **list, const char **key, size_t *key_bytes, const char **value, size_t *value_bytes)
{
	const char *p = *list + strspn(*list, ", \t");
	if (!*p)
		return false;
	size_t bytes = strcspn(p, ", \t");
	const char *equals = memchr(p, '=', bytes);
	*key = p;
	*key_bytes = equals ? (size_t)(equals - p) : bytes;
	*value = equals ? equals + 1 : p + bytes;
	*value_bytes = (size_t)(p + bytes - *value);
	*list = p + bytes;
	return true;
}

static bool is_key(const char *text, size_t bytes)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(keys); i++)
		if (strlen(keys[i]) == bytes && strncasecmp(keys[i], text, bytes) == 0)
			return true;
	return false;
}

ncclResult_t tp_watch_expect_check(void)
{
	const char *list = tp_param_string(&expect_params[P_EXPECT]), *key, *value;
	size_t key_bytes, value_bytes;
	while (list && next_item(&list, &key, &key_bytes, &value, &value_bytes)) {
		if (!is_key(key, key_bytes))
			return TP_FAIL(ncclInvalidArgument, "TELPHER_EXPECT: nothing can be expected of '%.*s'; known are path, local, remote, net and algo, "
				"as in path=SHM", (int)TP_MIN(key_bytes, 64), key);
		if (value_bytes == 0)
			return TP_FAIL(ncclInvalidArgument, "TELPHER_EXPECT: '%.*s' has no value, expected something like path=SHM", (int)key_bytes, key);
	}
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

/* The value that found doesn't meet, or NULL where all is well. */
static const char *broken(const char *wanted, const char *found, int *bytes)
{
	const char *list = tp_param_string(&expect_params[P_EXPECT]), *key, *value;
	size_t key_bytes, value_bytes;
	while (list && next_item(&list, &key, &key_bytes, &value, &value_bytes)) {
		if (strlen(wanted) == key_bytes && strncasecmp(wanted, key, key_bytes) == 0 && !matches(value, value_bytes, found)) {
			*bytes = (int)value_bytes;
			return value;
		}
	}
	return NULL;
}

ncclResult_t tp_watch_expect(const char *key, const char *found, const char *subject, const char *why)
{
	int bytes = 0;
	const char *value = broken(key, found, &bytes);
	if (!value)
		return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "TELPHER_EXPECT: expected %s=%.*s of %s, found %s%s%s", key, bytes, value, subject, found, why && *why ? ": " : "",
		why ? why : "");
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
	return TP_FAIL(ncclInvalidUsage, "TELPHER_EXPECT: expected %s=%.*s, but rank %d -> %d goes via %s%s%s (%zu of %zu pairs aren't as expected)", first_key,
		first_bytes, first_value, first->from, first->to, first->via, *first->why ? ": " : "", first->why, unmet, pairs);
}
