/* What a description lacks for planning. Files of providers place devices and say nothing of what they are: which GPU it is, and
 * how fast a NIC is, follows from the device's numbers where they are known. Every guess is told. */
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

/* Identities: the PCI ID repository; NVLinks to switches: NVIDIA's data sheets. */
static const struct { uint32_t device; int sm, switch_links; const char *name; } gpus[] = {
	{ 0x15f8, 60, 0, "P100 PCIe" }, { 0x15f9, 60, 0, "P100 SXM2" }, { 0x1db1, 70, 0, "V100 SXM2" }, { 0x1db4, 70, 0, "V100 PCIe" },
	{ 0x1db5, 70, 0, "V100 SXM2" }, { 0x1db8, 70, 6, "V100 SXM3" }, { 0x1eb8, 75, 0, "T4" }, { 0x20b0, 80, 12, "A100 SXM4 40GB" },
	{ 0x20b2, 80, 12, "A100 SXM4 80GB" }, { 0x20b5, 80, 0, "A100 PCIe 80GB" }, { 0x20f1, 80, 0, "A100 PCIe 40GB" }, { 0x20b7, 80, 0, "A30" },
	{ 0x20f3, 80, 8, "A800 SXM4" }, { 0x2236, 86, 0, "A10" }, { 0x2237, 86, 0, "A10G" }, { 0x26b9, 89, 0, "L40S" }, { 0x27b8, 89, 0, "L4" },
	{ 0x2330, 90, 18, "H100 SXM5" }, { 0x2331, 90, 0, "H100 PCIe" }, { 0x2321, 90, 0, "H100 NVL" }, { 0x2335, 90, 18, "H200 SXM" },
	{ 0x2339, 90, 18, "H100 SXM5" }, { 0x233b, 90, 0, "H200 NVL" }, { 0x2901, 100, 18, "B200" }, { 0x2941, 100, 18, "GB200" }, { 0x31c2, 103, 18, "GB300" },
};
static const struct { uint32_t vendor, device; int mbps; const char *name; } nics[] = {
	{ 0x1d0f, 0xefa0, 100000, "EFA" }, { 0x1d0f, 0xefa1, 100000, "EFA" }, { 0x1d0f, 0xefa2, 200000, "EFA" }, { 0x15b3, 0x1013, 100000, "ConnectX-4" },
	{ 0x15b3, 0x1017, 100000, "ConnectX-5" }, { 0x15b3, 0x1019, 100000, "ConnectX-5 Ex" }, { 0x15b3, 0x101b, 200000, "ConnectX-6" },
	{ 0x15b3, 0x101c, 200000, "ConnectX-6 VF" }, { 0x15b3, 0x101d, 100000, "ConnectX-6 Dx" }, { 0x15b3, 0x1021, 400000, "ConnectX-7" },
	{ 0x15b3, 0x1023, 800000, "ConnectX-8" }, { 0x15b3, 0xa2d6, 100000, "BlueField-2" }, { 0x15b3, 0xa2dc, 400000, "BlueField-3" },
};

struct completion { struct tp_topo_doc *doc; FILE *notes; int next_dev, next_rank, next_net; };

static uint32_t number(const struct tp_element *e, const char *name)
{
	const char *text = tp_element_get(e, name);
	return text ? (uint32_t)strtoul(text, NULL, 16) : 0;
}

static ncclResult_t next_numbers(struct completion *c)
{
	for (const struct tp_element *e = c->doc->root; e; e = tp_doc_walk(c->doc, e)) {
		int64_t dev, rank;
		bool gpu = strcmp(e->name, "gpu") == 0, net = strcmp(e->name, "net") == 0;
		if (!gpu && !net) continue;
		TP_TRY(tp_element_int(c->doc, e, "dev", -1, 1 << 20, -1, &dev));
		TP_TRY(tp_element_int(c->doc, e, "rank", -1, 1 << 24, -1, &rank));
		int *next = gpu ? &c->next_dev : &c->next_net;
		if (dev >= *next) *next = (int)dev + 1;
		if (gpu && rank >= c->next_rank) c->next_rank = (int)rank + 1;
	}
	return ncclSuccess;
}

