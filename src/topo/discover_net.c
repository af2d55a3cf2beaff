/* NICs: the ports that a transport uses, where the caller knows them (the user may have chosen some); else RDMA devices from /sys/class/infiniband, each active port a net; where there are none, the network interfaces that are
 * devices or have a speed. Numbers follow the names. */
#include <stdlib.h>
#include <string.h>

#include "topo/discover.h"

#define RDMA "/sys/class/infiniband"
#define NET "/sys/class/net"
#define ACTIVE 4                    /* "4: ACTIVE" */

/* "400 Gb/sec (4X NDR)" in Mb/s. */
static int speed_of(const char *text)
{
	double gigabits = strtod(text, NULL);
	return gigabits > 0 && gigabits < 100000 ? (int)(gigabits * 1000) : 0;
}

/* The folder's device as a bus id; false: it is no PCI device. */
static bool bus_of(const struct tp_discovery *d, const char *folder, const char *name, char bus_id[20])
{
	char path[TP_PATH_BYTES];
	int64_t bus;
	if (!tp_sys_real(d, path, "%s/%s/device", folder, name)) return false;
	const char *last = strrchr(path, '/');
	if (!last || strlen(last + 1) >= 20 || !tp_bus_id_parse(last + 1, &bus)) return false;
	strcpy(bus_id, last + 1);
	return true;
}

/* bus_id "": it is no PCI device. */
static ncclResult_t make_nic(struct tp_discovery *d, const char *bus_id, struct tp_element **out)
{
	struct tp_element *parent;
	if (*bus_id) TP_TRY(tp_discover_pci(d, bus_id, &parent));
	else parent = tp_discover_cpu_of(d, 0);
	*out = tp_element_child(parent, "nic");
	if (!*out) *out = tp_doc_add(d->doc, parent, "nic");
	return *out ? ncclSuccess : ncclSystemError;
}

static ncclResult_t find_nic(struct tp_discovery *d, const char *folder, const char *name, struct tp_element **out)
{
	char bus_id[20] = "";
	return make_nic(d, bus_of(d, folder, name, bus_id) ? bus_id : "", out);
}

static ncclResult_t add_net(struct tp_discovery *d, struct tp_element *nic, const char *name, int dev, int port, int speed, const char *guid, bool gdr,
	const char *fabric)
{
	struct tp_element *net = tp_doc_add(d->doc, nic, "net");
	if (!net) return ncclSystemError;
	TP_TRY(tp_doc_set(d->doc, net, "name", name));
	TP_TRY(tp_doc_setf(d->doc, net, "dev", "%d", dev));
	TP_TRY(tp_doc_setf(d->doc, net, "speed", "%d", speed));
	TP_TRY(tp_doc_setf(d->doc, net, "port", "%d", port));
	TP_TRY(tp_doc_set(d->doc, net, "latency", "0.000000"));
	TP_TRY(tp_doc_set(d->doc, net, "guid", guid));
	TP_TRY(tp_doc_set(d->doc, net, "maxconn", "131072"));
	TP_TRY(tp_doc_set(d->doc, net, "gdr", gdr ? "1" : "0"));
	return tp_doc_set(d->doc, net, "fabric", fabric);
}

/* "fc6a:1c03:0060:d5a8" as one number. */
static void read_guid(const struct tp_discovery *d, const char *device, char out[24])
{
	char text[64], *to = out + 2;
	strcpy(out, "0x0");
	if (!tp_sys_text(d, text, sizeof(text), RDMA "/%s/node_guid", device)) return;
	for (const char *p = text; *p && to < out + 18; p++)
		if (*p != ':') *to++ = *p;
	*to = 0;
	if (strspn(out + 2, "0123456789abcdefABCDEF") != strlen(out + 2) || !out[2]) strcpy(out, "0x0");
}

static bool any_gdr(const struct tp_discovery *d)
{
	return tp_discover_gdr(d, false) || tp_discover_gdr(d, true);
}

