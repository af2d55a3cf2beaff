/* A device's place in the PCIe tree. A switch shows as two bridges one below the other, its upstream port and the device's
 * downstream port; it becomes one element, of the upstream port, as NCCL has it. Root ports belong to the CPU. What only the configuration
 * space tells (ACS, packet sizes) is known to root alone: others can't read so far into it. */
#include <stdlib.h>
#include <string.h>

#include "topo/discover.h"

#define DEVICES "/sys/bus/pci/devices"
#define CAPABILITY_EXPRESS 0x10
#define CAPABILITY_ACS 0x0d
#define CONFIG_BYTES 4096
#define ACS_REDIRECT 0x0c           /* request and completion redirect */

static uint16_t read16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static uint32_t read32(const uint8_t *at) { return (uint32_t)read16(at) | (uint32_t)read16(at + 2) << 16; }

/* A few bytes of the configuration. Each word is a slow access to the device, so lists are walked, not read as a whole. */
static bool read_config(const struct tp_discovery *d, const char *bus_id, size_t at, uint8_t *out, size_t bytes)
{
	return tp_sys_bytes_at(d, at, out, bytes, DEVICES "/%s/config", bus_id) == bytes;
}

static ncclResult_t describe_packets(struct tp_discovery *d, struct tp_element *e, const char *bus_id)
{
	uint8_t words[12];
	if (!read_config(d, bus_id, 0x34, words, 4)) return ncclSuccess;
	size_t at = words[0] & 0xfc;
	for (int i = 0; i < 48 && at >= 0x40 && at + 12 <= 256 && read_config(d, bus_id, at, words, 12); i++, at = words[1] & 0xfc) {
		if (words[0] != CAPABILITY_EXPRESS) continue;
		uint16_t control = read16(words + 8);
		TP_TRY(tp_doc_setf(d->doc, e, "mps", "%d", 128 << (control >> 5 & 7)));
		return tp_doc_setf(d->doc, e, "mrrs", "%d", 128 << (control >> 12 & 7));
	}
	return ncclSuccess;
}

/* 1: redirects peer traffic; 0: doesn't; -1: can't be seen. */
static int acs_of(const struct tp_discovery *d, const char *bus_id)
{
	uint8_t words[8];
	size_t at = 0x100;
	if (!read_config(d, bus_id, at, words, 4)) return -1;
	for (int i = 0; i < 64 && at >= 0x100 && at + 8 <= CONFIG_BYTES && read_config(d, bus_id, at, words, 8); i++) {
		uint32_t header = read32(words);
		if ((header & 0xffff) == CAPABILITY_ACS) return (read16(words + 6) & ACS_REDIRECT) != 0;
		at = header >> 20;
	}
	return 0;
}

static float speed_of(const struct tp_discovery *d, const char *bus_id, const char *which, char *text, size_t bytes)
{
	if (!tp_sys_text(d, text, bytes, DEVICES "/%s/%s_link_speed", bus_id, which)) *text = 0;
	return tp_pci_speed_parse(text);
}

static int width_of(const struct tp_discovery *d, const char *bus_id, const char *which)
{
	int64_t width;
	return tp_sys_number(d, &width, DEVICES "/%s/%s_link_width", bus_id, which) && width > 0 && width <= 32 ? (int)width : 0;
}

/* What both ends could, and what they agreed on. Idle GPUs save power by a slower link: their speed is what they could. port: the
 * bridge right above; "": none. */
static ncclResult_t describe_link(struct tp_discovery *d, struct tp_element *e, const char *bus_id, const char *port, bool gpu)
{
	char text[64], port_text[64], now_text[64];
	float possible = speed_of(d, bus_id, "max", text, sizeof(text)), above = *port ? speed_of(d, port, "max", port_text, sizeof(port_text)) : 0;
	float now = speed_of(d, bus_id, "current", now_text, sizeof(now_text));
	int width = width_of(d, bus_id, "max"), above_width = *port ? width_of(d, port, "max") : 0, now_width = width_of(d, bus_id, "current");
	if (above > 0 && (possible <= 0 || above < possible)) {
		possible = above;
		memcpy(text, port_text, sizeof(text));
	}
	if (above_width && (!width || above_width < width)) width = above_width;
	bool slower = !gpu && now > 0 && possible > now, narrower = now_width && width > now_width;
	TP_TRY(tp_doc_set(d->doc, e, "link_speed", slower || possible <= 0 ? now_text : text));
	TP_TRY(tp_doc_setf(d->doc, e, "link_width", "%d", now_width ? now_width : width));
	if (slower) TP_TRY(tp_doc_set(d->doc, e, "max_link_speed", text));
	return narrower ? tp_doc_setf(d->doc, e, "max_link_width", "%d", width) : ncclSuccess;
}

