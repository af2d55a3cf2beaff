/* The cost model's constants as a text table, and as the record that ranks exchange. One list of names serves both.
 * A table comes from a file of somebody's: sizes are bounded, names known, numbers finite and in range, or it is refused
 * whole with its line named. */
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/cost.h"

#define LARGEST_TABLE 65536
#define RECORD_VERSION 2

enum kind { REAL, INTEGER, SIZE, FLAG };

struct value {
	const char *name;
	enum kind kind;
	size_t offset;
	double min, max;
};

#define VALUE(name_, kind_, field_, min_, max_) { name_, kind_, offsetof(struct tp_cost_model, field_), min_, max_ }
#define LATENCY_MAX 1e9
static const struct value values[] = {
	VALUE("inside.latency_us", REAL, inside.latency_us, 0, LATENCY_MAX),
	VALUE("inside.us_per_byte", REAL, inside.us_per_byte, 0, 1e3),
	VALUE("inside.step_us", REAL, inside.step_us, 0, LATENCY_MAX),
	VALUE("across.latency_us", REAL, across.latency_us, 0, LATENCY_MAX),
	VALUE("across.us_per_byte", REAL, across.us_per_byte, 0, 1e3),
	VALUE("across.step_us", REAL, across.step_us, 0, LATENCY_MAX),
	VALUE("reduce_us_per_byte", REAL, reduce_us_per_byte, 0, 1e3),
	VALUE("copy_us_per_byte", REAL, copy_us_per_byte, 0, 1e3),
	VALUE("call_us", REAL, call_us, 0, LATENCY_MAX),
	VALUE("cores_per_domain", INTEGER, cores_per_domain, 1, 1e6),
	VALUE("inline_bytes", SIZE, inline_bytes, 0, 1e12),
	VALUE("slot_bytes_inside", SIZE, slot_bytes_inside, 64, 1e12),
	VALUE("slot_bytes_across", SIZE, slot_bytes_across, 64, 1e12),
	VALUE("by_ref_inside", FLAG, by_ref_inside, 0, 1),
	VALUE("ref_us", REAL, ref_us, 0, LATENCY_MAX),
	VALUE("switch_us", REAL, switch_us, 0, LATENCY_MAX),
	VALUE("stream_bytes", SIZE, stream_bytes, 0, 1e12),
	VALUE("scale.RING", REAL, scale[TP_ALGO_RING], 1e-3, 1e3),
	VALUE("scale.TREE", REAL, scale[TP_ALGO_TREE], 1e-3, 1e3),
	VALUE("scale.HALVING_DOUBLING", REAL, scale[TP_ALGO_HALVING_DOUBLING], 1e-3, 1e3),
	VALUE("scale.PAT", REAL, scale[TP_ALGO_PAT], 1e-3, 1e3),
	VALUE("scale.ONE_SHOT", REAL, scale[TP_ALGO_ONE_SHOT], 1e-3, 1e3),
	VALUE("scale.TWO_SHOT", REAL, scale[TP_ALGO_TWO_SHOT], 1e-3, 1e3),
	VALUE("scale.DIRECT", REAL, scale[TP_ALGO_DIRECT], 1e-3, 1e3),
	VALUE("scale.BRUCK", REAL, scale[TP_ALGO_BRUCK], 1e-3, 1e3),
	VALUE("scale.HIERARCHICAL", REAL, scale[TP_ALGO_HIERARCHICAL], 1e-3, 1e3),
};
_Static_assert(TP_ARRAY_LEN(values) == TP_COST_VALUES, "a record holds every value");

static struct tp_param params[] = {
	{ .name = "TELPHER_TUNE_FILE", .kind = TP_PARAM_STRING,
		.doc = "file with a table of the cost model's constants; telpher tune makes one by measurement, telpher explain --table prints the one in use" },
};
TP_PARAM_TABLE("plan", params)

static double get(const struct tp_cost_model *model, const struct value *v)
{
	const void *at = (const char *)model + v->offset;
	switch (v->kind) {
	case REAL: return *(const double *)at;
	case INTEGER: return *(const int *)at;
	case SIZE: return (double)*(const size_t *)at;
	default: return *(const bool *)at;
	}
}

static void set(struct tp_cost_model *model, const struct value *v, double number)
{
	void *at = (char *)model + v->offset;
	switch (v->kind) {
	case REAL: *(double *)at = number; break;
	case INTEGER: *(int *)at = (int)number; break;
	case SIZE: *(size_t *)at = (size_t)number; break;
	default: *(bool *)at = number != 0; break;
	}
}

static bool in_range(const struct value *v, double number)
{
	return isfinite(number) && number >= v->min && number <= v->max && (v->kind == REAL || number == (double)(int64_t)number);
}

