/* The machine as a graph, and what follows from it: which path joins two places, what it carries, and for every decision the reason.
 *
 * Three stages, each usable by itself:
 *   a *description* (struct tp_topo_doc): elements and attributes in NCCL's schema, read from a file (NCCL_TOPO_FILE), found in
 *     the machine, or fused out of what several processes found. It travels between processes as its own text.
 *   the *graph* (struct tp_topo): nodes and directed links with their bandwidths, made from a description, never changed afterwards.
 *   *paths* and *decisions*: computed on the graph under a policy (NCCL's variables).
 *
 * Units: GB/s (10^9 bytes a second), one way; microseconds. The numbers are NCCL's (tp_topo_constants), so that decisions and
 * NCCL's published choices can be compared; they are what the searches subtract from, not measurements.
 *
 * Nothing here starts a thread or keeps global state. A graph may be read by any number of threads. */
#ifndef TP_TOPO_TOPO_H
#define TP_TOPO_TOPO_H

#include <stdio.h>
#include "base/base.h"

/* Limits: a description that asks for more is refused, with the line that does. */
#define TP_TOPO_MAX_NODES 16384
#define TP_TOPO_MAX_LINKS 131072
#define TP_TOPO_MAX_DEPTH 64        /* of elements within elements */
#define TP_TOPO_MAX_TEXT (16u << 20)
#define TP_TOPO_NAME_BYTES 64

/* ---- Descriptions ---- */

struct tp_topo_doc;
/* name: the file's, for messages. Errors name it, the line and the element. Refused: what isn't well-formed, what is nested deeper
 * than TP_TOPO_MAX_DEPTH or larger than TP_TOPO_MAX_TEXT, entities, contradictions (one bus id twice). Read besides NCCL's own:
 * RCCL's dialect (xgmi, gcn) and hwloc-like speeds ("8 GT/s"). Unknown elements and attributes are kept and written out again. */
ncclResult_t tp_topo_doc_parse(const char *text, size_t bytes, const char *name, struct tp_topo_doc **out);
ncclResult_t tp_topo_doc_read(const char *path, struct tp_topo_doc **out);
/* Text that NCCL reads too (NCCL_TOPO_FILE); the caller frees it. */
ncclResult_t tp_topo_doc_text(const struct tp_topo_doc *doc, char **text, size_t *bytes);
ncclResult_t tp_topo_doc_write(const struct tp_topo_doc *doc, const char *path);
/* Adds to `into` what `from` has and it has not: hosts, then CPUs, PCI devices, GPUs, NICs, by identity. Two that say
 * different things of one device: an error that names both. What both found once is there once. */
ncclResult_t tp_topo_doc_merge(struct tp_topo_doc *into, const struct tp_topo_doc *from);
/* The same of many: what an all-gather of tp_topo_doc_text brings. Errors name ranks. bytes 0: this rank has nothing to add. */
struct tp_topo_text { const char *text; size_t bytes; int rank; };
ncclResult_t tp_topo_doc_fuse(const struct tp_topo_text *texts, int count, struct tp_topo_doc **out);
/* The same of ranks that run and shall go on running: what they contradict each other in is a line of notes, and the first is right. Ports
 * to which two ranks gave one number (each may have NICs of its own: NCCL_IB_HCA) are numbered anew. */
ncclResult_t tp_topo_doc_join(const struct tp_topo_text *texts, int count, FILE *notes, struct tp_topo_doc **out);
void tp_topo_doc_free(struct tp_topo_doc *doc);

/* A port as the transport that will use it has it; its place in the list is its number there. */
struct tp_topo_port {
	char name[32];                  /* "mlx5_0", "eth0" */
	char bus_id[20];                /* "": no PCI device */
	uint64_t guid;
	int port, mbps;
	double latency_us;              /* as the transport says; 0: it doesn't */
	bool gdr;                       /* it takes GPU memory, as the transport has found out */
};

