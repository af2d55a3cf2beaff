/* SPDX-License-Identifier: Apache-2.0
 * What programs need beyond NCCL's interface: streams of host memory, and how a process learns its rank. These symbols carry the
 * version TELPHER_0.1; a program that only uses nccl.h needs none of them. */
#ifndef TELPHER_H_
#define TELPHER_H_

#include "nccl.h"

#define TELPHER_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library */
/* The library's own version, "0.1.0"; ncclGetVersion tells whose interface it has. Static. */
const char *telpher_version(void);

/* Order operations and wait for them: streams of host memory */
/* A stream runs its operations one after the other, in the order of the calls, on a thread of the library,
 * whatever communicators they belong to; operations of one communicator keep their order across streams too. A stream is
 * passed wherever NCCL takes a cudaStream_t, and belongs to this process. All calls may come from any thread. A stream
 * that isn't one (foreign, destroyed) is ncclInvalidArgument. GPU ranks use CUDA's streams instead: there these calls are
 * ncclInvalidUsage.
 * With the streams NULL, 0x1 and 0x2 a call returns when its operation is done; these have no order among each other
 * beyond the communicator's own. */
/* *stream: a new stream, with nothing on it. */
ncclResult_t telpher_stream_create(cudaStream_t *stream);
/* Returns at once; what was issued on the stream still runs to its end. */
ncclResult_t telpher_stream_destroy(cudaStream_t stream);
/* Waits until everything issued so far is done. The first error of an operation since the last synchronize or query that
 * reported one, else ncclSuccess. */
ncclResult_t telpher_stream_synchronize(cudaStream_t stream);
/* The same without waiting: ncclInProgress where something is outstanding. */
ncclResult_t telpher_stream_query(cudaStream_t stream);

/* Learn the rank from the launcher */
/* Who this process is, by what its launcher put into the environment. Looked for in this order:
 *   telpher run     TELPHER_RANK, TELPHER_NRANKS, TELPHER_LOCAL_RANK, TELPHER_LOCAL_NRANKS
 *   Open MPI        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (also a Kubernetes MPIJob's workers)
 *   MPICH, Intel    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
 *   torchrun        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
 *   Slurm           SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID
 *   Kubernetes      an indexed Job: JOB_COMPLETION_INDEX, with TELPHER_NRANKS for the number of ranks
 * Launchers inside each other (mpirun under Slurm): the first that is complete wins. Without any the process is the only rank
 * (launcher "none"), and the log says so. */
typedef struct {
	int rank, nranks;
	int local_rank, local_nranks;   /* on this machine; -1 where the launcher doesn't say */
	const char *launcher;           /* "telpher run", "Open MPI", …; static */
} telpher_rank_t;
/* ncclInvalidUsage: a rank without a number of ranks. ncclInvalidArgument: numbers that make no sense. */
ncclResult_t telpher_rank_from_environment(telpher_rank_t *out);

/* Join the ranks that one launcher started */
/* Like telpher_rank_from_environment, with the unique id by which these ranks meet. Ranks that one launcher started on one machine find each other
 * (processes of one user only). A job on several machines is told where: NCCL_COMM_ID=host:port, an address of rank 0's
 * machine, and TELPHER_JOB_SECRET, alike for all ranks. ncclInvalidUsage says what is missing. */
ncclResult_t telpher_unique_id_from_environment(telpher_rank_t *rank, ncclUniqueId *id);
/* telpher_unique_id_from_environment, then ncclCommInitRankConfig. config may be NULL. */
ncclResult_t telpher_comm_init_from_environment(ncclComm_t *comm, ncclConfig_t *config);

/* The path between two ranks */
/* The path between two ranks of a communicator: "SHM/CMA", "NET/Socket/0", …, and after a colon in a sentence why not a better one. text holds
 * text_bytes and is cut to that. ncclInvalidArgument: there is no such rank, or no room. */
ncclResult_t telpher_comm_path(ncclComm_t comm, int from, int to, char *text, size_t text_bytes);

/* The paths of a communicator as JSON */
/* What this rank knows of the paths from rank `from` to every other, or (from -1) between all ranks: an object on one line, with
 *   telpher, time_s, communicator, name, ranks_are ("host processes" or "gpus"), rank (who says this), nranks, nhosts, nchannels
 *   ranks   [rank] of rank, host (a number), host_name, pid, device, address (how the network reaches it: "mlx5_0, GID 3 …")
 *   paths   of each pair: from, to, same_host, via (the link in use: "SHM/CMA", "P2P/CUMEM", "NET/IB/0"), type (how the topology joins the two:
 *           "NVL", "PIX", "PHB", "SYS", "NET", …), device (the sender's network port), gdr (do NICs reach the GPUs' memory), bandwidth_gbs
 *           (expected, 10^9 bytes a second, one way), latency_us (expected), note (a sentence), refused (each better kind of path: kind, code and
 *           why), and, where the channels don't all use one port, channels: of each, channel, device, bandwidth_gbs and latency_us
 * What isn't known, or has no meaning, is null. Keys may be added in later versions, none changes its meaning.
 * text belongs to the caller and has room for *bytes. *bytes becomes the size of the text with the zero at its end; where text is NULL that is
 * all. Too little room is ncclInvalidArgument, and nothing is written. For -1 it grows with the square of nranks.
 * TELPHER_PATHS_FILE has rank 0 write the same (-1) at init. */
ncclResult_t telpher_comm_paths(ncclComm_t comm, int from, char *text, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
