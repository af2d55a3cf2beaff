/* What a user calls a node: by kind and number, by device name, by bus id, by rank. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "topo/doc.h"

/* "gpu0", "GPU 0", "gpu-0": the number; -1: not of this kind. */
static long number_after(const char *text, const char *kind)
{
	size_t bytes = strlen(kind);
	char *end;
	if (strncasecmp(text, kind, bytes) != 0) return -1;
	text += bytes;
	while (*text == ' ' || *text == '-' || *text == '_' || *text == ':') text++;
	if (!isdigit((unsigned char)*text)) return -1;
	long value = strtol(text, &end, 10);
	return *end ? -1 : value;
}

/* A node without a number (-1) isn't called by one. */
static bool is_number(const char *text, const char *kind, int number)
{
	return number >= 0 && number_after(text, kind) == number;
}

/* "gpu0.1": a part of a GPU. */
static bool is_part(const char *text, const struct tp_topo_node *node)
{
	char number[32];
	if (node->gpu.part < 0 || strncasecmp(text, "gpu", 3) != 0) return false;
	snprintf(number, sizeof(number), "%d.%d", node->gpu.dev, node->gpu.part);
	return strcmp(text + 3 + strspn(text + 3, " -_:"), number) == 0;
}

static bool is_called(const struct tp_topo_node *node, const char *name)
{
	int64_t bus;
	const char *bare = strchr(node->name, '/');
	if (strcasecmp(node->name, name) == 0 || (bare && strcasecmp(bare + 1, name) == 0)) return true;
	if (node->pci.bus_id[0] && tp_bus_id_parse(name, &bus)) return node->pci.bus == bus;
	switch (node->kind) {
	case TP_TOPO_GPU: return is_number(name, "gpu", node->gpu.dev) || is_part(name, node);
	case TP_TOPO_NET: return is_number(name, "net", node->net.dev) || is_number(name, "nic", node->net.dev);
	case TP_TOPO_CPU: return is_number(name, "cpu", node->cpu.numa) || is_number(name, "numa", node->cpu.numa);
	case TP_TOPO_NVS: return strcasecmp(name, "nvs") == 0;
	default: return false;
	}
}

/* What only says of which GPU it is a part. */
static bool is_part_of(const struct tp_topo_node *node, const char *name)
{
	int64_t bus;
	if (node->kind != TP_TOPO_GPU || node->gpu.part < 0) return false;
	return is_number(name, "gpu", node->gpu.dev) || (node->pci.bus_id[0] && tp_bus_id_parse(name, &bus) && node->pci.bus == bus);
}

/* "h3/gpu2": the host, and the rest; -1: of any. */
static int host_of(const char **name)
{
	int host = -1, bytes = 0;
	if (sscanf(*name, "h%d/%n", &host, &bytes) != 1 || !bytes || host < 0) return -1;
	*name += bytes;
	return host;
}

int32_t tp_topo_find_name(const struct tp_topo *topo, const char *name)
{
	static const enum tp_topo_kind order[] = { TP_TOPO_GPU, TP_TOPO_NET, TP_TOPO_CPU, TP_TOPO_NVS, TP_TOPO_NIC, TP_TOPO_PCI, TP_TOPO_CACHE, TP_TOPO_CORE };
	long rank = number_after(name, "rank");
	int host = host_of(&name);
	if (rank >= 0) return tp_topo_find_rank(topo, (int)TP_MIN(rank, INT32_MAX));
	for (size_t k = 0; k < TP_ARRAY_LEN(order); k++)
		for (int32_t i = 0; i < topo->count[order[k]]; i++) {
			const struct tp_topo_node *node = tp_topo_node_of(topo, order[k], i);
			if (host >= 0 && node->host != host) continue;
			if (is_part_of(node, name)) return -1;
			if (is_called(node, name)) return topo->of_kind[order[k]][i];
		}
	return -1;
}

void tp_topo_refuse_name(const struct tp_topo *topo, const char *where, const char *name, char *text, size_t bytes)
{
	const char *bare = name;
	int host = host_of(&bare), n = 0;
	size_t at = 0;
	for (int32_t i = 0; i < topo->count[TP_TOPO_GPU] && at < bytes; i++) {
		const struct tp_topo_node *node = tp_topo_node_of(topo, TP_TOPO_GPU, i);
		if ((host >= 0 && node->host != host) || !is_part_of(node, bare)) continue;
		at += (size_t)snprintf(text + at, bytes - at, n++ ? " or " : "in %s \"%s\" is a GPU of several parts: say ", where, name);
		if (at < bytes && host >= 0) at += (size_t)snprintf(text + at, bytes - at, "h%d/", host);
		if (at < bytes) at += (size_t)snprintf(text + at, bytes - at, "gpu%d.%d", node->gpu.dev, node->gpu.part);
	}
	if (!n) snprintf(text, bytes, "%s has nothing called \"%s\"", where, name);
}