static ncclResult_t add_gpu(struct completion *c, struct tp_element *pci)
{
	uint32_t device = number(pci, "device");
	int sm = 80, links = 0;
	const char *name = NULL;
	for (size_t i = 0; i < TP_ARRAY_LEN(gpus); i++) {
		if (gpus[i].device != device || number(pci, "vendor") != 0x10de) continue;
		sm = gpus[i].sm;
		links = gpus[i].switch_links;
		name = gpus[i].name;
	}
	struct tp_element *gpu = tp_doc_add(c->doc, pci, "gpu");
	if (!gpu) return ncclSystemError;
	TP_TRY(tp_doc_setf(c->doc, gpu, "dev", "%d", c->next_dev++));
	TP_TRY(tp_doc_setf(c->doc, gpu, "sm", "%d", sm));
	TP_TRY(tp_doc_set(c->doc, gpu, "gdr", "1"));
	if (c->notes)
		fprintf(c->notes, "assumed: %s is %s (compute capability %d.%d), GPUDirect works%s\n", tp_element_get(pci, "busid"), name ? name : "some GPU", sm / 10, sm % 10,
			links ? ", NVLinks to switches" : ", no NVLink");
	if (!links) return ncclSuccess;
	struct tp_element *link = tp_doc_add(c->doc, gpu, "nvlink");
	if (!link) return ncclSystemError;
	TP_TRY(tp_doc_set(c->doc, link, "target", "fffffff:ffff:ff"));
	TP_TRY(tp_doc_setf(c->doc, link, "count", "%d", links));
	return tp_doc_set(c->doc, link, "tclass", "0x068000");
}

static ncclResult_t add_nic(struct completion *c, struct tp_element *pci)
{
	int mbps = 100000;
	const char *name = NULL;
	for (size_t i = 0; i < TP_ARRAY_LEN(nics); i++) {
		if (nics[i].vendor != number(pci, "vendor") || nics[i].device != number(pci, "device")) continue;
		mbps = nics[i].mbps;
		name = nics[i].name;
	}
	struct tp_element *nic = tp_doc_add(c->doc, pci, "nic"), *net = nic ? tp_doc_add(c->doc, nic, "net") : NULL;
	if (!net) return ncclSystemError;
	TP_TRY(tp_doc_setf(c->doc, net, "name", "net%d", c->next_net));
	TP_TRY(tp_doc_setf(c->doc, net, "dev", "%d", c->next_net++));
	TP_TRY(tp_doc_setf(c->doc, net, "speed", "%d", mbps));
	TP_TRY(tp_doc_set(c->doc, net, "port", "1"));
	TP_TRY(tp_doc_set(c->doc, net, "gdr", "1"));
	if (c->notes)
		fprintf(c->notes, "assumed: %s is %s of %d Gb/s, GPUDirect works\n", tp_element_get(pci, "busid"), name ? name : "some NIC", mbps / 1000);
	return ncclSuccess;
}

/* A GPU that no driver described, as where there is none. */
static ncclResult_t name_generation(struct completion *c, struct tp_element *pci, struct tp_element *gpu)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(gpus); i++) {
		if (gpus[i].device != number(pci, "device") || number(pci, "vendor") != 0x10de) continue;
		if (c->notes) fprintf(c->notes, "assumed: %s is %s (compute capability %d.%d)\n", tp_element_get(pci, "busid"), gpus[i].name, gpus[i].sm / 10, gpus[i].sm % 10);
		return tp_doc_setf(c->doc, gpu, "sm", "%d", gpus[i].sm);
	}
	return ncclSuccess;
}

