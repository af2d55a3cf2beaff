/* The port that a probe uses; see port.h. */
#include "probe/port.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse(const char *device, const char *why)
{
	static const char none_fits[] = "allows no port of the devices that there are: ";
	const char *names = device ? strstr(why, none_fits) : NULL;
	if (names) return probe_fail("-d %s: there is no such device or port; there are: %s", device, names + strlen(none_fits));
	if (strstr(why, "software card, which is used only where it is asked for")) return probe_fail("%s; here: -d telpher0", why);
	const char *cure = strncmp(why, "No device found", 15) == 0 && !(device && strncmp(device, "telpher", 7) == 0) ? "; -d telpher0 is a card in software" : "";
	return device ? probe_fail("-d %s: %s%s", device, why, cure) : probe_fail("no RDMA port: %s%s", why, cure);
}

/* One device, where the transport takes a list of beginnings. */
static bool is_a_name(const char *device)
{
	return *device && strlen(device) < 100 && !strpbrk(device, ",^=");
}

static int fill(struct tp_ib_port *ib, struct probe_port *out)
{
	struct probe_port port = { .ib = ib, .verbs = ib->context->verbs, .ethernet = ib->attr.link_layer == IBV_LINK_LAYER_ETHERNET };
	tp_ib_params_read(&port.params);
	if (tp_ib_port_gid(ib, &port.gid) != ncclSuccess) return probe_fail_below(NULL);
	*out = port;
	return 0;
}

int probe_open_port(const char *device, int gid_index, struct probe_port *out)
{
	char text[128], why[512];
	if (device && !is_a_name(device)) return probe_fail("-d %s: one device, as mlx5_0, or mlx5_0:2 with its port", device);
	/* The transport reads what the options say; before anything of it has run. */
	if (device) {
		snprintf(text, sizeof(text), "=%.120s", device);
		setenv("NCCL_IB_HCA", text, 1);
	}
	if (gid_index >= 0) {
		snprintf(text, sizeof(text), "%d", gid_index);
		setenv("NCCL_IB_GID_INDEX", text, 1);
	}
	if (!tp_ib_present(false, why, sizeof(why))) return refuse(device, why);
	return fill(tp_ib_port(0), out);
}

int probe_use_port(int index, struct probe_port *out) { return fill(tp_ib_port(index), out); }

const char *probe_port_text(const struct probe_port *port, char *text, size_t bytes)
{
	snprintf(text, bytes, "%s (%s%s, GID %d %s %s, %g Gb/s)", port->ib->text, port->ethernet ? "RoCE" : "InfiniBand",
		port->verbs->software ? ", Telpher's software card" : "", port->gid.index, port->gid.text, tp_ib_gid_type_name(port->gid.type),
		port->ib->mbps / 1000.0);
	return text;
}

int probe_check_reach(const struct probe_port *port, const struct probe_hello *peer)
{
	char text[256], theirs[48];
	if (peer->link_layer != port->ib->attr.link_layer)
		return probe_fail("%s is %s, and %s of %s is not: they can't reach each other", port->ib->text, port->ethernet ? "RoCE" : "InfiniBand", peer->port,
			peer->host);
	const char *why = tp_ib_gid_unreachable(port->gid.raw, port->gid.type, peer->gid, peer->gid_type, port->ethernet, text, sizeof(text));
	if (!why) return 0;
	return probe_fail("%s (GID %d %s, %s) can't reach %s of %s (GID %s, %s): %s. Other GIDs: -g on either side", port->ib->text, port->gid.index,
		port->gid.text, tp_ib_gid_type_name(port->gid.type), peer->port, peer->host, tp_ib_gid_format(peer->gid, theirs),
		tp_ib_gid_type_name(peer->gid_type), why);
}

cJSON *probe_port_json(const struct probe_port *port)
{
	cJSON *json = cJSON_CreateObject();
	cJSON_AddStringToObject(json, "port", port->ib->text);
	cJSON_AddStringToObject(json, "link_layer", port->ethernet ? "RoCE" : "InfiniBand");
	cJSON_AddBoolToObject(json, "software", port->verbs->software);
	cJSON_AddNumberToObject(json, "gbit", port->ib->mbps / 1000.0);
	cJSON_AddNumberToObject(json, "gid_index", port->gid.index);
	cJSON_AddStringToObject(json, "gid", port->gid.text);
	cJSON_AddNumberToObject(json, "max_message", port->ib->attr.max_msg_sz);
	return json;
}
