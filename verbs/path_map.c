/* Memory that was born shared: pages of a file that its process maps MAP_SHARED (a file of /dev/shm, a memfd). Peers open the
 * file by a name, see that it is that very file, and map what the region lies in; a WRITE is then a store. No other memory
 * is ever mapped, and no page of a program is replaced. A mapping can't be taken back, so rights are checked for each request all
 * the same; a program that cuts a registered file short breaks those who write there, as if it freed registered memory. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path.h"

enum { P_MAP };
static struct tp_param params[] = {
	[P_MAP] = { .name = "TELPHER_VERBS_MAP", .kind = TP_PARAM_BOOL, .fallback = "1",
		.doc = "Processes of this machine map registered memory that is a shared file's (mmap of /dev/shm/…): a WRITE there is a store" },
};
TP_PARAM_TABLE("verbs", params)

/* ---- which mapping an address lies in ---- */

struct area { uint64_t start, end, offset, ino; dev_t dev; char name[256]; };

/* The kernel's struct procmap_query (6.11), which older headers lack. */
struct query {
	uint64_t size, flags, addr, start, end, vma_flags, page_size, offset, ino;
	uint32_t major, minor, name_size, build_id_size;
	uint64_t name_addr, build_id_addr;
};
#define QUERY _IOWR('f', 17, struct query)
enum { QUERY_WRITABLE = 2, QUERY_SHARED = 8 };

/* 1: a shared, writable file mapping; 0: another; -1: this kernel can't be asked so. */
static int ask_kernel(int fd, uint64_t addr, struct area *out)
{
	struct query query = { .size = sizeof(query), .addr = addr, .name_size = sizeof(out->name), .name_addr = (uintptr_t)out->name };
	out->name[0] = 0;
	if (ioctl(fd, QUERY, &query) != 0)
		return errno == ENOTTY || errno == EINVAL ? -1 : 0;
	out->start = query.start;
	out->end = query.end;
	out->offset = query.offset;
	out->ino = query.ino;
	out->dev = makedev(query.major, query.minor);
	return (query.vma_flags & QUERY_SHARED) && (query.vma_flags & QUERY_WRITABLE) && query.ino ? 1 : 0;
}

static bool search_lines(uint64_t addr, struct area *out)
{
	FILE *file = fopen("/proc/self/maps", "re");
	char line[512];
	bool found = false;
	while (file && !found && fgets(line, sizeof(line), file)) {
		unsigned long long start, end, offset, ino;
		unsigned int major, minor;
		char rights[5];
		int name = 0;
		if (sscanf(line, "%llx-%llx %4s %llx %x:%x %llu %n", &start, &end, rights, &offset, &major, &minor, &ino, &name) < 7 || addr >= end)
			continue;
		if (addr < start || rights[3] != 's' || rights[1] != 'w' || !ino)
			break;
		line[strcspn(line, "\n")] = 0;
		*out = (struct area){ .start = start, .end = end, .offset = offset, .ino = ino, .dev = makedev(major, minor) };
		snprintf(out->name, sizeof(out->name), "%.255s", name ? line + name : "");
		found = true;
	}
	if (file)
		fclose(file);
	return found;
}

static bool find_area(uint64_t addr, uint64_t length, struct area *out)
{
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	int answer = fd >= 0 ? ask_kernel(fd, addr, out) : -1;
	if (fd >= 0)
		close(fd);
	if (answer < 0)
		answer = search_lines(addr, out);
	return answer > 0 && length <= out->end - addr;
}

/* ---- what this process shows ---- */

static bool is_file(const struct stat *info, const struct area *area)
{
	return S_ISREG(info->st_mode) && info->st_ino == area->ino && info->st_dev == area->dev;
}

