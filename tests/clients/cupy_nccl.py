#!/usr/bin/env python3
"""cupy.cuda.nccl: its communicator's calls, ranks as processes, one id passed by a pipe (or by mpi4py: --mpi, under mpirun).

Usage: cupy_nccl.py RANKS [DEVICES] | mpirun -n RANKS cupy_nccl.py --mpi [DEVICES]
"""
import multiprocessing
import sys


def rank_main(rank, n, devices, uid):
	import cupy
	from cupy.cuda import nccl
	cupy.cuda.Device(rank % devices).use()
	comm = nccl.NcclCommunicator(n, uid, rank)
	assert (comm.size(), comm.rank_id(), comm.device_id()) == (n, rank, rank % devices)
	stream = cupy.cuda.Stream(non_blocking=True)
	with stream:
		for size in (1, 1001, 1 << 20):
			x, y = cupy.full(size, rank + 1, cupy.float32), cupy.zeros(size, cupy.float32)
			comm.allReduce(x.data.ptr, y.data.ptr, size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
			assert (y == n * (n + 1) // 2).all()
			comm.broadcast(x.data.ptr, y.data.ptr, size, nccl.NCCL_FLOAT32, n - 1, stream.ptr)
			assert (y == n).all()
			comm.reduce(x.data.ptr, y.data.ptr, size, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, 0, stream.ptr)
			assert rank or (y == n).all()
			every = cupy.zeros(n * size, cupy.float32)
			comm.allGather(x.data.ptr, every.data.ptr, size, nccl.NCCL_FLOAT32, stream.ptr)
			assert (every.reshape(n, size) == cupy.arange(1, n + 1).reshape(n, 1)).all()
			comm.reduceScatter(every.data.ptr, y.data.ptr, size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
			assert (y == n * (rank + 1)).all()
			nccl.groupStart()
			comm.send(x.data.ptr, size, nccl.NCCL_FLOAT32, (rank + 1) % n, stream.ptr)
			comm.recv(y.data.ptr, size, nccl.NCCL_FLOAT32, (rank - 1) % n, stream.ptr)
			nccl.groupEnd()
			assert (y == (rank - 1) % n + 1).all()
	stream.synchronize()
	half = comm.split(rank % 2, rank) if hasattr(comm, "split") else None
	if half is not None:
		assert half.size() == (n + 1 - rank % 2) // 2
		half.destroy()
	comm.check_async_error()
	comm.destroy()


if __name__ == "__main__":
	if sys.argv[1] == "--mpi":
		from mpi4py import MPI
		from cupy.cuda import nccl
		world = MPI.COMM_WORLD
		rank, n = world.Get_rank(), world.Get_size()
		uid = world.bcast(nccl.get_unique_id() if rank == 0 else None, 0)
		rank_main(rank, n, int(sys.argv[2]) if len(sys.argv) > 2 else 1, uid)
		if world.allreduce(1) == n and rank == 0:
			print("cupy_nccl under MPI: all right", flush=True)
	else:
		n, devices = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
		context = multiprocessing.get_context("spawn")

		from cupy.cuda import nccl
		uid = nccl.get_unique_id()
		others = [context.Process(target=rank_main, args=(r, n, devices, uid)) for r in range(1, n)]
		for p in others:
			p.start()
		rank_main(0, n, devices, uid)
		for p in others:
			p.join(60)
		assert all(p.exitcode == 0 for p in others), [p.exitcode for p in others]
		print(f"cupy_nccl: {n} ranks, all right", flush=True)
