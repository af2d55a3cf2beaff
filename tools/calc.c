/* `telpher calc`: the arithmetic of links, cards and collectives, each number with its formula and where that comes from. This file
 * reads the command line and prints the answer; calc_links.c, calc_rdma.c and calc_collectives.c hold the formulas. */
#include "calc.h"

#include <errno.h>
#include <math.h>
#include <popt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "tools.h"

#define MAX_WORDS 8

static const struct { const struct calc_command *commands; const size_t *count; } groups[] = {
	{ calc_links, &calc_links_count }, { calc_rdma, &calc_rdma_count }, { calc_collectives, &calc_collectives_count },
};

int calc_refuse(const struct calc *c, const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return tool_usage_error("calc", "%s: %s", c->command, text);
}

bool calc_same(const char *a, const char *b)
{
	for (; *a && *b; a++, b++) {
		char x[2] = { *a == '-' ? '_' : *a, 0 }, y[2] = { *b == '-' ? '_' : *b, 0 };
		if (strcasecmp(x, y)) return false;
	}
	return !*a && !*b;
}

bool calc_number(const char *text, double least, double most, double *out)
{
	char *end;
	/* Digits only: no "nan", no "inf", no hexadecimal, no space before. */
	if (!*text || text[strspn(text, "0123456789.eE+-")]) return false;
	errno = 0;
	double value = strtod(text, &end);
	if (errno || *end || !isfinite(value) || value < least || value > most) return false;
	*out = value;
	return true;
}

bool calc_integer(const char *text, int least, int most, int *out)
{
	double value;
	if (text[strspn(text, "0123456789")] || !calc_number(text, least, most, &value)) return false;
	*out = (int)value;
	return true;
}

bool calc_rate(const char *text, double *gbit)
{
	static const struct { const char *name; double gbit; } names[] = {
		{ "SDR", 10 }, { "DDR", 20 }, { "QDR", 40 }, { "FDR", 56 }, { "EDR", 100 }, { "HDR", 200 }, { "NDR", 400 }, { "XDR", 800 },
	};
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (calc_same(text, names[i].name)) return *gbit = names[i].gbit, true;
	char number[32];
	size_t digits = strspn(text, "0123456789.");
	double factor = 1;
	if (!digits || digits >= sizeof(number)) return false;
	memcpy(number, text, digits);
	number[digits] = 0;
	const char *unit = text + digits + strspn(text + digits, " ");
	if (*unit == 'M' || *unit == 'm') factor = 1e-3;
	else if (*unit == 'T' || *unit == 't') factor = 1e3;
	else if (*unit && *unit != 'G' && *unit != 'g') return false;
	if (*unit) unit++;
	/* Bits only: GB/s with a capital B would be eight times as much. */
	if (*unit && strcmp(unit, "b/s") && strcasecmp(unit, "bps") && strcasecmp(unit, "bit/s") && strcasecmp(unit, "bit")) return false;
	double value;
	if (!calc_number(number, 1e-6, 1e9, &value)) return false;
	*gbit = value * factor;
	return true;
}

/* The answer. */

static cJSON *checked(struct calc *c, cJSON *item)
{
	if (!item) c->out_of_memory = true;
	return item;
}

/* Twelve digits: what a formula gives, not what a double has. */
static double rounded(double value)
{
	char text[32];
	snprintf(text, sizeof(text), "%.12g", value);
	return strtod(text, NULL);
}

static void add_value(struct calc *c, const char *name, cJSON *value, const char *unit, const char *source, const char *format,
	va_list args)
{
	char formula[256] = "";
	cJSON *item = checked(c, cJSON_CreateObject());
	if (format) vsnprintf(formula, sizeof(formula), format, args);
	checked(c, cJSON_AddStringToObject(item, "name", name));
	if (!value || !cJSON_AddItemToObject(item, "value", value)) {
		cJSON_Delete(value);
		c->out_of_memory = true;
	}
	if (unit && *unit) checked(c, cJSON_AddStringToObject(item, "unit", unit));
	if (*formula) checked(c, cJSON_AddStringToObject(item, "formula", formula));
	if (source) checked(c, cJSON_AddStringToObject(item, "source", source));
	if (!item || !cJSON_AddItemToArray(c->values, item)) cJSON_Delete(item);
}

void calc_value(struct calc *c, const char *name, double value, const char *unit, const char *source, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	add_value(c, name, cJSON_CreateNumber(rounded(value)), unit, source, format, args);
	va_end(args);
}

void calc_range(struct calc *c, const char *name, double least, double most, const char *unit, const char *source,
	const char *format, ...)
{
	double both[] = { rounded(least), rounded(most) };
	va_list args;
	va_start(args, format);
	add_value(c, name, cJSON_CreateDoubleArray(both, 2), unit, source, format, args);
	va_end(args);
}