/* A name under which another process can open the file: its own, or that of a descriptor of ours. */
static bool find_name(const struct area *area, char *out, size_t bytes)
{
	struct stat info;
	if (area->name[0] == '/' && strlen(area->name) < bytes && stat(area->name, &info) == 0 && is_file(&info, area)) {
		snprintf(out, bytes, "%s", area->name);
		return true;
	}
	DIR *dir = opendir("/proc/self/fd");
	bool found = false;
	for (struct dirent *entry; dir && !found && (entry = readdir(dir)) != NULL;) {
		int fd = atoi(entry->d_name);
		found = entry->d_name[0] != '.' && fd != dirfd(dir) && fstat(fd, &info) == 0 && is_file(&info, area) &&
			(fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
		if (found)
			snprintf(out, bytes, "/proc/%d/fd/%d", (int)getpid(), fd);
	}
	if (dir)
		closedir(dir);
	return found;
}

static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;

void tp_path_map_forget(void) { pthread_mutex_init(&regions_lock, NULL); }

uint32_t tp_path_show_region(uint64_t addr, uint64_t length)
{
	struct area area;
	char name[sizeof(((struct tp_path_region *)0)->path)];
	uint32_t place = 0;
	if (!addr || !length || !tp_param_int(&params[P_MAP]) || !find_area(addr, length, &area) || !find_name(&area, name, sizeof(name)))
		return 0;
	struct tp_path_yard *yard = tp_path_make_yard();
	pthread_mutex_lock(&regions_lock);
	for (uint32_t i = 0; yard && i < TP_PATH_REGIONS && !place; i++) {
		struct tp_path_region *region = &yard->regions[i];
		if (atomic_load_explicit(&region->ino, memory_order_relaxed))
			continue;
		region->start = area.start;
		region->offset = area.offset;
		region->length = area.end - area.start;
		snprintf(region->path, sizeof(region->path), "%s", name);
		atomic_store_explicit(&region->dev, area.dev, memory_order_relaxed);
		/* Release: pairs with the acquire in tp_path_map. */
		atomic_store_explicit(&region->ino, area.ino, memory_order_release);
		place = i + 1;
	}
	pthread_mutex_unlock(&regions_lock);
	return place;
}

void tp_path_hide_region(uint32_t place)
{
	if (!place || place > TP_PATH_REGIONS || !tp_path_own_yard)
		return;
	pthread_mutex_lock(&regions_lock);
	atomic_store_explicit(&tp_path_own_yard->regions[place - 1].ino, 0, memory_order_release);
	pthread_mutex_unlock(&regions_lock);
}

/* ---- what this process maps of others ---- */

struct tp_path_mapping { struct tp_path_mapping *next; uint64_t dev, ino, offset, length; uint8_t *base; };

static uint8_t *map_file(const struct tp_path_region *region, uint64_t dev, uint64_t ino)
{
	struct stat info;
	void *base = MAP_FAILED;
	int fd = open(region->path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_ino == ino && info.st_dev == dev &&
		(uint64_t)info.st_size >= region->offset + region->length)
		base = mmap(NULL, region->length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)region->offset);
	if (fd >= 0)
		close(fd);
	if (base == MAP_FAILED) {
		TP_INFO(TP_NET, "shared memory of another process (%s) can't be mapped: %s", region->path, strerror(errno));
		return NULL;
	}
	/* What was mapped for another process isn't a forked child's. */
	madvise(base, region->length, MADV_DONTFORK);
	return base;
}

static bool is_shown(const struct tp_path_link *link, const struct tp_path_mapping *m)
{
	for (uint32_t i = 0; i < TP_PATH_REGIONS; i++) {
		const struct tp_path_region *region = &link->yard->regions[i];
		if (atomic_load_explicit(&region->ino, memory_order_seq_cst) == m->ino &&
			atomic_load_explicit(&region->dev, memory_order_relaxed) == m->dev)
			return true;
	}
	return false;
}

/* Mappings of files that the peer shows no more go: nobody is inside, for whoever is keeps them shown. The generation first, so that
 * who comes later, when it shows such a file again, doesn't trust what it remembers. Under map_lock. */
static void drop_stale_locked(struct tp_path_link *link)
{
	atomic_fetch_add_explicit(&link->map_generation, 1, memory_order_seq_cst);
	for (struct tp_path_mapping **at = &link->mappings; *at;) {
		struct tp_path_mapping *m = *at;
		if (is_shown(link, m)) {
			at = &m->next;
			continue;
		}
		*at = m->next;
		if (m->base)
			munmap(m->base, m->length);
		free(m);
	}
}

/* The mapping, made at the first use; base NULL: it was refused. */
static const struct tp_path_mapping *find_mapping(struct tp_path_link *link, const struct tp_path_region *region, uint64_t dev, uint64_t ino)
{
	pthread_mutex_lock(&link->map_lock);
	struct tp_path_mapping *m = link->mappings;
	while (m && (m->dev != dev || m->ino != ino || m->offset != region->offset || m->length != region->length))
		m = m->next;
	if (!m)
		drop_stale_locked(link);
	if (!m && (m = tp_alloc(1, sizeof(*m), "a mapping of another process's memory"))) {
		*m = (struct tp_path_mapping){ .next = link->mappings, .dev = dev, .ino = ino, .offset = region->offset, .length = region->length,
			.base = map_file(region, dev, ino) };
		link->mappings = m;
	}
	pthread_mutex_unlock(&link->map_lock);
	return m;
}

uint8_t *tp_path_map(struct tp_path *path, const struct tp_key *key, uint64_t addr, uint64_t bytes)
{
	uint32_t place = key->region;
	struct tp_path_view *view = &path->view;
	if (!place || place > TP_PATH_REGIONS)
		return NULL;
	const struct tp_path_region *region = &path->link->yard->regions[place - 1];
	/* Acquire: pairs with tp_path_show_region; it stays as it is while we are inside the key. */
	uint64_t ino = atomic_load_explicit(&region->ino, memory_order_seq_cst);
	uint32_t generation = atomic_load_explicit(&path->link->map_generation, memory_order_seq_cst);
	if (!ino || addr < region->start || bytes > region->length || addr - region->start > region->length - bytes)
		return NULL;
	if (view->index != place || view->generation != generation || view->ino != ino || view->offset != region->offset || view->length != region->length) {
		const struct tp_path_mapping *m = find_mapping(path->link, region, atomic_load_explicit(&region->dev, memory_order_relaxed), ino);
		*view = (struct tp_path_view){ .index = place, .generation = generation, .ino = ino, .offset = region->offset, .length = region->length, .base = m ? m->base : NULL };
	}
	return view->base ? view->base + (addr - region->start) : NULL;
}

void tp_path_unmap_all(struct tp_path_link *link)
{
	for (struct tp_path_mapping *m = link->mappings, *next; m; m = next) {
		next = m->next;
		if (m->base)
			munmap(m->base, m->length);
		free(m);
	}
	link->mappings = NULL;
}
