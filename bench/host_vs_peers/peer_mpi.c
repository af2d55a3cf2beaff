/* Open MPI and MPICH. */
#include <mpi.h>
#include <stdio.h>
#include "loop.h"

int peer_start(const char *dir, int *rank, int *nranks)
{
	(void)dir;
	return MPI_Init(NULL, NULL) != MPI_SUCCESS || MPI_Comm_rank(MPI_COMM_WORLD, rank) != MPI_SUCCESS ||
		MPI_Comm_size(MPI_COMM_WORLD, nranks) != MPI_SUCCESS ? -1 : 0;
}

int peer_barrier(void) { return MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS ? 0 : -1; }

int peer_call(enum peer_collective which, float *in, float *out, size_t count)
{
	const MPI_Comm world = MPI_COMM_WORLD;
	const int n = (int)count;
	int result = MPI_ERR_ARG;
	switch (which) {
	case PEER_ALL_REDUCE:
		result = MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, world);
		break;
	case PEER_ALL_GATHER:
		result = MPI_Allgather(in, n, MPI_FLOAT, out, n, MPI_FLOAT, world);
		break;
	case PEER_REDUCE_SCATTER:
		result = MPI_Reduce_scatter_block(in, out, n, MPI_FLOAT, MPI_SUM, world);
		break;
	case PEER_BROADCAST:
		result = MPI_Bcast(out, n, MPI_FLOAT, 0, world);
		break;
	case PEER_ALL_TO_ALL:
		result = MPI_Alltoall(in, n, MPI_FLOAT, out, n, MPI_FLOAT, world);
		break;
	default:
		break;
	}
	if (result != MPI_SUCCESS)
		fprintf(stderr, "MPI error %d\n", result);
	return result == MPI_SUCCESS ? 0 : -1;
}

void peer_stop(void) { MPI_Finalize(); }