static void add_text(struct calc *c, const char *name, const char *text, const char *source, ...)
{
	va_list args;
	va_start(args, source);
	add_value(c, name, cJSON_CreateString(text), NULL, source, NULL, args);
	va_end(args);
}

void calc_text(struct calc *c, const char *name, const char *text, const char *source)
{
	add_text(c, name, text, source);
}

void calc_note(struct calc *c, const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	cJSON *item = checked(c, cJSON_CreateString(text));
	if (!item || !cJSON_AddItemToArray(c->notes, item)) cJSON_Delete(item);
}

/* An array of the cells between '|'. */
static cJSON *cells_of(struct calc *c, const char *text)
{
	cJSON *cells = checked(c, cJSON_CreateArray());
	for (;;) {
		char cell[160];
		size_t length = strcspn(text, "|");
		snprintf(cell, sizeof(cell), "%.*s", (int)length, text);
		cJSON *item = checked(c, cJSON_CreateString(cell));
		if (!item || !cJSON_AddItemToArray(cells, item)) cJSON_Delete(item);
		if (!text[length]) return cells;
		text += length + 1;
	}
}

static void add_or_drop(struct calc *c, cJSON *object, const char *name, cJSON *item)
{
	if (item && cJSON_AddItemToObject(object, name, item)) return;
	cJSON_Delete(item);
	c->out_of_memory = true;
}

cJSON *calc_table(struct calc *c, const char *title, const char *source, const char *columns)
{
	cJSON *table = checked(c, cJSON_CreateObject());
	checked(c, cJSON_AddStringToObject(table, "title", title));
	checked(c, cJSON_AddStringToObject(table, "source", source));
	add_or_drop(c, table, "columns", cells_of(c, columns));
	add_or_drop(c, table, "rows", cJSON_CreateArray());
	if (table && cJSON_AddItemToArray(c->tables, table)) return table;
	cJSON_Delete(table);
	return NULL;
}

void calc_row(struct calc *c, cJSON *table, const char *format, ...)
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	cJSON *row = cells_of(c, text);
	if (!row || !cJSON_AddItemToArray(cJSON_GetObjectItem(table, "rows"), row)) {
		cJSON_Delete(row);
		c->out_of_memory = true;
	}
}

/* Printing. */

static void number_text(double value, char *text, size_t size)
{
	if (value == floor(value) && fabs(value) < 1e15) snprintf(text, size, "%.0f", value);
	else if (fabs(value) >= 10000) snprintf(text, size, "%.1f", value);
	else snprintf(text, size, "%.4g", value);
}

/* Sources are numbered as they come up, and listed at the end. */
struct sources { const char *names[64]; int count; };

static int source_number(struct sources *all, const char *name)
{
	for (int i = 0; i < all->count; i++)
		if (!strcmp(all->names[i], name)) return i + 1;
	if (all->count < (int)(sizeof(all->names) / sizeof(all->names[0]))) all->names[all->count++] = name;
	return all->count;
}

static void print_value(const cJSON *item, struct sources *all)
{
	char text[300], low[40], high[40];
	const cJSON *value = cJSON_GetObjectItem(item, "value"), *unit = cJSON_GetObjectItem(item, "unit");
	const cJSON *formula = cJSON_GetObjectItem(item, "formula"), *source = cJSON_GetObjectItem(item, "source");
	if (cJSON_IsArray(value)) {
		number_text(cJSON_GetArrayItem(value, 0)->valuedouble, low, sizeof(low));
		number_text(cJSON_GetArrayItem(value, 1)->valuedouble, high, sizeof(high));
		snprintf(text, sizeof(text), "%s to %s", low, high);
	} else if (cJSON_IsNumber(value)) {
		number_text(value->valuedouble, text, sizeof(text));
	} else {
		snprintf(text, sizeof(text), "%s", value->valuestring);
	}
	if (unit) snprintf(text + strlen(text), sizeof(text) - strlen(text), " %s", unit->valuestring);
	printf("  %-40s %s\n", cJSON_GetObjectItem(item, "name")->valuestring, text);
	if (!formula && !source) return;
	printf("  %-40s", "");
	if (formula) printf(" = %s", formula->valuestring);
	if (source) printf(" [%d]", source_number(all, source->valuestring));
	printf("\n");
}

/* Characters, of which a few are more than a byte. */
static int columns_of(const char *text)
{
	int n = 0;
	for (; *text; text++) n += ((unsigned char)*text & 0xc0) != 0x80;
	return n;
}