/* What this process finds by itself. A field left zero is not looked for, except that the machine's CPUs always are. */
struct tp_topo_find {
	const char *root;               /* where /sys and /proc are: "" is the machine itself; tests build trees of files */
	const char *gpu_bus_id;         /* this rank's GPU, "0000:1b:00.0"; NULL: none */
	int gpu_gdr;                    /* of it: 1, -1: network cards reach its memory or don't, as its driver says; 0: seen from /sys */
	int gpu_sm;                     /* its compute capability, 90 for 9.0, as its driver says; 0: as NVML says, if it is there */
	bool all_gpus;                  /* every GPU of the machine (telpher topo) */
	bool no_nics;
	const struct tp_topo_port *ports;       /* [nports] the network ports there are; NULL: those that the machine shows, in the order of their names */
	int nports;
	int rank;                       /* of the GPU or host rank; -1: none yet */
	const uint64_t *cpu_mask;       /* TP_CPU_WORDS: a host rank's processors; NULL: no host rank */
	bool cores;                     /* describe caches and cores too */
};
/* Where a process with these processors runs: NUMA node, and the first processor of the cache and the core that hold all of them. -1: not
 * within one, or not known. A few files are read. */
struct tp_topo_place { int32_t numa, cache, core; };
void tp_topo_place_of(const char *root, const uint64_t mask[TP_CPU_WORDS], struct tp_topo_place *out);
/* The processors near a PCI device ("0000:1b:00.0"); false: it isn't known. One file is read. */
bool tp_topo_cpus_near(const char *root, const char *bus_id, uint64_t mask[TP_CPU_WORDS]);
/* The first active port of an RDMA device that is hardware; false: there is none. */
bool tp_topo_find_rdma(const char *root, char *name, size_t bytes);
/* What the ranks of a job add to a description of their host, which each found without them. Where nothing has this bus id, or another rank
 * has all that has, nothing changes. */
ncclResult_t tp_topo_doc_set_rank(struct tp_topo_doc *doc, const char *gpu_bus_id, int rank);
ncclResult_t tp_topo_doc_add_host_rank(struct tp_topo_doc *doc, int rank, const uint64_t mask[TP_CPU_WORDS]);
/* Never fails for what isn't there: without /sys the description has one CPU. */
ncclResult_t tp_topo_discover(const struct tp_topo_find *find, struct tp_topo_doc **out);
/* NCCL_TOPO_FILE, else the hypervisor's virtualTopology.xml (below root; NULL or "": the machine's). */
ncclResult_t tp_topo_doc_load_base(const char *root, struct tp_topo_doc **out);     /* *out NULL: there is neither */
/* Replaces what was found by such a file with the finds merged in (where they differ the file is right), and without what of the
 * file was not found. Without a file nothing changes. */
ncclResult_t tp_topo_doc_settle(const char *root, struct tp_topo_doc **found);
/* For planning: files of providers say where devices are, not what. GPUs and NICs that are only PCI devices become what their numbers
 * say they are, GPUs without a rank get one; each assumption is a line of notes (may be NULL). */
ncclResult_t tp_topo_doc_complete(struct tp_topo_doc *doc, FILE *notes);
/* The first `count` GPUs by rank, or by number where they have none: a job that doesn't use the others. An error where there are fewer. */
ncclResult_t tp_topo_doc_keep_gpus(struct tp_topo_doc *doc, int count);
/* A well-known system ("dgx-h100"); names by index, NULL behind the last. */
ncclResult_t tp_topo_model(const char *name, struct tp_topo_doc **out);
const char *tp_topo_model_name(int index, const char **doc);
/* Measured values kept in the description: names of nodes, latency and bandwidth (0: not measured). is: there is one of this index.
 * path, planned_gbps: what the wires between the two were then ("NVL", 370.8); "" and 0: it isn't said. from_bus, to_bus: of GPUs, whose numbers are
 * others in another job; "": by name. */
