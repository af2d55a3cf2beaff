/* The machine as it shows itself: CPUs, then the GPUs and NICs that were asked for, each at its place. What can't be seen is left out:
 * in a container without /sys there is one CPU with the processors of this process. */
#include <string.h>

#include "topo/discover.h"

/* Products of hypervisors and clouds, by what the firmware says. */
static ncclResult_t find_virtual(struct tp_discovery *d)
{
	char vendor[128] = "", product[128] = "";
	uint8_t cpuinfo[4096] = { 0 };
	tp_sys_text(d, vendor, sizeof(vendor), "/sys/class/dmi/id/sys_vendor");
	tp_sys_text(d, product, sizeof(product), "/sys/class/dmi/id/product_name");
	tp_sys_bytes(d, cpuinfo, sizeof(cpuinfo) - 1, "/proc/cpuinfo");
	const char *flags = strstr((const char *)cpuinfo, "\nflags");
	const char *end = flags ? strchr(flags + 1, '\n') : NULL, *flag = flags ? strstr(flags, " hypervisor") : NULL;
	if (!flag || (end && flag > end)) return ncclSuccess;
	if (*vendor || *product) return tp_doc_setf(d->doc, d->doc->root, "virtual", "%.100s%s%.100s", vendor, *vendor && *product ? " " : "", product);
	return tp_doc_set(d->doc, d->doc->root, "virtual", "yes");
}

static uint64_t host_of(const struct tp_discovery *d)
{
	char boot[64];
	if (!*d->root) return tp_host_hash();
	return tp_sys_text(d, boot, sizeof(boot), "/proc/sys/kernel/random/boot_id") ? tp_hash64(boot, strlen(boot), 0) : 0;
}

ncclResult_t tp_topo_discover(const struct tp_topo_find *find, struct tp_topo_doc **out)
{
	struct tp_discovery d = { .find = find, .root = find->root ? find->root : "" };
	d.host_hash = host_of(&d);
	TP_TRY(tp_doc_create(*d.root ? d.root : "this machine", "system", &d.doc));
	ncclResult_t result = tp_doc_set(d.doc, d.doc->root, "version", "1");
	if (result == ncclSuccess) result = find_virtual(&d);
	if (result == ncclSuccess) result = tp_discover_cpus(&d);
	if (result == ncclSuccess && (find->gpu_bus_id || find->all_gpus)) result = tp_discover_gpus(&d);
	if (result == ncclSuccess && !find->no_nics) result = tp_discover_nics(&d);
	tp_discover_end(&d);
	if (result == ncclSuccess) result = tp_doc_check(d.doc);
	if (result != ncclSuccess) tp_topo_doc_free(d.doc);
	else *out = d.doc;
	return result;
}
