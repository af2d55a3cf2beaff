/* Between the files of comm/ that deal with the machine: topo.c gathers what ranks know, topo_find.c is what a process finds by itself,
 * topo_seat.c which network devices ranks use, topo_tell.c what is said of it. */
#ifndef TP_COMM_TOPO_H
#define TP_COMM_TOPO_H

#include "comm/internal.h"
#include "topo/topo.h"

/* What every rank tells every other; without pointers. */
struct tp_topo_card {
	uint64_t machine;               /* whatever NCCL_HOSTID makes of it */
	uint64_t doc_hash;              /* of the description that its process found, which has no ranks in it; 0: none */
	uint32_t doc_bytes;
	struct tp_topo_place place;     /* host ranks */
	int32_t port;                   /* of the network device that it uses */
	float gbps, latency_us;         /* of that: GB/s; 0: no network is in use */
	char net[32];                   /* "mlx5_0"; "": none */
	char address[96];               /* of that: "GID 3 ::ffff:192.0.2.6 RoCE v2"; "": none is said */
	char bus_id[20];                /* of its GPU; "": a host rank */
	uint64_t mask[TP_CPU_WORDS];
};

/* A GPU rank's second word, once the host is known: its way to each rank of its host, and to its NIC. */
#define TP_TOPO_LOCAL_MAX 64
struct tp_topo_row {
	uint8_t known;
	uint8_t type[TP_TOPO_LOCAL_MAX], reason[TP_TOPO_LOCAL_MAX];     /* enum tp_topo_path_type, tp_topo_reason; by place on the host */
	float gbps[TP_TOPO_LOCAL_MAX];
	float measured_gbps[TP_TOPO_LOCAL_MAX], measured_us[TP_TOPO_LOCAL_MAX];         /* as the topology file has it; 0: it wasn't */
	float net_measured_gbps, net_measured_us;       /* to the NIC in use */
	uint8_t net_type, best_type;                    /* of the NIC in use; of the nearest */
	uint8_t gdr_receive, gdr_send, gdr_reason;      /* the NIC in use writes and reads GPU memory; why it doesn't do both */
	char best_net[32];
	char gdr_why[184];                              /* the same as a sentence; "": both */
};

struct tp_comm_topo {
	struct tp_topo_card *cards;     /* [nranks] */
	struct tp_topo_row *rows;       /* [nranks]; NULL: host ranks */
	struct tp_topo_doc *doc;        /* of this rank's host; NULL: not needed, or not to be had */
	struct tp_topo *graph;          /* with its paths */
	struct tp_topo_policy policy;
	struct tp_channels *rings;      /* see tp_comm_rings; NULL: none, or not looked for yet */
	bool rings_sought;
	bool net_takes_gpu_memory;      /* the network in use, where machine and drivers allow it */
	struct tp_topo_values values;   /* what was measured, and holds */
	char *refused;                  /* what of it doesn't, a line each; NULL: nothing */
	char *notes;                    /* what ranks of this host contradict each other in, a line each; NULL: nothing */
};

/* topo_find.c: what this process sees, found once in its life. Valid for ever. false: nothing (told). */
struct tp_topo_found { const struct tp_topo_found *next; uint64_t key, hash; size_t bytes; char *text; };
bool tp_topo_find_own(const struct ncclComm *comm, const struct tp_topo_found **out);
/* The same said once in the life of the process: true the first time. */
bool tp_topo_first_time(const char *text);
void tp_topo_fill_card(const struct ncclComm *comm, struct tp_topo_card *out);
/* The engine thread sits by the devices that the communicator uses. */
void tp_topo_seat_engine(const struct ncclComm *comm);

/* topo_seat.c: collective. Where ranks have several devices, each chooses those near to it. */
ncclResult_t tp_topo_seat_links(struct ncclComm *comm);

/* topo_tell.c */
void tp_topo_warn(const struct ncclComm *comm);
void tp_topo_write_files(const struct ncclComm *comm);
bool tp_topo_files_wanted(const struct ncclComm *comm);
/* The node of a rank's GPU; -1. */
int32_t tp_comm_topo_gpu(const struct ncclComm *comm, int rank);
/* The rings of this host's GPUs, found once, on the paths of our own links (which go through no GPU but their ends'); NULL: they go by rank. */
struct tp_channels;
ncclResult_t tp_comm_rings(const struct ncclComm *comm, const struct tp_channels **out);
/* The node of the port that a transport calls so; -1. */
int32_t tp_comm_topo_net(const struct tp_topo *graph, const char *name, int port);

#endif