struct tp_topo_measured { char from[TP_TOPO_NAME_BYTES], to[TP_TOPO_NAME_BYTES]; double alpha_us, gbps; char path[8]; double planned_gbps; char from_bus[20], to_bus[20]; };
ncclResult_t tp_topo_doc_record(struct tp_topo_doc *doc, const struct tp_topo_measured *value);
ncclResult_t tp_topo_doc_measured(const struct tp_topo_doc *doc, int index, struct tp_topo_measured *out, bool *is);
/* NCCL_TOPO_DUMP_FILE, by the rank NCCL_TOPO_DUMP_FILE_RANK. */
ncclResult_t tp_topo_doc_dump(const struct tp_topo_doc *doc, int rank);
bool tp_topo_dump_is_wanted(int rank);

/* ---- The graph ---- */

enum tp_topo_kind {
	TP_TOPO_GPU,
	TP_TOPO_PCI,            /* a bridge or a switch port */
	TP_TOPO_NVS,            /* NVSwitches: one node a host or NVLink domain, as NCCL counts */
	TP_TOPO_CPU,            /* a NUMA node: its memory controller and root complex */
	TP_TOPO_NIC,            /* a network adapter as a PCI device */
	TP_TOPO_NET,            /* one port of it: what a rank opens; hangs on its NIC */
	TP_TOPO_CACHE,          /* cores that share a last-level cache */
	TP_TOPO_CORE,           /* a core with its threads */
	TP_TOPO_KINDS
};

enum tp_topo_link_kind {
	TP_WIRE_LOCAL,          /* within a package: core to cache to memory */
	TP_WIRE_NVL,            /* NVLink, and AMD's xGMI between GPUs */
	TP_WIRE_C2C,            /* NVLink-C2C, and MI300A's on-package fabric */
	TP_WIRE_PCI,
	TP_WIRE_SYS,            /* between CPUs: QPI, UPI, Infinity Fabric, … */
	TP_WIRE_NET,            /* a NIC and its port */
	TP_WIRE_KINDS
};

enum tp_cpu_arch { TP_ARCH_UNKNOWN, TP_ARCH_X86, TP_ARCH_POWER, TP_ARCH_ARM };
enum tp_cpu_vendor { TP_VENDOR_UNKNOWN, TP_VENDOR_INTEL, TP_VENDOR_AMD, TP_VENDOR_ZHAOXIN };
enum tp_gpu_maker { TP_MAKER_NVIDIA, TP_MAKER_AMD };
enum tp_net_kind { TP_FABRIC_UNKNOWN, TP_FABRIC_IB, TP_FABRIC_ROCE, TP_FABRIC_ETHERNET, TP_FABRIC_EFA };

/* What a PCI function says of itself; -1 or 0: not known. */
struct tp_topo_pci {
	int64_t bus;                    /* as NCCL numbers it: domain, bus, device, function in hexadecimal digits, 0x1b000 */
	char bus_id[20];                /* "0000:1b:00.0" */
	uint32_t class_code, vendor, device, subsystem_vendor, subsystem_device;
	float speed, max_speed;         /* GT/s a lane: negotiated, possible */
	int width, max_width;
	int acs;                        /* 1: a bridge that sends peer traffic up (ACS redirect on); 0: off; -1: not known */
	int iommu_group, mps, mrrs;     /* bytes */
	int64_t bar1_bytes;
};

