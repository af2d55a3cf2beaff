/* The path report: a list of pairs, printed by what they have in common, since that is what a reader asks for: which
 * paths there are, who uses them, and why not something better. */
#include <stdlib.h>
#include <string.h>
#include "watch/internal.h"

#define PAIRS_COLUMN 36
#define PAIRS_LISTED 64         /* of a group; more are counted */
#define GROUPS_LISTED 512       /* kinds of path; more are counted */

struct tp_watch_paths {
	struct tp_watch_path *list;     /* sorted by (from, to) */
	size_t count, capacity;
};

ncclResult_t tp_watch_paths_create(struct tp_watch_paths **out)
{
	struct tp_watch_paths *paths = tp_alloc(1, sizeof(*paths), "the path report");
	if (!paths)
		return ncclSystemError;
	*out = paths;
	return ncclSuccess;
}

void tp_watch_paths_destroy(struct tp_watch_paths *paths)
{
	if (!paths)
		return;
	free(paths->list);
	free(paths);
}

size_t tp_watch_paths_count(const struct tp_watch_paths *paths) { return paths->count; }

const struct tp_watch_path *tp_watch_paths_at(const struct tp_watch_paths *paths, size_t index) { return &paths->list[index]; }

/* The place of (from, to), or where it belongs. */
static size_t place_of(const struct tp_watch_paths *paths, int from, int to)
{
	size_t low = 0, high = paths->count;
	while (low < high) {
		size_t middle = (low + high) / 2;
		const struct tp_watch_path *p = &paths->list[middle];
		if (p->from < from || (p->from == from && p->to < to))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool is_pair(const struct tp_watch_paths *paths, size_t place, int from, int to)
{
	return place < paths->count && paths->list[place].from == from && paths->list[place].to == to;
}

/* A peer's text goes to a terminal: cut, and without control characters. */
static void clean_text(char *text, size_t bytes)
{
	text[bytes - 1] = 0;
	for (; *text; text++)
		if ((unsigned char)*text < ' ' || *text == 0x7f)
			*text = '?';
}

ncclResult_t tp_watch_paths_add(struct tp_watch_paths *paths, const struct tp_watch_path *path)
{
	size_t place = place_of(paths, path->from, path->to);
	if (!is_pair(paths, place, path->from, path->to)) {
		if (paths->count == paths->capacity) {
			size_t capacity = paths->capacity ? paths->capacity * 2 : 64;
			void *grown = realloc(paths->list, capacity * sizeof(*paths->list));
			if (!grown)
				return TP_FAIL(ncclSystemError, "out of memory: the path report needs room for %zu pairs", capacity);
			paths->list = grown;
			paths->capacity = capacity;
		}
		memmove(&paths->list[place + 1], &paths->list[place], (paths->count - place) * sizeof(*paths->list));
		paths->count++;
	}
	paths->list[place] = *path;
	clean_text(paths->list[place].via, sizeof(path->via));
	clean_text(paths->list[place].why, sizeof(path->why));
	clean_text(paths->list[place].type, sizeof(path->type));
	clean_text(paths->list[place].device, sizeof(path->device));
	clean_text(paths->list[place].code, sizeof(path->code));
	return ncclSuccess;
}

static bool same_group(const struct tp_watch_path *a, const struct tp_watch_path *b)
{
	return strcmp(a->via, b->via) == 0 && strcmp(a->why, b->why) == 0 && strcmp(a->type, b->type) == 0 && strcmp(a->device, b->device) == 0 &&
		a->gbps == b->gbps && a->gdr == b->gdr && a->devices == b->devices;
}

/* "NVL 370 GB/s 1.2 us", "NET mlx5_0 +3 200 GB/s 2 us GDR" */
static void topology_text(const struct tp_watch_path *p, char *text, size_t bytes)
{
	size_t used = (size_t)snprintf(text, bytes, "%s", p->type);
	if (p->device[0] && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " %s", p->device);
	if (p->devices > 1 && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " +%d", p->devices - 1);
	if (p->gbps > 0 && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " %.3g GB/s", (double)p->gbps);
	if (p->latency_us > 0 && used < bytes) used += (size_t)snprintf(text + used, bytes - used, " %.2g us", (double)p->latency_us);
	if (p->gdr >= 0 && used < bytes) snprintf(text + used, bytes - used, p->gdr ? " GDR" : " no GDR");
}

/* Is the opposite direction in the same group? */
static bool both_ways(const struct tp_watch_paths *paths, const struct tp_watch_path *p)
{
	size_t place = place_of(paths, p->to, p->from);
	return is_pair(paths, place, p->to, p->from) && same_group(&paths->list[place], p);
}

/* The entries of each group as a list, in their order: head[g] is the first of group g, next[i] follows entry i; -1: none. */
struct groups { int32_t *head, *tail, *next, *slots; size_t count, mask; };

static uint64_t group_hash(const struct tp_watch_path *p)
{
	uint64_t hash = tp_hash64(p->via, strlen(p->via), 1);
	hash = tp_hash64(p->why, strlen(p->why), hash);
	hash = tp_hash64(p->type, strlen(p->type), hash);
	return tp_hash64(p->device, strlen(p->device), hash);
}

static void add_to_group(const struct tp_watch_paths *paths, struct groups *g, int32_t i)
{
	size_t slot = group_hash(&paths->list[i]) & g->mask;
	while (g->slots[slot] && !same_group(&paths->list[g->head[g->slots[slot] - 1]], &paths->list[i])) slot = (slot + 1) & g->mask;
	g->next[i] = -1;
	if (g->slots[slot]) {
		int32_t group = g->slots[slot] - 1;
		g->next[g->tail[group]] = i;
		g->tail[group] = i;
	} else {
		g->head[g->count] = g->tail[g->count] = i;
		g->slots[slot] = (int32_t)++g->count;
	}
}

static void free_groups(struct groups *g)
{
	free(g->head);
	free(g->tail);
	free(g->next);
	free(g->slots);
}

static bool make_groups(const struct tp_watch_paths *paths, struct groups *g)
{
	size_t room = 16, count = TP_MAX(paths->count, 1);
	while (room < 2 * count) room *= 2;
	*g = (struct groups){ .mask = room - 1 };
	g->head = tp_alloc(count, sizeof(*g->head), "the path report's groups");
	g->tail = tp_alloc(count, sizeof(*g->tail), "the path report's groups");
	g->next = tp_alloc(count, sizeof(*g->next), "the path report's groups");
	g->slots = tp_alloc(room, sizeof(*g->slots), "the path report's groups");
	bool made = g->head && g->tail && g->next && g->slots;
	for (size_t i = 0; made && i < paths->count; i++) add_to_group(paths, g, (int32_t)i);
	if (!made) free_groups(g);
	return made;
}

struct widths { int via, topology; };

static void print_row(FILE *out, const struct widths *w, const char *via, const char *topology, const char *pairs, const char *why)
{
	int via_width = w->via;
	char first[160];
	if (w->topology) {
		snprintf(first, sizeof(first), "%-*s  %-*s", w->via, via, w->topology, topology);
		via = first;
		via_width += 2 + w->topology;
	}
	if (*why)
		fprintf(out, "%-*s  %-*s  %s\n", via_width, via, PAIRS_COLUMN, pairs, why);
	else
		fprintf(out, "%-*s  %s\n", via_width, via, pairs);
}

static void print_group(const struct tp_watch_paths *paths, const struct groups *g, size_t group, const struct widths *w, FILE *out)
{
	const struct tp_watch_path *head = &paths->list[g->head[group]];
	const char *via = head->via, *why = head->why;
	char row[PAIRS_COLUMN + 64] = "", pair[32], text[96], *topology = text;
	topology_text(head, text, sizeof(text));
	size_t used = 0, listed = 0, left_out = 0;
	for (int32_t i = g->head[group]; i >= 0; i = g->next[i]) {
		const struct tp_watch_path *p = &paths->list[i];
		bool both = p->from != p->to && both_ways(paths, p);
		if (both && p->from > p->to)
			continue;
		if (++listed > PAIRS_LISTED) {
			left_out++;
			continue;
		}
		int n = p->from == p->to ? snprintf(pair, sizeof(pair), "%d", p->from)
			: snprintf(pair, sizeof(pair), "%d%c%d", p->from, both ? '-' : '>', p->to);
		if (used && used + 1 + (size_t)n > PAIRS_COLUMN) {
			print_row(out, w, via, topology, row, why);
			via = why = "";
			text[0] = 0;
			used = 0;
		}
		used += (size_t)snprintf(row + used, sizeof(row) - used, "%s%s", used ? " " : "", pair);
	}
	if (used)
		print_row(out, w, via, topology, row, why);
	if (left_out) {
		snprintf(row, sizeof(row), "and %zu more pairs", left_out);
		print_row(out, w, "", "", row, "");
	}
}

void tp_watch_paths_print(const struct tp_watch_paths *paths, FILE *out)
{
	struct widths w = { .via = (int)strlen("path") };
	for (size_t i = 0; i < paths->count; i++) {
		char text[96];
		topology_text(&paths->list[i], text, sizeof(text));
		w.via = TP_MAX(w.via, (int)strlen(paths->list[i].via));
		if (paths->list[i].type[0]) w.topology = TP_MAX(w.topology, TP_MAX((int)strlen(text), (int)strlen("topology")));
	}
	struct groups groups;
	if (!make_groups(paths, &groups))
		return;
	print_row(out, &w, "path", "topology", "pairs of ranks", "why not a better one");
	for (size_t group = 0; group < TP_MIN(groups.count, (size_t)GROUPS_LISTED); group++)
		print_group(paths, &groups, group, &w, out);
	if (groups.count > GROUPS_LISTED)
		fprintf(out, "and %zu more kinds of path\n", groups.count - GROUPS_LISTED);
	free_groups(&groups);
}