static ncclResult_t add_what_is_meant(struct completion *c, struct tp_element *pci)
{
	const char *class = tp_element_get(pci, "class");
	struct tp_element *gpu = tp_element_child(pci, "gpu");
	if (gpu && !tp_element_get(gpu, "sm")) return name_generation(c, pci, gpu);
	if (!class || pci->first) return ncclSuccess;
	/* A server's own screen (VGA) is no GPU. */
	bool maker = !number(pci, "vendor") || number(pci, "vendor") == 0x10de || number(pci, "vendor") == 0x1002;
	if (strncmp(class, "0x0300", 6) == 0 && !maker) return ncclSuccess;
	if (strncmp(class, "0x0300", 6) == 0 || strncmp(class, "0x0302", 6) == 0 || strncmp(class, "0x0380", 6) == 0 || strncmp(class, "0x12", 4) == 0)
		return add_gpu(c, pci);
	return strncmp(class, "0x02", 4) == 0 ? add_nic(c, pci) : ncclSuccess;
}

ncclResult_t tp_topo_doc_complete(struct tp_topo_doc *doc, FILE *notes)
{
	struct completion c = { .doc = doc, .notes = notes };
	TP_TRY(next_numbers(&c));
	/* Nothing is added behind what was walked: what is new lies inside the element itself. */
	for (struct tp_element *e = doc->root; e; e = tp_doc_walk(doc, e))
		if (strcmp(e->name, "pci") == 0) TP_TRY(add_what_is_meant(&c, e));
	for (struct tp_element *e = doc->root; e; e = tp_doc_walk(doc, e)) {
		if (strcmp(e->name, "gpu") == 0 && !tp_element_get(e, "dev")) TP_TRY(tp_doc_setf(doc, e, "dev", "%d", c.next_dev++));
		if (strcmp(e->name, "gpu") == 0 && !tp_element_get(e, "rank")) TP_TRY(tp_doc_setf(doc, e, "rank", "%d", c.next_rank++));
	}
	return tp_doc_check(doc);
}

struct numbered { int64_t rank, dev; struct tp_element *gpu; };

static int by_number(const void *a, const void *b)
{
	const struct numbered *x = a, *y = b;
	if ((x->rank < 0) != (y->rank < 0)) return x->rank < 0 ? 1 : -1;
	if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
	return x->dev < y->dev ? -1 : x->dev > y->dev;
}

static ncclResult_t list_gpus(const struct tp_topo_doc *doc, struct numbered *list, int *count)
{
	int found = 0;
	for (struct tp_element *e = doc->root; e; e = tp_doc_walk(doc, e)) {
		if (strcmp(e->name, "gpu") != 0) continue;
		if (list) {
			list[found].gpu = e;
			TP_TRY(tp_element_int(doc, e, "rank", -1, 1 << 24, -1, &list[found].rank));
			TP_TRY(tp_element_int(doc, e, "dev", -1, 1 << 20, -1, &list[found].dev));
		}
		found++;
	}
	*count = found;
	return ncclSuccess;
}

ncclResult_t tp_topo_doc_keep_gpus(struct tp_topo_doc *doc, int count)
{
	int found;
	TP_TRY(list_gpus(doc, NULL, &found));
	if (count < 1 || count > found) return TP_FAIL(ncclInvalidUsage, "%s has %d GPU%s, not %d", doc->name, found, found == 1 ? "" : "s", count);
	struct numbered *list = tp_alloc((size_t)found, sizeof(*list), "the GPUs of a description");
	if (!list) return ncclSystemError;
	ncclResult_t result = list_gpus(doc, list, &found);
	if (result == ncclSuccess) qsort(list, (size_t)found, sizeof(*list), by_number);
	for (int i = count; i < found && result == ncclSuccess; i++) {
		/* With its own PCI function; one that has another child stays. */
		struct tp_element *gpu = list[i].gpu, *above = gpu->parent;
		bool alone = above && strcmp(above->name, "pci") == 0 && above->first == gpu && !gpu->next;
		tp_doc_remove(alone ? above : gpu);
	}
	free(list);
	return result;
}