static void print_cells(const cJSON *cells, const int *widths)
{
	int i = 0;
	for (const cJSON *cell = cells->child; cell; cell = cell->next, i++)
		printf("  %s%*s", cell->valuestring, cell->next ? widths[i] - columns_of(cell->valuestring) : 0, "");
	printf("\n");
}

static void print_table(const cJSON *table, struct sources *all)
{
	enum { MAX_COLUMNS = 16 };
	int widths[MAX_COLUMNS] = { 0 };
	const cJSON *columns = cJSON_GetObjectItem(table, "columns"), *rows = cJSON_GetObjectItem(table, "rows");
	for (const cJSON *row = columns; row; row = row == columns ? rows->child : row->next) {
		int i = 0;
		for (const cJSON *cell = row->child; cell && i < MAX_COLUMNS; cell = cell->next, i++) {
			int width = columns_of(cell->valuestring);
			if (width > widths[i]) widths[i] = width;
		}
	}
	printf("\n%s [%d]\n", cJSON_GetObjectItem(table, "title")->valuestring,
		source_number(all, cJSON_GetObjectItem(table, "source")->valuestring));
	print_cells(columns, widths);
	for (const cJSON *row = rows->child; row; row = row->next) print_cells(row, widths);
}

static void print_answer(const struct calc *c)
{
	struct sources all = { .count = 0 };
	printf("%s", c->command);
	for (int i = 0; i < c->nwords; i++) printf(" %s", c->words[i]);
	printf("\n");
	for (const cJSON *item = c->values->child; item; item = item->next) print_value(item, &all);
	for (const cJSON *item = c->tables->child; item; item = item->next) print_table(item, &all);
	if (c->notes->child) printf("\n");
	for (const cJSON *item = c->notes->child; item; item = item->next) printf("%s\n", item->valuestring);
	if (all.count) printf("\n");
	for (int i = 0; i < all.count; i++) printf("[%d] %s\n", i + 1, all.names[i]);
}

static int print_json(const struct calc *c)
{
	char *text = cJSON_Print(c->answer);
	if (!text) return 1;
	printf("%s\n", text);
	cJSON_free(text);
	return 0;
}

/* The command line. */

static int list_commands(FILE *to)
{
	fprintf(to, "usage: telpher calc COMMAND [WORDS] [OPTIONS]\n\n");
	for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++)
		for (size_t i = 0; i < *groups[g].count; i++) {
			char head[64];
			snprintf(head, sizeof(head), "%s %s", groups[g].commands[i].name, groups[g].commands[i].words);
			fprintf(to, "  %-36s %s\n", head, groups[g].commands[i].doc);
		}
	fprintf(to, "\nWithout words most print their whole table. `telpher calc --help` has the options.\n");
	return to == stdout ? 0 : TOOL_USAGE;
}

static const struct calc_command *find_command(const char *name)
{
	for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++)
		for (size_t i = 0; i < *groups[g].count; i++)
			if (calc_same(groups[g].commands[i].name, name)) return &groups[g].commands[i];
	return NULL;
}

static int run_command(const struct calc_command *command, struct calc *c, bool json)
{
	c->answer = checked(c, cJSON_CreateObject());
	cJSON *words = checked(c, cJSON_AddArrayToObject(c->answer, "words"));
	checked(c, cJSON_AddStringToObject(c->answer, "command", c->command));
	c->values = checked(c, cJSON_AddArrayToObject(c->answer, "values"));
	c->tables = checked(c, cJSON_AddArrayToObject(c->answer, "tables"));
	c->notes = checked(c, cJSON_AddArrayToObject(c->answer, "notes"));
	for (int i = 0; i < c->nwords; i++) {
		cJSON *word = checked(c, cJSON_CreateString(c->words[i]));
		if (!word || !cJSON_AddItemToArray(words, word)) cJSON_Delete(word);
	}
	int status = c->out_of_memory ? 0 : command->run(c);
	if (!status && c->out_of_memory) {
		fprintf(stderr, "telpher calc: out of memory\n");
		status = 1;
	}
	if (!status && json) status = print_json(c);
	else if (!status) print_answer(c);
	cJSON_Delete(c->answer);
	return status;
}