static ncclResult_t describe_bar1(struct tp_discovery *d, struct tp_element *e, const char *bus_id)
{
	uint8_t text[2048] = { 0 };
	unsigned long long start, end, flags;
	tp_sys_bytes(d, text, sizeof(text) - 1, DEVICES "/%s/resource", bus_id);
	const char *line = strchr((const char *)text, '\n');
	if (!line || sscanf(line + 1, "%llx %llx %llx", &start, &end, &flags) != 3 || end <= start) return ncclSuccess;
	return tp_doc_setf(d->doc, e, "bar1", "%llu", end - start + 1);
}

static ncclResult_t describe(struct tp_discovery *d, struct tp_element *e, const char *bus_id, const char *port)
{
	static const char *const ids[] = { "class", "vendor", "device", "subsystem_vendor", "subsystem_device" };
	char text[64], group[TP_PATH_BYTES];
	TP_TRY(tp_doc_set(d->doc, e, "busid", bus_id));
	for (size_t i = 0; i < TP_ARRAY_LEN(ids); i++)
		if (tp_sys_text(d, text, sizeof(text), DEVICES "/%s/%s", bus_id, ids[i])) TP_TRY(tp_doc_set(d->doc, e, ids[i], text));
	const char *class = tp_element_get(e, "class");
	bool gpu = class && (strncmp(class, "0x03", 4) == 0 || strncmp(class, "0x12", 4) == 0);
	TP_TRY(describe_link(d, e, bus_id, port, gpu));
	if (tp_sys_real(d, group, DEVICES "/%s/iommu_group", bus_id)) TP_TRY(tp_doc_set(d->doc, e, "iommu_group", strrchr(group, '/') + 1));
	TP_TRY(describe_packets(d, e, bus_id));
	return gpu ? describe_bar1(d, e, bus_id) : ncclSuccess;
}

#define MAX_CHAIN 32

/* The bus ids on the way from the root complex down to the device, which is the last. */
static int read_chain(const struct tp_discovery *d, const char *bus_id, char (*chain)[20])
{
	char path[TP_PATH_BYTES], *rest = path, *part;
	int count = 0;
	if (!tp_sys_real(d, path, DEVICES "/%s", bus_id)) return 0;
	while ((part = strsep(&rest, "/"))) {
		int64_t bus;
		if (!tp_bus_id_parse(part, &bus) || strlen(part) >= 20) continue;
		if (count == MAX_CHAIN) return 0;
		strcpy(chain[count++], part);
	}
	return count;
}

static int numa_of(const struct tp_discovery *d, const char *bus_id)
{
	int64_t numa;
	char text[1024];
	uint64_t mask[TP_CPU_WORDS], node[TP_CPU_WORDS];
	if (tp_sys_number(d, &numa, DEVICES "/%s/numa_node", bus_id) && numa >= 0) return (int)numa;
	if (!tp_sys_text(d, text, sizeof(text), DEVICES "/%s/local_cpulist", bus_id)) return 0;
	tp_sys_cpu_list(text, mask);
	for (const struct tp_element *cpu = d->doc->root->first; cpu; cpu = cpu->next) {
		if (strcmp(cpu->name, "cpu") != 0 || tp_element_mask(d->doc, cpu, "affinity", node) != ncclSuccess) continue;
		if (memcmp(mask, node, sizeof(mask)) == 0) return atoi(tp_element_get(cpu, "numaid"));
	}
	return 0;
}

static ncclResult_t get(struct tp_discovery *d, struct tp_element *parent, const char *bus_id, const char *port, struct tp_element **out)
{
	struct tp_element *e = tp_element_child_with(parent, "pci", "busid", bus_id);
	if (!e) {
		e = tp_doc_add(d->doc, parent, "pci");
		if (!e) return ncclSystemError;
		TP_TRY(describe(d, e, bus_id, port));
	}
	*out = e;
	return ncclSuccess;
}

ncclResult_t tp_discover_pci(struct tp_discovery *d, const char *bus_id, struct tp_element **out)
{
	char chain[MAX_CHAIN][20];
	int count = read_chain(d, bus_id, chain);
	if (!count) {
		count = 1;
		snprintf(chain[0], sizeof(chain[0]), "%s", bus_id);
	}
	struct tp_element *at = tp_discover_cpu_of(d, numa_of(d, bus_id));
	/* From the device up every second one, so from the root down those at the device's own parity. */
	for (int i = (count - 1) % 2; i < count; i += 2) {
		const char *port = i ? chain[i - 1] : "";
		/* A downstream port belongs to the switch that is `at`. */
		int acs = strcmp(at->name, "pci") == 0 ? acs_of(d, port) : -1;
		if (acs >= 0 && (acs == 1 || !tp_element_get(at, "acs"))) TP_TRY(tp_doc_setf(d->doc, at, "acs", "%d", acs));
		TP_TRY(get(d, at, chain[i], port, &at));
	}
	*out = at;
	return ncclSuccess;
}