static ncclResult_t add_rdma(struct tp_discovery *d, const char *device, int *dev)
{
	char ports[16][TP_TOPO_NAME_BYTES], text[64], guid[24], vendor[16] = "";
	int nports = tp_sys_list(d, ports, (int)TP_ARRAY_LEN(ports), RDMA "/%s/ports", device);
	struct tp_element *nic = NULL;
	read_guid(d, device, guid);
	bool hardware = tp_sys_text(d, vendor, sizeof(vendor), RDMA "/%s/device/vendor", device);
	bool efa = strcmp(vendor, "0x1d0f") == 0;
	for (int i = 0; i < nports; i++) {
		int64_t state = 0;
		if (!tp_sys_text(d, text, sizeof(text), RDMA "/%s/ports/%s/state", device, ports[i]) || (state = atoi(text)) != ACTIVE) continue;
		int speed = tp_sys_text(d, text, sizeof(text), RDMA "/%s/ports/%s/rate", device, ports[i]) ? speed_of(text) : 0;
		bool ib = tp_sys_text(d, text, sizeof(text), RDMA "/%s/ports/%s/link_layer", device, ports[i]) && strcmp(text, "InfiniBand") == 0;
		if (!nic) TP_TRY(find_nic(d, RDMA, device, &nic));
		TP_TRY(add_net(d, nic, device, (*dev)++, atoi(ports[i]), speed, guid, hardware && any_gdr(d), efa ? "efa" : ib ? "ib" : "roce"));
	}
	return ncclSuccess;
}

static ncclResult_t add_interface(struct tp_discovery *d, const char *name, int *dev)
{
	struct tp_element *nic;
	int64_t speed = 0, flags = 0, carrier = 1;
	char state[32] = "";
	/* Up, and no loopback; bridges and other software without a device of its own are left out. */
	if (!tp_sys_number(d, &flags, NET "/%s/flags", name) || !(flags & 1) || flags & 8 || !tp_sys_exists(d, NET "/%s/device", name)) return ncclSuccess;
	if (tp_sys_number(d, &carrier, NET "/%s/carrier", name) && !carrier) return ncclSuccess;
	if (tp_sys_text(d, state, sizeof(state), NET "/%s/operstate", name) && strcmp(state, "down") == 0) return ncclSuccess;
	if (!tp_sys_number(d, &speed, NET "/%s/speed", name) || speed <= 0 || speed > 10000000) speed = 10000;
	TP_TRY(find_nic(d, NET, name, &nic));
	char guid[24];
	snprintf(guid, sizeof(guid), "0x%x", (unsigned)*dev);
	return add_net(d, nic, name, (*dev)++, 0, (int)speed, guid, false, "ethernet");
}

static const char *fabric_of(const struct tp_discovery *d, const char *name, int port)
{
	char text[64];
	if (!tp_sys_exists(d, RDMA "/%s", name)) return tp_sys_exists(d, NET "/%s", name) ? "ethernet" : "roce";
	if (tp_sys_text(d, text, sizeof(text), RDMA "/%s/device/vendor", name) && strcmp(text, "0x1d0f") == 0) return "efa";
	return tp_sys_text(d, text, sizeof(text), RDMA "/%s/ports/%d/link_layer", name, port) && strcmp(text, "InfiniBand") == 0 ? "ib" : "roce";
}

static ncclResult_t add_port(struct tp_discovery *d, const struct tp_topo_port *port, int dev)
{
	struct tp_element *nic;
	char guid[24];
	TP_TRY(make_nic(d, port->bus_id, &nic));
	snprintf(guid, sizeof(guid), "0x%llx", (unsigned long long)port->guid);
	TP_TRY(add_net(d, nic, port->name, dev, port->port, port->mbps, guid, port->gdr, fabric_of(d, port->name, port->port)));
	return port->latency_us > 0 ? tp_doc_setf(d->doc, nic->last, "latency", "%.6f", port->latency_us) : ncclSuccess;
}

ncclResult_t tp_discover_nics(struct tp_discovery *d)
{
	if (d->find->ports) {
		for (int i = 0; i < d->find->nports; i++) TP_TRY(add_port(d, &d->find->ports[i], i));
		return ncclSuccess;
	}
	char (*names)[TP_TOPO_NAME_BYTES] = tp_alloc(TP_MAX_DEVICES, sizeof(*names), "the machine's NICs");
	ncclResult_t result = ncclSuccess;
	int dev = 0;
	if (!names) return ncclSystemError;
	int count = tp_sys_list(d, names, TP_MAX_DEVICES, RDMA);
	for (int i = 0; i < count && result == ncclSuccess; i++) result = add_rdma(d, names[i], &dev);
	count = dev ? 0 : tp_sys_list(d, names, TP_MAX_DEVICES, NET);
	for (int i = 0; i < count && result == ncclSuccess; i++) result = add_interface(d, names[i], &dev);
	free(names);
	return result;
}