static int check_options(const struct calc *c)
{
	const struct calc_options *o = c->options;
	if (o->mps < 128 || o->mps > 4096 || o->mps & (o->mps - 1))
		return calc_refuse(c, "--mps %d: a maximum payload size is 128, 256, 512, 1024, 2048 or 4096 bytes", o->mps);
	if (o->mrrs < 128 || o->mrrs > 4096 || o->mrrs & (o->mrrs - 1))
		return calc_refuse(c, "--mrrs %d: a maximum read request size is 128, 256, 512, 1024, 2048 or 4096 bytes", o->mrrs);
	if (o->header != 12 && o->header != 16)
		return calc_refuse(c, "--header %d: a request's header is 12 bytes (addresses below 4 GiB) or 16", o->header);
	if (o->outstanding < 0 || o->outstanding > 65536) return calc_refuse(c, "--outstanding %d: from 1 to 65536 reads", o->outstanding);
	if (o->rtt_ns < 1 || o->rtt_ns > 1000000) return calc_refuse(c, "--rtt %d: from 1 to 1000000 ns", o->rtt_ns);
	if (o->nics < 1 || o->nics > 1024) return calc_refuse(c, "--nics %d: from 1 to 1024", o->nics);
	if (o->sockets < 1 || o->sockets > 64) return calc_refuse(c, "--sockets %d: from 1 to 64", o->sockets);
	if (!(o->memory_gbs >= 1 && o->memory_gbs <= 1e6)) return calc_refuse(c, "--memory %g: from 1 to 1000000 GB/s", o->memory_gbs);
	return 0;
}

int tool_calc(int argc, char **argv)
{
	struct calc_options o = { .mps = 256, .mrrs = 512, .header = 16, .rtt_ns = 1000, .nics = 8, .sockets = 2, .memory_gbs = 300 };
	int json = 0, code, status = 0;
	struct poptOption options[] = {
		{ "mps", 0, POPT_ARG_INT, &o.mps, 0, "pcie: maximum payload size (256)", "BYTES" },
		{ "mrrs", 0, POPT_ARG_INT, &o.mrrs, 0, "pcie: maximum read request size (512)", "BYTES" },
		{ "header", 0, POPT_ARG_INT, &o.header, 0, "pcie: header of a request, 12 or 16 (16, 64-bit addresses)", "BYTES" },
		{ "outstanding", 0, POPT_ARG_INT, &o.outstanding, 0, "pcie: reads in flight (as many as fill the link)", "N" },
		{ "rtt", 0, POPT_ARG_INT, &o.rtt_ns, 0, "pcie: a read's round trip (1000)", "NS" },
		{ "pcie", 0, POPT_ARG_STRING, &o.pcie, 0, "nic, path: generation of the PCIe slot (path: 5)", "GEN" },
		{ "lanes", 0, POPT_ARG_STRING, &o.lanes, 0, "nic, path: its lanes (16)", "N" },
		{ "nics", 0, POPT_ARG_INT, &o.nics, 0, "path: NICs of the machine, a GPU each (8)", "N" },
		{ "memory", 0, POPT_ARG_DOUBLE, &o.memory_gbs, 0, "path: memory bandwidth of a socket (300)", "GB/s" },
		{ "sockets", 0, POPT_ARG_INT, &o.sockets, 0, "path: sockets (2)", "N" },
		{ "bytes", 0, POPT_ARG_STRING, &o.bytes, 0, "busbw, s-star: size of a message", "SIZE" },
		{ "time", 0, POPT_ARG_STRING, &o.time_us, 0, "busbw: time of a call", "US" },
		{ "algbw", 0, POPT_ARG_STRING, &o.algbw_gbs, 0, "busbw: algorithm bandwidth", "GB/s" },
		{ "page", 0, POPT_ARG_STRING, &o.page, 0, "register: page size (4K and 2M)", "SIZE" },
		{ "json", 0, POPT_ARG_NONE, &json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	const char *words[MAX_WORDS];
	struct calc c = { .command = "calc", .options = &o, .words = words };
	poptContext context = poptGetContext("telpher calc", argc, (const char **)argv, options, 0);
	if (!context) return 1;
	poptSetOtherOptionHelp(context, "COMMAND [WORDS] [OPTIONS]\n\n`telpher calc` alone lists the commands.");
	code = tool_next_option(context, options);
	const char *name = code < -1 ? NULL : poptGetArg(context);
	const struct calc_command *command = name ? find_command(name) : NULL;
	while (command && c.nwords < MAX_WORDS && poptPeekArg(context)) words[c.nwords++] = poptGetArg(context);
	if (command) c.command = command->name;
	if (code < -1) status = tool_usage_error("calc", "%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (!name) status = list_commands(stderr);
	else if (!command) status = tool_usage_error("calc", "there is no command \"%s\"; `telpher calc` lists them", name);
	else if (c.nwords < command->min_words || c.nwords > command->max_words)
		status = calc_refuse(&c, "%d words; say %s %s", c.nwords, command->name, command->words);
	else status = check_options(&c);
	if (!status) status = run_command(command, &c, json);
	free(o.pcie);
	free(o.lanes);
	free(o.bytes);
	free(o.time_us);
	free(o.algbw_gbs);
	free(o.page);
	poptFreeContext(context);
	return status;
}