struct tp_topo_node {
	enum tp_topo_kind kind;
	int32_t index;                  /* in topo->nodes */
	int32_t ordinal;                /* among the nodes of its kind: topo->of_kind[kind][ordinal] */
	int32_t host;                   /* 0 .. topo->nhosts - 1 */
	int32_t parent;                 /* one step towards the root of the PCI tree or package; -1: none */
	int32_t near_cpu;               /* the CPU node it hangs on; -1: none (NVS) */
	int32_t first_link, nlinks;     /* topo->links[first_link .. + nlinks - 1] leave it: NVLinks first, then by falling bandwidth */
	char name[TP_TOPO_NAME_BYTES];  /* "GPU 3", "mlx5_0:1", "CPU 1", "PCI 0000:10:1c.0": for messages */
	struct tp_topo_pci pci;         /* GPU, PCI, NIC */
	union {
		struct {
			int dev, rank;          /* as NCCL_TOPO_FILE says; rank -1: no rank has it */
			int part;               /* of a GPU that is several (mlopart): which; its links are shared out among all; -1: it is whole */
			int sm;                 /* 90: compute capability; RCCL's files: the count of compute units */
			enum tp_gpu_maker maker;
			bool gdr;               /* it and its driver let NICs reach its memory (peermem or DMA-BUF) */
			int nvlinks;            /* links in all */
			char gcn[16];           /* "gfx942" */
		} gpu;
		struct {
			int numa;
			enum tp_cpu_arch arch;
			enum tp_cpu_vendor vendor;
			int family, model;
			uint64_t mask[TP_CPU_WORDS];    /* its processors */
			double inter_bw;        /* to another socket */
		} cpu;
		struct {
			int dev;                /* the transport's number for it */
			int port;
			uint64_t guid;
			double bw, latency_us;  /* of the port; latency as the plugin says, 0 mostly */
			int max_connections;
			bool gdr, coll, gin;
			int rail, plane;        /* -1: not given */
			enum tp_net_kind fabric;
		} net;
		struct {
			uint64_t mask[TP_CPU_WORDS];
			int level;              /* of the cache, 2 or 3 */
			size_t bytes;
		} cache;
		struct {
			uint64_t mask[TP_CPU_WORDS];
		} core;
	};
};

struct tp_topo_link {
	int32_t from, to;               /* nodes */
	int32_t reverse;                /* the link back; -1: none (a contradictory file) */
	enum tp_topo_link_kind kind;
	int32_t count;                  /* NVLinks or lanes together */
	double bw;                      /* GB/s one way, of all of them */
	double full_bw;                 /* what the hardware could at its possible width and speed; bw where that isn't known */
};

/* A rank that is a host process: the processors it may use. */
struct tp_topo_host_rank {
	int32_t rank, host;
	int32_t node;                   /* the smallest node that holds all its processors: core, cache, CPU; -1: several CPUs */
	int32_t cpu;                    /* the NUMA node with most of them */
	uint64_t mask[TP_CPU_WORDS];
};

enum tp_topo_path_type {            /* NCCL's names and order: nearer first */
	TP_PATH_LOC, TP_PATH_NVL, TP_PATH_NVB, TP_PATH_C2C, TP_PATH_PIX, TP_PATH_PXB, TP_PATH_P2C, TP_PATH_PXN, TP_PATH_PHB, TP_PATH_SYS,
	TP_PATH_NET, TP_PATH_DIS, TP_PATH_TYPES
};

struct tp_topo_path {
	enum tp_topo_path_type type;    /* DIS: there is none */
	double bw;                      /* the least of its links; 0 where there is none */
	int32_t nhops;
	const int32_t *links;           /* [nhops] of topo->links, in order */
	int32_t limit;                  /* index in links of the narrowest; -1: none */
};

struct tp_topo {
	struct tp_topo_node *nodes;
	struct tp_topo_link *links;
	int32_t nnodes, nlinks, nhosts;
	uint64_t *host_hash;            /* [nhosts] */
	char virtual_machine[TP_TOPO_NAME_BYTES];       /* what the firmware of a guest calls it, "yes"; "": none, or not known */
	int32_t *of_kind[TP_TOPO_KINDS];        /* node indices, in the order of their numbers: GPUs by rank (else dev), NETs by dev */
	int32_t count[TP_TOPO_KINDS];
	struct tp_topo_host_rank *host_ranks;
	int32_t nhost_ranks;
	double max_bw, total_bw;        /* widest path between two GPUs (or GPU and NET); what a GPU has in all, NVLink or PCI */
	struct tp_topo_internal *internal;
};

