/* Between the files that look at the machine. All of them read files below a root, so that tests can build machines of files. */
#ifndef TP_TOPO_DISCOVER_H
#define TP_TOPO_DISCOVER_H

#include "topo/doc.h"

#define TP_PATH_BYTES 512
#define TP_MAX_DEVICES 512          /* GPUs or NICs of a machine */

struct tp_discovery {
	const struct tp_topo_find *find;
	const char *root;
	struct tp_topo_doc *doc;
	uint64_t host_hash;
	int nnodes;                     /* NUMA nodes */
	char (*gpus)[TP_TOPO_NAME_BYTES];       /* [ngpus] bus ids; NULL: not looked for yet */
	int ngpus;
};

/* The first line of a file, without what is blank at its end; false where it can't be read. */
bool tp_sys_text(const struct tp_discovery *d, char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 4, 5)));
bool tp_sys_number(const struct tp_discovery *d, int64_t *out, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool tp_sys_exists(const struct tp_discovery *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What a file has from offset on, at most bytes; returns how many. */
size_t tp_sys_bytes_at(const struct tp_discovery *d, size_t offset, uint8_t *out, size_t bytes, const char *format, ...) __attribute__((format(printf, 5, 6)));
#define tp_sys_bytes(d, out, bytes, ...) tp_sys_bytes_at(d, 0, out, bytes, __VA_ARGS__)
/* Where a path leads, below the root; false where it leads nowhere. */
bool tp_sys_real(const struct tp_discovery *d, char out[TP_PATH_BYTES], const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Names in a folder, sorted with their numbers as numbers; at most max. */
int tp_sys_list(const struct tp_discovery *d, char (*names)[TP_TOPO_NAME_BYTES], int max, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* "0-3,8" to a mask. */
void tp_sys_cpu_list(const char *text, uint64_t mask[TP_CPU_WORDS]);
ncclResult_t tp_sys_set_mask(struct tp_topo_doc *doc, struct tp_element *e, const char *name, const uint64_t mask[TP_CPU_WORDS]);

ncclResult_t tp_discover_cpus(struct tp_discovery *d);
/* The folder number of the widest cache that holds this processor's data and is shared; -1: none. */
int tp_discover_last_cache(const struct tp_discovery *d, int cpu);
struct tp_element *tp_discover_cpu_of(const struct tp_discovery *d, int numa);      /* any, where there is no such node; never NULL */
/* The element of the device and those of the switches above it. */
ncclResult_t tp_discover_pci(struct tp_discovery *d, const char *bus_id, struct tp_element **out);
ncclResult_t tp_discover_gpu(struct tp_discovery *d, const char *bus_id, int rank);
ncclResult_t tp_discover_gpus(struct tp_discovery *d);
void tp_discover_end(struct tp_discovery *d);
ncclResult_t tp_discover_amd(struct tp_discovery *d, const char *bus_id, struct tp_element *gpu);
ncclResult_t tp_discover_nics(struct tp_discovery *d);
/* Some way for NICs to reach GPU memory is there. */
bool tp_discover_gdr(const struct tp_discovery *d, bool amd);

#endif