/* One line, without its end: nothing, a comment, or a name and a number. */
static ncclResult_t parse_line(char *line, const char *file, int number, struct tp_cost_model *model)
{
	char *comment = strchr(line, '#'), *keep, *end;
	if (comment) *comment = 0;
	const char *name = strtok_r(line, " \t\r=", &keep), *text = name ? strtok_r(NULL, " \t\r=", &keep) : NULL;
	if (!name) return ncclSuccess;
	if (!text || strtok_r(NULL, " \t\r", &keep))
		return TP_FAIL(ncclInvalidUsage, "%s:%d: a line is a name and a number, not \"%.40s …\"", file, number, name);
	for (size_t i = 0; i < TP_ARRAY_LEN(values); i++) {
		if (strcmp(values[i].name, name)) continue;
		double found = strtod(text, &end);
		if (end == text || *end || !in_range(&values[i], found))
			return TP_FAIL(ncclInvalidUsage, "%s:%d: %s is a%s number from %g to %g, not \"%.40s\"", file, number, name,
				values[i].kind == REAL ? "" : " whole", values[i].min, values[i].max, text);
		set(model, &values[i], found);
		return ncclSuccess;
	}
	return TP_FAIL(ncclInvalidUsage, "%s:%d: there is no constant \"%.40s\"; the first are %s, %s, %s", file, number, name,
		values[0].name, values[1].name, values[2].name);
}

ncclResult_t tp_cost_parse_table(const char *text, size_t bytes, const char *file, struct tp_cost_model *model)
{
	struct tp_cost_model parsed = *model;
	char line[256];
	int number = 1;
	for (size_t at = 0; at < bytes; number++) {
		const char *end = memchr(text + at, '\n', bytes - at);
		size_t length = end ? (size_t)(end - (text + at)) : bytes - at;
		if (length >= sizeof(line) || memchr(text + at, 0, length))
			return TP_FAIL(ncclInvalidUsage, "%s:%d: this is no table: a line of more than %zu characters or a zero byte", file,
				number, sizeof(line) - 1);
		memcpy(line, text + at, length);
		line[length] = 0;
		TP_TRY(parse_line(line, file, number, &parsed));
		at += length + 1;
	}
	*model = parsed;
	return ncclSuccess;
}

static ncclResult_t load(struct tp_cost_model *model)
{
	struct tp_cost_model loaded = *model;
	const char *path = tp_param_string(&params[0]);
	if (path && *path) {
		FILE *f = fopen(path, "re");
		if (!f) return TP_FAIL(ncclInvalidUsage, "TELPHER_TUNE_FILE names %s, which can't be opened: %s", path, strerror(errno));
		char *text = tp_alloc(1, LARGEST_TABLE + 1, "a table of constants");
		size_t bytes = text ? fread(text, 1, LARGEST_TABLE + 1, f) : 0;
		ncclResult_t result = text ? ncclSuccess : ncclSystemError;
		if (ferror(f)) result = TP_FAIL(ncclSystemError, "TELPHER_TUNE_FILE %s can't be read: %s", path, strerror(errno));
		else if (bytes > LARGEST_TABLE)
			result = TP_FAIL(ncclInvalidUsage, "TELPHER_TUNE_FILE %s is no table: more than %d bytes", path, LARGEST_TABLE);
		else if (text) result = tp_cost_parse_table(text, bytes, path, &loaded);
		fclose(f);
		free(text);
		TP_TRY(result);
		TP_INFO(TP_TUNING, "Cost model corrected by %s", path);
	}
	*model = loaded;
	return ncclSuccess;
}

ncclResult_t tp_cost_load(struct tp_cost_model *model)
{
	struct tp_cost_model defaults;
	tp_cost_defaults(&defaults);
	TP_TRY(load(&defaults));
	*model = defaults;
	return ncclSuccess;
}

ncclResult_t tp_cost_load_gpu(struct tp_cost_model *model)
{
	struct tp_cost_model defaults;
	tp_cost_gpu_defaults(&defaults);
	TP_TRY(load(&defaults));
	*model = defaults;
	return ncclSuccess;
}

bool tp_cost_is_measured(const struct tp_cost_model *model, const struct tp_cost_model *defaults, bool across)
{
	const struct tp_cost_link *link = across ? &model->across : &model->inside, *guess = across ? &defaults->across : &defaults->inside;
	return link->latency_us != guess->latency_us && link->us_per_byte != guess->us_per_byte;
}

char *tp_cost_table_text(const struct tp_cost_model *model)
{
	char *text = NULL;
	size_t bytes;
	FILE *f = open_memstream(&text, &bytes);
	if (!f) return NULL;
	for (size_t i = 0; i < TP_ARRAY_LEN(values); i++) fprintf(f, "%-24s %.17g\n", values[i].name, get(model, &values[i]));
	fclose(f);
	return text;
}

void tp_cost_pack(const struct tp_cost_model *model, struct tp_cost_record *out)
{
	*out = (struct tp_cost_record){ .version = RECORD_VERSION, .nvalues = TP_COST_VALUES };
	for (size_t i = 0; i < TP_COST_VALUES; i++) out->values[i] = get(model, &values[i]);
}