ncclResult_t tp_topo_build(const struct tp_topo_doc *doc, struct tp_topo **out);
void tp_topo_free(struct tp_topo *topo);
static inline const struct tp_topo_node *tp_topo_node_of(const struct tp_topo *topo, enum tp_topo_kind kind, int ordinal)
{
	return &topo->nodes[topo->of_kind[kind][ordinal]];
}
/* The node of a GPU rank; for a host rank its core, cache or CPU; -1: there is none. */
int32_t tp_topo_find_rank(const struct tp_topo *topo, int rank);
/* "gpu0", "GPU 0", "rank 3", "mlx5_1", "net2", "cpu1", "0000:1b:00.0"; -1: nothing is called so, or several parts
 * of one GPU are, whose names are "gpu0.0", "gpu0.1", … */
int32_t tp_topo_find_name(const struct tp_topo *topo, const char *name);
/* Why it found nothing, as a sentence without its end; where: what the topology is of. */
void tp_topo_refuse_name(const struct tp_topo *topo, const char *where, const char *name, char *text, size_t bytes);

const char *tp_topo_kind_name(enum tp_topo_kind kind);          /* "GPU" */
const char *tp_topo_link_name(enum tp_topo_link_kind kind);     /* "NVL" */
const char *tp_topo_path_name(enum tp_topo_path_type type);     /* "PXB" */
const char *tp_topo_path_meaning(enum tp_topo_path_type type);  /* "through several PCIe switches" */

/* ---- Policy: NCCL's variables ---- */

enum tp_topo_switch { TP_AUTO = -1, TP_OFF, TP_ON };
struct tp_topo_policy {
	int p2p_level;                  /* a path type, -1: by the hardware (NCCL_P2P_LEVEL; NCCL_P2P_DISABLE: LOC) */
	const char *p2p_by;             /* the variable that set it, for sentences; NULL */
	int gdr_level;                  /* -1: by the hardware (NCCL_NET_GDR_LEVEL) */
	enum tp_topo_switch gdr_read;   /* NCCL_NET_GDR_READ */
	bool gdr_c2c;                   /* NCCL_NET_GDR_C2C */
	enum tp_topo_switch flush;      /* ON: NCCL_NET_FORCE_FLUSH; OFF: NCCL_GDR_FLUSH_DISABLE */
	bool pxn, pxn_c2c;              /* NCCL_PXN_DISABLE, NCCL_PXN_C2C */
	bool nvb;                       /* NCCL_NVB_DISABLE */
	bool shm;                       /* NCCL_SHM_DISABLE */
	int cross_nic;                  /* NCCL_CROSS_NIC */
	bool ignore_disabled_p2p;       /* NCCL_IGNORE_DISABLED_P2P=2: don't heed what the driver says of peer access */
	bool expect_disabled_p2p;       /* =1: heed it, and it is no fault */
	int nets_per_gpu;               /* 0: the nearest are shared out; else at most so many (NCCL_NETDEVS_POLICY) */
	enum tp_topo_switch net_within; /* not a variable: channels may go between GPUs of one host by their NICs; AUTO: among AMD's, as RCCL does */
	bool multi_host;                /* not a variable: ranks elsewhere; false leaves NICs out of paths and totals */
};
ncclResult_t tp_topo_policy_load(struct tp_topo_policy *out);   /* from the environment */
int tp_topo_cross_nic(void);                                    /* NCCL_CROSS_NIC alone */
void tp_topo_policy_default(struct tp_topo_policy *out);        /* as with none of the variables set */

/* ---- Paths ---- */

/* Between every two of: GPU, NET, CPU, NVS. Two sets are kept: what the wires allow, and what is used once the policy and the
 * hardware's abilities have spoken (no P2P: through the CPU; PXN: through another GPU). Computing anew replaces both. */
