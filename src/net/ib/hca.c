/* NCCL_IB_HCA: which devices and ports may be used. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/ib.h"

static bool parse_item(const char *item, size_t length, struct tp_ib_hca_list *out, char *why, size_t bytes)
{
	const char *colon = memchr(item, ':', length);
	size_t name = colon ? (size_t)(colon - item) : length;
	int port = -1;
	char *end;

	if (colon) {
		long value = strtol(colon + 1, &end, 10);
		if (end == colon + 1 || end != item + length || value < 1 || value > 255) {
			snprintf(why, bytes, "'%.*s' has a port that is no number from 1 to 255", (int)length, item);
			return false;
		}
		port = (int)value;
	}
	if (name >= sizeof(out->items[0].name) || out->count == TP_IB_HCA_ITEMS) {
		snprintf(why, bytes, "at most %d names of at most %zu characters are possible", TP_IB_HCA_ITEMS, sizeof(out->items[0].name) - 1);
		return false;
	}
	memcpy(out->items[out->count].name, item, name);
	out->items[out->count].name[name] = 0;
	out->items[out->count++].port = port;
	return true;
}

bool tp_ib_hca_parse(const char *text, struct tp_ib_hca_list *out, char *why, size_t bytes)
{
	struct tp_ib_hca_list list = { 0 };

	for (; text && (*text == '^' || *text == '='); text++) {
		if (*text == '^') list.exclude = true;
		else list.exact = true;
	}
	while (text && *text) {
		/* No device has a blank in its name: they are those of "mlx5_0, mlx5_1". */
		text += strspn(text, " \t");
		size_t length = strcspn(text, ","), used = length;
		while (used > 0 && (text[used - 1] == ' ' || text[used - 1] == '\t')) used--;
		if (used > 0 && !parse_item(text, used, &list, why, bytes)) return false;
		text += length + (text[length] == ',');
	}
	*out = list;
	return true;
}

bool tp_ib_hca_names(const struct tp_ib_hca_list *list, int item, const char *device)
{
	const char *name = list->items[item].name;

	return list->exact ? strcmp(name, device) == 0 : strncmp(name, device, strlen(name)) == 0;
}

/* -1: none of the items. */
static int find_item(const struct tp_ib_hca_list *list, const char *device, int port)
{
	for (int i = 0; i < list->count; i++)
		if (tp_ib_hca_names(list, i, device) && (list->items[i].port < 0 || list->items[i].port == port)) return i;
	return -1;
}

bool tp_ib_hca_allows(const struct tp_ib_hca_list *list, const char *device, int port)
{
	return list->count == 0 || (find_item(list, device, port) >= 0) != list->exclude;
}

int tp_ib_hca_place(const struct tp_ib_hca_list *list, const char *device, int port)
{
	return list->exclude ? 0 : TP_MAX(find_item(list, device, port), 0);
}

bool tp_ib_hca_asks_for_card(const struct tp_ib_hca_list *list)
{
	for (int i = 0; i < list->count && !list->exclude; i++)
		if (strncmp(list->items[i].name, "telpher", 7) == 0) return true;
	return false;
}
