/* The list of faults that a user writes, in TELPHER_VERBS_FAULT or to `telpher verbs fault`: rules of objects are read here, all
 * others go to the wire (wire_fault.c); seed and down are for both. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/fork.h"
#include "verbs/fault.h"
#include "verbs/internal.h"
#include "verbs/path.h"
#include "verbs/wire_fault.h"

enum { TEXT_BYTES = 1024 };

struct parsed { struct tp_fault_rule rules[TP_FAULT_PLACES]; uint64_t seed; char packets[TEXT_BYTES]; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char current[TEXT_BYTES];
TP_FORK_HOLD(TP_FORK_BASE, lock)

/* ---- reading ---- */

static bool read_bytes(const char *text, uint64_t *out)
{
	char *end;
	*out = strtoull(text, &end, 10);
	uint64_t unit = *end == 'K' ? 1u << 10 : *end == 'M' ? 1u << 20 : *end == 'G' ? 1u << 30 : 1;
	if (end == text || *out > UINT64_MAX / unit)
		return false;
	*out *= unit;
	return end[unit > 1] == 0;
}

static bool read_rate(const char *text, double *out)
{
	char *end;
	*out = strtod(text, &end);
	return end != text && *end == 0 && *out > 0 && *out <= 1;
}

static int read_error(const char *text)
{
	static const struct { const char *name; int error; } names[] = { { "EACCES", EACCES }, { "EPERM", EPERM }, { "ENODEV", ENODEV },
		{ "ENOENT", ENOENT }, { "ENOMEM", ENOMEM }, { "EMFILE", EMFILE }, { "EIO", EIO }, { "EBUSY", EBUSY } };
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++)
		if (!strcmp(names[i].name, text))
			return names[i].error;
	return 0;
}

/* The rules of objects, each as NAME=VALUE:DEVICE; the device may be left out. */
static const struct { const char *name; enum tp_fault_place place; enum { NOTHING, AN_ERROR, BYTES, COUNT, RATE } value; } objects[] = {
	{ "open", TP_FAULT_OPEN, AN_ERROR }, { "missing", TP_FAULT_MISSING, NOTHING }, { "memlock", TP_FAULT_MEMLOCK, BYTES },
	{ "cq", TP_FAULT_CQ, COUNT }, { "protection", TP_FAULT_PROTECTION, RATE }, { "down", TP_FAULT_DOWN, NOTHING },
	{ "scatter", TP_FAULT_SCATTER, RATE },
};

static int find_object(const char *rule)
{
	size_t length = strcspn(rule, "=");
	for (size_t i = 0; i < TP_ARRAY_LEN(objects); i++)
		if (strlen(objects[i].name) == length && !memcmp(objects[i].name, rule, length))
			return (int)i;
	return -1;
}

static bool read_object(int which, char *value, struct tp_fault_rule *out)
{
	*out = (struct tp_fault_rule){ .error = 1 };
	char *device = objects[which].value == NOTHING ? value : strchr(value, ':');
	if (device && device != value)
		*device++ = 0;
	if (device && strlen(device) >= sizeof(out->device))
		return false;
	snprintf(out->device, sizeof(out->device), "%s", device ? device : "");
	switch (objects[which].value) {
	case NOTHING: return true;
	case AN_ERROR: return (out->error = read_error(value)) != 0;
	case BYTES:
		out->error = ENOMEM;
		return read_bytes(value, &out->amount) && out->amount++ < UINT64_MAX;
	case COUNT: return read_bytes(value, &out->amount);
	case RATE: return read_rate(*value ? value : "1", &out->rate);
	}
	return false;
}

static void add_packets(struct parsed *out, const char *rule)
{
	size_t used = strlen(out->packets);
	snprintf(out->packets + used, sizeof(out->packets) - used, "%s%s", used ? "," : "", rule);
}

static int parse(const char *text, struct parsed *out)
{
	char copy[TEXT_BYTES], *save = NULL;
	memset(out, 0, sizeof(*out));
	out->seed = 1;
	if (!text || !strcmp(text, "none"))
		return 0;
	if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
		return TP_CARD_FAIL(EINVAL, "a list of faults of %zu bytes can't be read: %d at most", strlen(text), TEXT_BYTES - 1);
	for (char *rule = strtok_r(copy, ", ", &save); rule; rule = strtok_r(NULL, ", ", &save)) {
		int which = find_object(rule);
		char *value = strchr(rule, '=');
		if (!strncmp(rule, "seed=", 5))
			out->seed = strtoull(rule + 5, NULL, 0);
		if (which < 0) {
			add_packets(out, rule);
			continue;
		}
		if (!read_object(which, value ? value + 1 : rule + strlen(rule), &out->rules[objects[which].place]))
			return TP_CARD_FAIL(EINVAL, "the fault \"%s\" can't be read: open=EACCES|EPERM|ENODEV|ENOENT|ENOMEM|EMFILE|EIO|EBUSY, missing, "
				"memlock=BYTES, cq=COUNT, protection=RATE (0 to 1), down, scatter=RATE; :DEVICE may follow (missing=DEVICE, down=DEVICE)", rule);
		if (objects[which].place == TP_FAULT_DOWN)
			add_packets(out, "dead");
	}
	return 0;
}

/* ---- setting ---- */

static void set_objects(const struct parsed *parsed)
{
	bool was_down = tp_fault_on(TP_FAULT_DOWN);
	for (int place = 0; place < TP_FAULT_PLACES; place++)
		tp_fault_set((enum tp_fault_place)place, &parsed->rules[place], parsed->seed);
	if (was_down == tp_fault_on(TP_FAULT_DOWN))
		return;
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	for (int d = 0; d < count; d++)
		for (int p = 0; p < devices[d].nports; p++)
			tp_port_refresh(&devices[d].ports[p]);
}

int tp_fault_text_set(const char *text)
{
	struct parsed parsed;
	int error = parse(text, &parsed);
	if (!error)
		error = tp_fault_wire_set(parsed.packets);
	if (error)
		return error;
	set_objects(&parsed);
	tp_path_watch();
	pthread_mutex_lock(&lock);
	snprintf(current, sizeof(current), "%s", text ? text : "");
	pthread_mutex_unlock(&lock);
	return 0;
}

void tp_fault_text_get(char *out, size_t bytes)
{
	pthread_mutex_lock(&lock);
	snprintf(out, bytes, "%s", current[0] ? current : "none");
	pthread_mutex_unlock(&lock);
}

static const char *from_environment(struct parsed *out)
{
	struct tp_param *param = tp_param_find("TELPHER_VERBS_FAULT");
	const char *text = param ? tp_param_string(param) : NULL;
	return text && parse(text, out) == 0 ? text : NULL;
}

void tp_fault_objects_from_environment(void)
{
	struct parsed parsed;
	const char *text = from_environment(&parsed);
	if (!text)
		return;
	snprintf(current, sizeof(current), "%s", text);
	for (int place = 0; place < TP_FAULT_PLACES; place++)
		tp_fault_set((enum tp_fault_place)place, &parsed.rules[place], parsed.seed);
}

void tp_fault_packets_from_environment(void)
{
	struct parsed parsed;
	if (from_environment(&parsed))
		tp_fault_wire_set(parsed.packets);
}
