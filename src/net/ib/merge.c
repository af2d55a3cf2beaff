/* Which ports make one device. By default those of one card, as it is one place in the machine with one link to the processor;
 * NCCL_NET_MERGE_LEVEL merges what is further apart, NCCL_NET_FORCE_MERGE names what belongs together. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/ib.h"

/* "…/0000:c1:00.1" to "…/0000:c1:00": functions of one card are its ports; virtual ones may have other device numbers too. */
static size_t card_length(const char *path, bool vfs)
{
	const char *last = strrchr(path, '/');
	size_t length = strlen(path), name = last ? strlen(last + 1) : 0;

	if (name < 12 || last[name - 1] != '.') return length;
	return length - (vfs ? 5 : 2);
}

static bool same_card(const char *a, const char *b, bool vfs)
{
	size_t length = card_length(a, vfs);

	return length == card_length(b, vfs) && memcmp(a, b, length) == 0;
}

/* Parts of two paths below the host bridge that aren't the same, of the longer one; *shared: those that are. */
static int parts_apart(const char *a, const char *b, int *shared)
{
	const char *text[2] = { a, b };
	int left[2] = { 0, 0 };
	size_t same = 0;

	*shared = 0;
	for (size_t i = 0; a[i] && a[i] == b[i]; i++)
		if (a[i + 1] == '/' && b[i + 1] == '/') {
			same = i + 1;
			(*shared)++;
		}
	for (int i = 0; i < 2; i++)
		for (const char *c = text[i] + same; *c; c++) left[i] += *c == '/';
	return TP_MAX(left[0], left[1]);
}

enum tp_ib_distance tp_ib_port_distance(const struct tp_ib_port *a, const struct tp_ib_port *b, bool vfs)
{
	const char *root_a = strstr(a->context->pci_path, "/pci"), *root_b = strstr(b->context->pci_path, "/pci");
	int shared, apart;

	if (a->context == b->context) return TP_IB_PORT;
	if (!root_a || !root_b) return TP_IB_SYS;
	if (same_card(root_a, root_b, vfs)) return TP_IB_PORT;
	apart = parts_apart(root_a, root_b, &shared);
	/* A switch is two bridges one behind the other, of which the two share the first. */
	if (shared > 1) return apart <= 2 ? TP_IB_PIX : TP_IB_PXB;
	if (shared == 1) return apart <= 1 ? TP_IB_PIX : TP_IB_PHB;
	return a->context->numa >= 0 && a->context->numa == b->context->numa ? TP_IB_PHB : TP_IB_SYS;
}

static void add(struct tp_ib_device *device, int at, struct tp_ib_port *port)
{
	size_t name = strlen(device->name), text = strlen(device->text);

	port->device = at;
	port->place = device->nports;
	snprintf(device->name + name, sizeof(device->name) - name, "%s%.63s", device->nports ? "+" : "", port->context->name);
	snprintf(device->text + text, sizeof(device->text) - text, "%s%.79s", device->nports ? "+" : "", port->text);
	device->ports[device->nports++] = port;
	device->mbps += port->mbps;
}

/* May it join this device? Of the two kinds of link neither end could reach all of the other's. */
static bool may_join(const struct tp_ib_device *device, const struct tp_ib_port *port)
{
	return device->nports < TP_IB_MAX_MERGED && device->ports[0]->attr.link_layer == port->attr.link_layer;
}

static void force_item(struct tp_ib_port *ports, int count, const char *item, int at, struct tp_ib_device *device)
{
	struct tp_ib_hca_list list;
	char why[256] = "it names no port that can be used";
	bool any = false;

	if (tp_ib_hca_parse(item, &list, why, sizeof(why)) && list.count == 1 && !list.exclude) {
		list.exact = true;
		for (int i = 0; i < count; i++) {
			if (!tp_ib_hca_allows(&list, ports[i].context->name, ports[i].number)) continue;
			any = true;
			if (ports[i].device >= 0) snprintf(why, sizeof(why), "%s is in a device already", ports[i].text);
			else if (device->nports > 0 && !may_join(device, &ports[i])) snprintf(why, sizeof(why), "a device has at most %d ports, all InfiniBand or all Ethernet", TP_IB_MAX_MERGED);
			else {
				add(device, at, &ports[i]);
				continue;
			}
			any = false;
			break;
		}
	}
	if (!any) TP_WARN("NET/IB : NCCL_NET_FORCE_MERGE: '%s' is not merged with others: %s", item, why);
}

/* "a,b;c:1,c:2": devices, each a list of names of ports. */
static int force(const struct tp_ib_params *params, struct tp_ib_port *ports, int count, struct tp_ib_device *out)
{
	char *text = params->force_merge ? strdup(params->force_merge) : NULL, *rest = text, *list, *item;
	int n = 0;

	while (rest && (list = strsep(&rest, ";")) != NULL && n < count) {
		memset(&out[n], 0, sizeof(out[n]));
		while ((item = strsep(&list, ",")) != NULL)
			if (*item) force_item(ports, count, item, n, &out[n]);
		n += out[n].nports > 0;
	}
	free(text);
	return n;
}

static int by_first_port(const void *a, const void *b)
{
	const struct tp_ib_device *da = a, *db = b;

	return da->ports[0] < db->ports[0] ? -1 : 1;
}

int tp_ib_merge(const struct tp_ib_params *params, struct tp_ib_port *ports, int count, struct tp_ib_device *out)
{
	int n = 0;

	for (int i = 0; i < count; i++) ports[i].device = -1;
	if (params->merge) n = force(params, ports, count, out);
	for (int i = 0; i < count; i++) {
		if (ports[i].device >= 0) continue;
		memset(&out[n], 0, sizeof(out[n]));
		add(&out[n], n, &ports[i]);
		for (int k = i + 1; k < count && params->merge && params->merge_level > TP_IB_LOC; k++)
			if (ports[k].device < 0 && may_join(&out[n], &ports[k]) && tp_ib_port_distance(&ports[i], &ports[k], params->merge_vfs) <= (enum tp_ib_distance)params->merge_level)
				add(&out[n], n, &ports[k]);
		n++;
	}
	qsort(out, (size_t)n, sizeof(*out), by_first_port);
	for (int d = 0; d < n; d++)
		for (int i = 0; i < out[d].nports; i++) out[d].ports[i]->device = d;
	return n;
}
