/* The tree of files behind /sys/class/infiniband and /dev/infiniband.
 *
 * Its files lie in a folder whose name holds a hash of all that they say, so that processes with the same card share it and a
 * changed table gets another folder. It is made aside and renamed into place. A real folder, because then directories, links,
 * descriptors and relative paths work as the kernel makes them work; only the first step, from path to path, is ours. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/internal.h"
#include "verbs/sysfs.h"

#define MAX_ROOT 200
#define TREE_NAME "/telpher-verbs-"        /* of the tree's folder, before the user's number and the hash */
#define FORMAT_VERSION 2u           /* of the tree: another one never shares a folder with it */

static pthread_mutex_t tree_lock = PTHREAD_MUTEX_INITIALIZER;
static char tree_root[MAX_ROOT];
static uint64_t tree_hash;

/* Files are written under the lock, which may take a while: a forked child looks for its parent's tree anew. */
static void fork_child(void)
{
	pthread_mutex_init(&tree_lock, NULL);
	tree_root[0] = 0;
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

/* ---- writing ---- */

struct maker { const char *root; int error; };

static void path_of(const struct maker *maker, char *out, const char *format, va_list args)
{
	int used = snprintf(out, TP_SYSFS_PATH, "%s/", maker->root);
	vsnprintf(out + used, (size_t)(TP_SYSFS_PATH - used), format, args);
}

static void make_parents(struct maker *maker, char *path)
{
	for (char *slash = path + strlen(maker->root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
		*slash = 0;
		if (mkdir(path, 0700) && errno != EEXIST && !maker->error)
			maker->error = errno;
		*slash = '/';
	}
}

static void put_file(struct maker *maker, const char *content, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put_file(struct maker *maker, const char *content, const char *format, ...)
{
	char path[TP_SYSFS_PATH];
	va_list args;
	va_start(args, format);
	path_of(maker, path, format, args);
	va_end(args);
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0400);
	if (fd < 0 && errno == ENOENT) {
		make_parents(maker, path);
		fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0400);
	}
	size_t bytes = strlen(content);
	if (fd < 0 || write(fd, content, bytes) != (ssize_t)bytes) {
		if (!maker->error)
			maker->error = errno ? errno : EIO;
	}
	if (fd >= 0)
		close(fd);
}

static void put_link(struct maker *maker, const char *target, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put_link(struct maker *maker, const char *target, const char *format, ...)
{
	char path[TP_SYSFS_PATH];
	va_list args;
	va_start(args, format);
	path_of(maker, path, format, args);
	va_end(args);
	make_parents(maker, path);
	if (symlink(target, path) && errno != EEXIST && !maker->error)
		maker->error = errno;
}

/* One more name for a file that says the same: a GID table has hundreds of empty entries. */
static void put_name(struct maker *maker, const char *existing, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put_name(struct maker *maker, const char *existing, const char *format, ...)
{
	char path[TP_SYSFS_PATH], from[TP_SYSFS_PATH];
	va_list args;
	va_start(args, format);
	path_of(maker, path, format, args);
	va_end(args);
	snprintf(from, sizeof(from), "%s/%s", maker->root, existing);
	make_parents(maker, path);
	if (link(from, path) && errno != EEXIST && !maker->error)
		maker->error = errno;
}

/* ---- what the files say ---- */

static const char *guid_text(uint64_t guid, char text[32])
{
	uint8_t b[8];
	memcpy(b, &guid, 8);
	snprintf(text, 32, "%02x%02x:%02x%02x:%02x%02x:%02x%02x\n", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
	return text;
}

static const char *gid_text(const uint8_t raw[16], char text[48])
{
	int used = 0;
	for (int i = 0; i < 16; i += 2)
		used += snprintf(text + used, 48 - (size_t)used, "%02x%02x%s", raw[i], raw[i + 1], i < 14 ? ":" : "\n");
	return text;
}

static const char *rate_text(uint32_t gbps, char text[48])
{
	static const struct { uint32_t gbps; const char *lanes; } table[] = {
		{ 1600, "8X XDR" }, { 800, "4X XDR" }, { 400, "4X NDR" }, { 200, "4X HDR" }, { 100, "4X EDR" }, { 56, "4X FDR" },
		{ 50, "2X EDR" }, { 40, "4X QDR" }, { 25, "1X EDR" }, { 20, "4X DDR" }, { 10, "4X SDR" }, { 5, "1X DDR" }, { 0, "1X SDR" },
	};
	size_t i = 0;
	while (table[i].gbps > gbps)
		i++;
	if (table[i].gbps)
		snprintf(text, 48, "%u Gb/sec (%s)\n", table[i].gbps, table[i].lanes);
	else
		snprintf(text, 48, "2.5 Gb/sec (1X SDR)\n");
	return text;
}

static void put_counters(struct maker *maker, struct tp_port *port, const char *where)
{
	char text[32];
	uint64_t sums[TP_CNT_COUNT];
	tp_counters_read(port, sums);
	for (int c = 0; c < TP_CNT_COUNT; c++) {
		snprintf(text, sizeof(text), "%llu\n", (unsigned long long)sums[c]);
		put_file(maker, text, "%s/%scounters/%s", where, c >= TP_CNT_HW_FIRST ? "hw_" : "", tp_counter_name((enum tp_counter)c));
	}
	/* Names that every port has and that stay 0 here. */
	static const char *const others[] = { "symbol_error", "link_error_recovery", "port_rcv_remote_physical_errors",
		"port_rcv_switch_relay_errors", "port_xmit_constraint_errors", "port_rcv_constraint_errors", "local_link_integrity_errors",
		"excessive_buffer_overrun_errors", "VL15_dropped" };
	for (size_t i = 0; i < TP_ARRAY_LEN(others); i++)
		put_file(maker, "0\n", "%s/counters/%s", where, others[i]);
	put_file(maker, "10\n", "%s/hw_counters/lifespan", where);
}

static void put_gids(struct maker *maker, struct tp_port *port, const char *where)
{
	struct tp_gid gid;
	char text[64], zero[512], empty[512];
	static const uint8_t none[16];
	snprintf(zero, sizeof(zero), "%s/.gid", where);
	snprintf(empty, sizeof(empty), "%s/.attr", where);
	put_file(maker, gid_text(none, text), "%s", zero);
	put_file(maker, "", "%s", empty);
	for (uint32_t i = 0; i < (uint32_t)port->gid_table_len; i++) {
		if (!tp_port_gid(port, i, &gid)) {
			put_name(maker, zero, "%s/gids/%u", where, i);
			put_name(maker, empty, "%s/gid_attrs/types/%u", where, i);
			put_name(maker, empty, "%s/gid_attrs/ndevs/%u", where, i);
			continue;
		}
		put_file(maker, gid_text(gid.gid.raw, text), "%s/gids/%u", where, i);
		put_file(maker, gid.type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2\n" : "IB/RoCE v1\n", "%s/gid_attrs/types/%u", where, i);
		snprintf(text, sizeof(text), "%s\n", gid.ifname);
		put_file(maker, text, "%s/gid_attrs/ndevs/%u", where, i);
	}
	for (int i = 0; i < 2; i++) {
		snprintf(text, sizeof(text), "%s", i ? ".attr" : ".gid");
		char path[TP_SYSFS_PATH];
		if (snprintf(path, sizeof(path), "%s/%s/%s", maker->root, where, text) < (int)sizeof(path))
			unlink(path);
	}
}

static void put_port(struct maker *maker, struct tp_port *port, const char *device_place)
{
	char where[300], text[64];
	snprintf(where, sizeof(where), "%s/ports/%u", device_place, port->number);
	bool active = atomic_load_explicit(&port->state, memory_order_relaxed) == IBV_PORT_ACTIVE;
	put_file(maker, active ? "4: ACTIVE\n" : "1: DOWN\n", "%s/state", where);
	put_file(maker, active ? "5: LinkUp\n" : "3: Disabled\n", "%s/phys_state", where);
	put_file(maker, rate_text(port->rate_gbps, text), "%s/rate", where);
	put_file(maker, "Ethernet\n", "%s/link_layer", where);
	put_file(maker, "0x04010000\n", "%s/cap_mask", where);
	put_file(maker, "0x0\n", "%s/lid", where);
	put_file(maker, "0\n", "%s/lid_mask_count", where);
	put_file(maker, "0x0\n", "%s/sm_lid", where);
	put_file(maker, "0\n", "%s/sm_sl", where);
	put_file(maker, "0xffff\n", "%s/pkeys/0", where);
	put_gids(maker, port, where);
	put_counters(maker, port, where);
}

/* "0-3,8" as the mask that sysfs writes: words of 32 processors, the highest first. */
static void mask_text(const char *list, char *out, size_t bytes)
{
	uint32_t words[128] = { 0 };
	unsigned highest = 0;
	while (*list >= '0' && *list <= '9') {
		char *end;
		unsigned long first = strtoul(list, &end, 10), last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
		for (unsigned long cpu = first; cpu <= last && cpu < 32 * TP_ARRAY_LEN(words); cpu++) {
			words[cpu / 32] |= 1u << cpu % 32;
			highest = TP_MAX(highest, (unsigned)(cpu / 32));
		}
		list = *end == ',' ? end + 1 : end;
	}
	size_t used = (size_t)snprintf(out, bytes, "%x", words[highest]);
	for (unsigned w = highest; w > 0; w--)
		used += (size_t)snprintf(out + used, used < bytes ? bytes - used : 0, ",%08x", words[w - 1]);
	if (used + 2 <= bytes)
		strcpy(out + used, "\n");
}

static void read_line(const char *path, char *out, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? 0 : read(fd, out, bytes - 1);
	out[TP_MAX(got, 0)] = 0;
	if (fd >= 0)
		close(fd);
}

/* The PCI function that the device would be. */
static void put_pci(struct maker *maker, struct tp_device *device, const char *place)
{
	char list[512], mask[1400], text[80];
	snprintf(text, sizeof(text), "/sys/devices/system/node/node%d/cpulist", device->numa);
	read_line(device->numa >= 0 ? text : "/sys/devices/system/cpu/online", list, sizeof(list));
	if (!list[0])
		read_line("/sys/devices/system/cpu/online", list, sizeof(list));
	mask_text(list, mask, sizeof(mask));
	put_file(maker, list, "%s/local_cpulist", place);
	put_file(maker, mask, "%s/local_cpus", place);
	snprintf(text, sizeof(text), "%d\n", device->numa);
	put_file(maker, text, "%s/numa_node", place);
	put_file(maker, "0x020000\n", "%s/class", place);
	put_file(maker, "0xffff\n", "%s/vendor", place);
	put_file(maker, "0x0000\n", "%s/device", place);
	put_file(maker, "0xffff\n", "%s/subsystem_vendor", place);
	put_file(maker, "0x0000\n", "%s/subsystem_device", place);
	put_file(maker, "0x00\n", "%s/revision", place);
	put_file(maker, "16.0 GT/s PCIe\n", "%s/max_link_speed", place);
	put_file(maker, "16.0 GT/s PCIe\n", "%s/current_link_speed", place);
	put_file(maker, "16\n", "%s/max_link_width", place);
	put_file(maker, "16\n", "%s/current_link_width", place);
	snprintf(text, sizeof(text), "PCI_SLOT_NAME=%s\n", device->pci);
	put_file(maker, text, "%s/uevent", place);
	snprintf(text, sizeof(text), "../../../devices/pci%.7s/%s", device->pci, device->pci);
	put_link(maker, text, "sys/bus/pci/devices/%s", device->pci);
	put_link(maker, "../../../bus/pci", "%s/subsystem", place);
	struct tp_gid gid;
	for (int p = 0; p < device->nports; p++)
		for (uint32_t i = 0; i < (uint32_t)device->ports[p].gid_table_len; i++)
			if (tp_port_gid(&device->ports[p], i, &gid) && gid.ifname[0]) {
				snprintf(text, sizeof(text), "/sys/class/net/%s", gid.ifname);
				put_link(maker, text, "%s/net/%s", place, gid.ifname);
			}
}

static void put_device(struct maker *maker, struct tp_device *device)
{
	char pci[64], place[200], text[160];
	const char *name = device->ibv.name;
	snprintf(pci, sizeof(pci), "sys/devices/pci%.7s/%s", device->pci, device->pci);
	snprintf(place, sizeof(place), "%s/infiniband/%s", pci, name);
	put_file(maker, "1: CA\n", "%s/node_type", place);
	put_file(maker, guid_text(device->guid, text), "%s/node_guid", place);
	put_file(maker, guid_text(device->guid, text), "%s/sys_image_guid", place);
	put_file(maker, "0.1.0\n", "%s/fw_ver", place);
	put_file(maker, "0x0\n", "%s/hw_rev", place);
	put_file(maker, "telpher\n", "%s/hca_type", place);
	put_file(maker, "telpher\n", "%s/board_id", place);
	snprintf(text, sizeof(text), "%s %.80s\n", tp_host_name(), name);
	put_file(maker, text, "%s/node_desc", place);
	snprintf(text, sizeof(text), "NAME=%.63s\n", name);
	put_file(maker, text, "%s/uevent", place);
	snprintf(text, sizeof(text), "../../../%s", device->pci);
	put_link(maker, text, "%s/device", place);
	put_link(maker, "../../../../../class/infiniband", "%s/subsystem", place);
	for (int p = 0; p < device->nports; p++)
		put_port(maker, &device->ports[p], place);
	put_pci(maker, device, pci);
	snprintf(text, sizeof(text), "../../devices/pci%.7s/%s/infiniband/%s", device->pci, device->pci, name);
	put_link(maker, text, "sys/class/infiniband/%s", name);

	const char *uverbs = device->ibv.dev_name;
	snprintf(text, sizeof(text), "%.63s\n", name);
	put_file(maker, text, "%s/infiniband_verbs/%s/ibdev", pci, uverbs);
	put_file(maker, "1\n", "%s/infiniband_verbs/%s/abi_version", pci, uverbs);
	snprintf(text, sizeof(text), "231:%d\n", 192 + device->index);
	put_file(maker, text, "%s/infiniband_verbs/%s/dev", pci, uverbs);
	snprintf(text, sizeof(text), "../../../%s", device->pci);
	put_link(maker, text, "%s/infiniband_verbs/%s/device", pci, uverbs);
	snprintf(text, sizeof(text), "../../devices/pci%.7s/%s/infiniband_verbs/%.20s", device->pci, device->pci, uverbs);
	put_link(maker, text, "sys/class/infiniband_verbs/%s", uverbs);
	/* A character device that reads and writes, and refuses every ioctl. */
	put_link(maker, "/dev/null", "dev/infiniband/%s", uverbs);
}

static int make_tree(const char *root, struct tp_device *devices, int count)
{
	struct maker maker = { .root = root };
	put_file(&maker, "6\n", "sys/class/infiniband_verbs/abi_version");
	put_file(&maker, "5\n", "sys/class/infiniband_mad/abi_version");
	char path[TP_SYSFS_PATH];
	snprintf(path, sizeof(path), "%s/sys/class/infiniband", root);
	if (mkdir(path, 0700) && !maker.error)
		maker.error = errno;
	for (int i = 0; i < count; i++)
		put_device(&maker, &devices[i]);
	return maker.error;
}

/* ---- the folder ---- */

static uint64_t hash_tables(struct tp_device *devices, int count)
{
	uint64_t hash = tp_hash64("telpher verbs tree", 18, FORMAT_VERSION);
	for (int d = 0; d < count; d++) {
		struct tp_device *device = &devices[d];
		hash = tp_hash64(device->ibv.name, strlen(device->ibv.name), hash);
		hash = tp_hash64(device->pci, strlen(device->pci), hash ^ (uint64_t)device->numa);
		hash = tp_hash64(&device->guid, sizeof(device->guid), hash);
		for (int p = 0; p < device->nports; p++) {
			struct tp_port *port = &device->ports[p];
			uint32_t shape[] = { (uint32_t)atomic_load_explicit(&port->state, memory_order_relaxed), port->rate_gbps, (uint32_t)port->gid_table_len };
			hash = tp_hash64(shape, sizeof(shape), hash);
			pthread_rwlock_rdlock(&port->gid_lock);
			if (port->ngids > 0)
				hash = tp_hash64(port->gids, (size_t)port->ngids * sizeof(*port->gids), hash);
			pthread_rwlock_unlock(&port->gid_lock);
		}
	}
	return hash;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *ftw)
{
	(void)info;
	(void)kind;
	(void)ftw;
	return remove(path);
}

/* A folder that anybody but us could have written is none. */
static bool is_ours(const char *path)
{
	struct stat info;
	return lstat(path, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() && !(info.st_mode & 077);
}

static bool make_in(const char *base, uint64_t hash, struct tp_device *devices, int count, char *root)
{
	char aside[MAX_ROOT];
	if (!base || base[0] != '/' || snprintf(root, MAX_ROOT, "%s" TREE_NAME "%u-%016llx", base, geteuid(), (unsigned long long)hash) >= MAX_ROOT)
		return false;
	if (is_ours(root))
		return true;
	if (snprintf(aside, sizeof(aside), "%s/.telpher-verbs-XXXXXX", base) >= (int)sizeof(aside) || !mkdtemp(aside))
		return false;
	int error = make_tree(aside, devices, count);
	bool placed = !error && rename(aside, root) == 0;
	if (!placed) {
		/* Another process may have been faster. */
		nftw(aside, remove_one, 8, FTW_DEPTH | FTW_PHYS);
		placed = is_ours(root);
	}
	if (!placed && error)
		TP_INFO(TP_NET, "the card's files can't be written below %s: %s", base, strerror(error));
	return placed;
}

static bool update_tree_locked(void)
{
	static bool failed;
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	uint64_t hash = hash_tables(devices, count);
	if (tree_root[0] && hash == tree_hash && is_ours(tree_root))
		return true;
	const char *places[] = { getenv("XDG_RUNTIME_DIR"), "/dev/shm", getenv("TMPDIR"), "/tmp" };
	for (size_t i = 0; i < TP_ARRAY_LEN(places); i++)
		if (make_in(places[i], hash, devices, count, tree_root)) {
			tree_hash = hash;
			return true;
		}
	tree_root[0] = 0;
	if (!failed)
		TP_WARN("/sys/class/infiniband can't be shown: neither XDG_RUNTIME_DIR nor /dev/shm nor TMPDIR nor /tmp can be written");
	failed = true;
	return false;
}

/* ---- paths ---- */

/* Doubled slashes and single dots go; ".." stays, for the kernel, which follows links. */
static bool clean_path(const char *path, char *out, size_t bytes)
{
	size_t used = 0;
	while (*path) {
		while (*path == '/')
			path++;
		size_t length = strcspn(path, "/");
		if (length == 0)
			break;
		if (!(length == 1 && path[0] == '.')) {
			if (used + length + 2 > bytes)
				return false;
			out[used++] = '/';
			memcpy(out + used, path, length);
			used += length;
		}
		path += length;
	}
	out[used] = 0;
	return used > 0;
}

static bool lies_below(const char *path, const char *folder)
{
	size_t length = strlen(folder);
	return !strncmp(path, folder, length) && (path[length] == 0 || path[length] == '/');
}

static bool is_of_card(const char *path)
{
	static const char *const folders[] = { "/sys/class/infiniband", "/sys/class/infiniband_verbs", "/sys/class/infiniband_mad",
		"/dev/infiniband" };
	for (size_t i = 0; i < TP_ARRAY_LEN(folders); i++)
		if (lies_below(path, folders[i]))
			return true;
	if (strncmp(path, "/sys/devices/pci", 16) && strncmp(path, "/sys/bus/pci/devices/", 21))
		return false;
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	for (int i = 0; i < count; i++) {
		char place[64];
		snprintf(place, sizeof(place), "/sys/devices/pci%.7s/%s", devices[i].pci, devices[i].pci);
		if (lies_below(path, place))
			return true;
		snprintf(place, sizeof(place), "/sys/bus/pci/devices/%s", devices[i].pci);
		if (lies_below(path, place))
			return true;
		/* The bus above it, which may be a real one. */
		snprintf(place, sizeof(place), "/sys/devices/pci%.7s", devices[i].pci);
		if (!strcmp(path, place) && syscall(SYS_faccessat, AT_FDCWD, place, F_OK))
			return true;
	}
	return false;
}

static void refresh_port_locked(struct tp_port *port)
{
	char place[200];
	struct tp_device *device = port->device;
	char aside[MAX_ROOT + 32], from[TP_SYSFS_PATH], to[TP_SYSFS_PATH];
	snprintf(place, sizeof(place), "sys/devices/pci%.7s/%s/infiniband/%s/ports/%u", device->pci, device->pci, device->ibv.name, port->number);
	/* Each file is replaced as a whole: who has the old one open reads the old figure. */
	snprintf(aside, sizeof(aside), "%s/.counters-XXXXXX", tree_root);
	if (!mkdtemp(aside))
		return;
	struct maker maker = { .root = aside };
	put_counters(&maker, port, "new");
	for (int c = 0; c < TP_CNT_COUNT && !maker.error; c++) {
		const char *folder = c >= TP_CNT_HW_FIRST ? "hw_counters" : "counters", *name = tp_counter_name((enum tp_counter)c);
		snprintf(from, sizeof(from), "%s/new/%s/%s", aside, folder, name);
		snprintf(to, sizeof(to), "%s/%s/%s/%s", tree_root, place, folder, name);
		if (rename(from, to))
			break;
	}
	nftw(aside, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

bool tp_sysfs_redirect(const char *path, char *out, size_t bytes)
{
	char clean[TP_SYSFS_PATH];
	if (tp_sysfs_foreign(path) || !clean_path(path, clean, sizeof(clean)) || !is_of_card(clean))
		return false;
	pthread_mutex_lock(&tree_lock);
	bool found = update_tree_locked();
	if (found && strstr(clean, "counters")) {
		struct tp_device *devices;
		int count = tp_card_devices(&devices);
		for (int d = 0; d < count; d++)
			for (int p = 0; p < devices[d].nports; p++) {
				char part[100];
				snprintf(part, sizeof(part), "/%s/ports/%u/", devices[d].ibv.name, devices[d].ports[p].number);
				if (strstr(clean, part))
					refresh_port_locked(&devices[d].ports[p]);
			}
	}
	found = found && snprintf(out, bytes, "%s%s", tree_root, clean) < (int)bytes;
	pthread_mutex_unlock(&tree_lock);
	/* /sys/class/infiniband/../net leaves the tree: the real one, then. */
	struct stat info;
	if (found && strstr(clean, "/..") && lstat(out, &info))
		return false;
	return found;
}

void tp_sysfs_restore(char *path)
{
	/* Nearly every path that is asked about is none of ours. */
	if (!strstr(path, TREE_NAME))
		return;
	pthread_mutex_lock(&tree_lock);
	/* Its working directory may be all that a process has of the tree. */
	if (!tree_root[0])
		update_tree_locked();
	size_t length = strlen(tree_root);
	if (length && !strncmp(path, tree_root, length) && path[length] == '/')
		memmove(path, path + length, strlen(path + length) + 1);
	pthread_mutex_unlock(&tree_lock);
}

bool tp_sysfs_unreadable(const char *real)
{
	struct stat info;
	return strstr(real, "/gid_attrs/") && stat(real, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == 0;
}