ncclResult_t tp_topo_compute_paths(struct tp_topo *topo, const struct tp_topo_policy *policy);
/* from, to: nodes. Never NULL: a path of type DIS where there is none. Valid until the paths are computed anew. */
const struct tp_topo_path *tp_topo_path(const struct tp_topo *topo, int32_t from, int32_t to);
const struct tp_topo_path *tp_topo_wire_path(const struct tp_topo *topo, int32_t from, int32_t to);
/* Between two host ranks, by the caches and NUMA nodes they share: LOC a core, PIX a cache, PHB a NUMA node, SYS neither. */
enum tp_topo_path_type tp_topo_host_path(const struct tp_topo *topo, const struct tp_topo_host_rank *a, const struct tp_topo_host_rank *b);

/* What was measured between two nodes and still holds: the median of each. 0: not measured. */
struct tp_topo_value { int32_t from, to; double alpha_us, gbps; };
struct tp_topo_values { struct tp_topo_value *list; int count; };
/* doc: the graph's, whose paths have been computed. What doesn't hold is left out, with a line in notes (NULL: a WARN) that says why: a place that is no
 * more, a path that has become another, more than the wires carry, values of one pair that contradict each other. Free list. */
ncclResult_t tp_topo_values_of(const struct tp_topo_doc *doc, const struct tp_topo *topo, FILE *notes, struct tp_topo_values *out);
/* From one to the other, or else the way back; NULL: neither was measured. */
const struct tp_topo_value *tp_topo_value_between(const struct tp_topo_values *values, int32_t from, int32_t to);

/* ---- Decisions ---- */

enum tp_topo_reason {
	TP_WHY_BEST,                    /* nothing better exists */
	TP_WHY_DISABLED,                /* a variable says no */
	TP_WHY_LEVEL,                   /* farther than a variable allows */
	TP_WHY_DISTANCE,                /* farther than the hardware does well */
	TP_WHY_FORCED,                  /* a variable says yes */
	TP_WHY_NO_PATH,                 /* no link joins them */
	TP_WHY_OTHER_HOST,
	TP_WHY_GPU_UNABLE,              /* the GPU or its driver can't (gdr="0": no peermem and no DMA-BUF) */
	TP_WHY_NIC_UNABLE,
	TP_WHY_CPU_BRIDGE,              /* this CPU's root complex forwards between devices badly */
	TP_WHY_OLD_GPU,
	TP_WHY_ACS,                     /* a bridge sends peer traffic up */
	TP_WHY_VIRTUAL,                 /* a virtual machine hides the bridges */
	TP_WHY_RELAY,                   /* a GPU that relays has a better way (NVB, PXN) */
	TP_WHY_NARROW,                  /* runs below the width or speed it could */
	TP_WHY_SHARED,                  /* shared with others */
	TP_WHY_ORDERING,                /* the GPU orders arriving writes by itself */
	TP_WHY_COUNT
};
const char *tp_topo_reason_code(enum tp_topo_reason reason);    /* "gpu-unable": stable, for programs */

struct tp_topo_why {
	enum tp_topo_reason reason;
	char text[224];                 /* a sentence with what was found and what would change it */
};

struct tp_topo_p2p {
	bool use, read;                 /* direct access; by reading rather than writing */
	int32_t relay;                  /* the GPU node in between (NVB); -1: none */
	enum tp_topo_path_type type;
	double bw;
	struct tp_topo_why why;
};
/* gpu_a, gpu_b: nodes of GPUs. */
ncclResult_t tp_topo_decide_p2p(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu_a, int32_t gpu_b,
	struct tp_topo_p2p *out);

enum tp_topo_gdr_mode { TP_GDR_OFF, TP_GDR_ON, TP_GDR_PCI /* over PCIe although C2C exists */ };
struct tp_topo_gdr {
	enum tp_topo_gdr_mode mode;
	bool flush;                     /* the receiver must flush */
	enum tp_topo_path_type type;    /* distance it was decided on */
	int32_t relay;                  /* PXN: the GPU whose NIC it is; -1 */
	struct tp_topo_why why, flush_why;
};
/* net: a node. read: the NIC reads GPU memory (sends). */
ncclResult_t tp_topo_decide_gdr(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net, bool read,
	struct tp_topo_gdr *out);

/* The shared-memory transport between two ranks of a host (node of either). */
bool tp_topo_decide_shm(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t a, int32_t b, struct tp_topo_why *why);

/* The NET that a GPU uses on a channel: the nearest; of equals by its place among the GPUs and the channel. -1: there is none. */
int32_t tp_topo_local_net(const struct tp_topo *topo, int32_t gpu, int channel);
int tp_topo_local_nets(const struct tp_topo *topo, int32_t gpu, int32_t *nets, int max, double *bw);      /* all nearest; returns how many */
/* The GPU that is nearest to a NET, and of those the one that PXN and the rails of others would go through; -1. */
int32_t tp_topo_local_gpu(const struct tp_topo *topo, int32_t net);
/* PXN: gpu reaches net through which GPU; -1: directly. */
int32_t tp_topo_pxn_relay(const struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net, struct tp_topo_why *why);

/* ---- Warnings: what is worse than the hardware allows ---- */

enum tp_topo_fault {
	TP_FAULT_PCI_WIDTH, TP_FAULT_PCI_SPEED, TP_FAULT_ACS, TP_FAULT_NO_GDR, TP_FAULT_NO_P2P, TP_FAULT_NIC_SHARED, TP_FAULT_NO_NIC,
	TP_FAULT_NVLINK_MISSING, TP_FAULT_UNEVEN_NICS, TP_FAULT_LINK_ONE_WAY, TP_FAULT_NIC_RATE, TP_FAULT_COUNT
};
struct tp_topo_warning {
	enum tp_topo_fault fault;
	int32_t node, peer;             /* peer -1: none */
	char text[320];
};
const char *tp_topo_fault_code(enum tp_topo_fault fault);
/* The caller frees *out. */
ncclResult_t tp_topo_find_faults(const struct tp_topo *topo, const struct tp_topo_policy *policy, struct tp_topo_warning **out, int *count);

/* ---- Expectations ---- */

/* "nic=ib gdr=on p2p=nvlink nics>=8", in watch.h's grammar. Every GPU, pair or port must be so; where there is none to look at it isn't so.
 * What is of a communicator (path, local, remote, algo) isn't looked at. */
struct tp_topo_unmet { char text[512]; };
/* What isn't so; the caller frees *out. What can't be read is ncclInvalidArgument, with name in front. */
ncclResult_t tp_topo_expect_check(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *text, const char *name,
	struct tp_topo_unmet **out, int *count);
/* Without the keys in but ("net|gdr"): what the caller looks at himself. */
ncclResult_t tp_topo_expect_check_but(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *text, const char *name, const char *but,
	struct tp_topo_unmet **out, int *count);
struct tp_expect_key;
const struct tp_expect_key *tp_topo_expect_keys(size_t *count);        /* watch.h's */
/* The machine as it is, as expectations. */
ncclResult_t tp_topo_expect_write(const struct tp_topo *topo, const struct tp_topo_policy *policy, FILE *out);
const char *tp_topo_expect_key(int index, const char **words, const char **doc);        /* NULL behind the last; words NULL: a number */

/* ---- Bandwidths ---- */

struct tp_topo_constant {
	const char *name;               /* "nvlink.sm90" */
	double value;
	const char *unit, *source;
};
const struct tp_topo_constant *tp_topo_constants(size_t *count);
double tp_topo_constant(const char *name);                      /* asserts that it is there */
double tp_topo_pcie_bw(double gigatransfers, int lanes);        /* as NCCL counts: 16 GT/s x16 is 24 GB/s */
double tp_topo_nvlink_bw(int sm);                               /* a link */
double tp_topo_inter_cpu_bw(enum tp_cpu_arch arch, enum tp_cpu_vendor vendor, int family, int model);

#endif
