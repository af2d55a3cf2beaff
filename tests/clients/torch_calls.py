#!/usr/bin/env python3
"""Every kind of call of torch.distributed's NCCL backend, checked against results computed on each rank.

Usage: torch_calls.py RANKS [DEVICES]. Ranks are processes; rank r takes GPU r % DEVICES (default: 1, all share one GPU).
Run it with LD_PRELOAD=…/libnccl.so.2.
"""
import datetime
import functools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values(rank, n, dtype, seed=0):
	g = torch.Generator().manual_seed(1000 * seed + rank)
	return torch.randint(0, 5, (n,), generator=g).to(dtype).cuda()


def check(name, got, want):
	if not torch.equal(got, want.to(got.dtype)):
		bad = (got != want.to(got.dtype)).nonzero().flatten()[:3].tolist()
		raise AssertionError(f"{name}: rank {dist.get_rank()} differs at {bad}: {got.flatten()[bad].tolist()}, not {want.flatten()[bad].tolist()}")


def reductions(rank, n, sizes):
	for dtype in TYPES:
		for size in sizes:
			every = [values(r, size, dtype, size) for r in range(n)]
			stack = torch.stack([x.double() for x in every])
			for op, want in ((dist.ReduceOp.SUM, stack.sum(0)), (dist.ReduceOp.MAX, stack.max(0).values),
					(dist.ReduceOp.MIN, stack.min(0).values), (dist.ReduceOp.PRODUCT, stack.prod(0))):
				if op == dist.ReduceOp.PRODUCT and dtype in (torch.int8, torch.uint8, torch.float16, torch.bfloat16) and n > 2:
					continue        # beyond the type's exact range
				x = every[rank].clone()
				dist.all_reduce(x, op=op)
				check(f"all_reduce {op} {dtype} {size}", x, want)
				root = size % n
				x = every[rank].clone()
				dist.reduce(x, root, op=op)
				if rank == root:
					check(f"reduce {op} {dtype} {size}", x, want)
			if dtype.is_floating_point:
				x = every[rank].clone()
				dist.all_reduce(x, op=dist.ReduceOp.AVG)
				assert torch.allclose(x.double(), stack.mean(0), rtol=1e-2), "avg"
	x = torch.full((1000,), float(rank + 1), device="cuda")
	dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
	check("premul_sum", x, torch.full((1000,), 0.5 * n * (n + 1) / 2, device="cuda"))
	scale = torch.tensor(0.25, device="cuda")
	x = torch.full((1000,), float(rank + 1), device="cuda")
	dist.all_reduce(x, op=dist._make_nccl_premul_sum(scale))
	check("premul_sum of a device scalar", x, torch.full((1000,), 0.25 * n * (n + 1) / 2, device="cuda"))


def movement(rank, n, sizes):
	for size in sizes:
		every = [values(r, size, torch.float32, size) for r in range(n)]
		x = every[rank].clone()
		dist.broadcast(x, size % n)
		check(f"broadcast {size}", x, every[size % n])
		out = torch.empty(n * size, device="cuda")
		dist.all_gather_into_tensor(out, every[rank])
		check(f"all_gather_into_tensor {size}", out, torch.cat(every))
		outs = [torch.empty(size, device="cuda") for _ in range(n)]
		dist.all_gather(outs, every[rank])
		check(f"all_gather {size}", torch.cat(outs), torch.cat(every))
		whole = [values(r, n * size, torch.float32, size + 1) for r in range(n)]
		out = torch.empty(size, device="cuda")
		dist.reduce_scatter_tensor(out, whole[rank])
		check(f"reduce_scatter_tensor {size}", out, torch.stack(whole).sum(0)[rank * size:(rank + 1) * size])
		out = torch.empty(n * size, device="cuda")
		dist.all_to_all_single(out, whole[rank])
		check(f"all_to_all_single {size}", out, torch.cat([whole[r][rank * size:(rank + 1) * size] for r in range(n)]))
		# unequal pieces: rank r sends (r + p) % 3 * size to p
		give = [(rank + p) % 3 * size for p in range(n)]
		take = [(p + rank) % 3 * size for p in range(n)]
		out = torch.empty(sum(take), device="cuda")
		dist.all_to_all_single(out, torch.full((sum(give),), float(rank), device="cuda"), take, give)
		check(f"all_to_all_single, unequal, {size}", out, torch.cat([torch.full((take[p],), float(p), device="cuda") for p in range(n)]))
		outs = [torch.empty(size, device="cuda") for _ in range(n)] if rank == 0 else None
		dist.gather(every[rank], outs, 0)
		if rank == 0:
			check(f"gather {size}", torch.cat(outs), torch.cat(every))
		out = torch.empty(size, device="cuda")
		dist.scatter(out, [every[r] for r in range(n)] if rank == n - 1 else None, n - 1)
		check(f"scatter {size}", out, every[rank])


def transfers(rank, n, sizes):
	right, left = (rank + 1) % n, (rank - 1) % n
	for size in sizes:
		x, y = torch.full((size,), float(rank), device="cuda"), torch.empty(size, device="cuda")
		for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]):
			w.wait()
		check(f"batch_isend_irecv {size}", y, torch.full((size,), float(left), device="cuda"))
		if n > 1 and rank < 2:
			if rank == 0:
				dist.send(x, 1)
				dist.recv(y, 1)
			else:
				dist.recv(y, 0)
				dist.send(x, 0)
			check(f"send, recv {size}", y, torch.full((size,), float(1 - rank), device="cuda"))
	dist.barrier()


def objects(rank, n):
	got = [None] * n
	dist.all_gather_object(got, {"rank": rank, "text": "x" * (100 * rank)})
	assert [g["rank"] for g in got] == list(range(n))
	things = [{"seven": 7}] if rank == 0 else [None]
	dist.broadcast_object_list(things, 0)
	assert things[0] == {"seven": 7}


def groups(rank, n, generation):
	evens = dist.new_group(list(range(0, n, 2)))
	if rank % 2 == 0:
		x = torch.ones(1000, device="cuda")
		dist.all_reduce(x, group=evens)
		check("new_group", x, torch.full((1000,), float((n + 1) // 2), device="cuda"))
	if n >= 2 and generation == 0:      # PyTorch 2.11 crashes in a second one, with the original library too
		halves = [list(range(n // 2)), list(range(n // 2, n))]
		part = dist.split_group(split_ranks=halves)
		x = torch.ones(1000, device="cuda")
		dist.all_reduce(x, group=part)
		check("split_group", x, torch.full((1000,), float(len(halves[rank >= n // 2])), device="cuda"))
	if n > 2 and hasattr(dist, "shrink_group"):
		all_of_them = dist.new_group(list(range(n)))
		x = torch.ones(1000, device="cuda")
		dist.all_reduce(x, group=all_of_them)
		torch.cuda.synchronize()
		if rank != n - 1:
			fewer = dist.shrink_group([n - 1], group=all_of_them)
			x = torch.ones(1000, device="cuda")
			dist.all_reduce(x, group=fewer)
			check("shrink_group", x, torch.full((1000,), float(n - 1), device="cuda"))
	dist.barrier()


def asynchronous(rank, n):
	side = torch.cuda.Stream()
	xs = [torch.full((10000,), float(rank + i), device="cuda") for i in range(20)]
	works = []
	for i, x in enumerate(xs):
		with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
			works.append(dist.all_reduce(x, async_op=True))
	for w in works:
		w.wait()
	torch.cuda.synchronize()
	for i, x in enumerate(xs):
		check("async", x, torch.full((10000,), float(sum(r + i for r in range(n))), device="cuda"))
	with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device()), async_ops=True) as together:
		for x in xs:
			dist.all_reduce(x)
	together.wait()
	torch.cuda.synchronize()
	for i, x in enumerate(xs):
		check("coalesced", x, torch.full((10000,), float(n * sum(r + i for r in range(n))), device="cuda"))


def graphs(rank, n):
	for size in (16, 5000, 1 << 20):
		x, y = torch.zeros(size, device="cuda"), torch.zeros(n * size, device="cuda")
		dist.all_reduce(x)
		torch.cuda.synchronize()
		graph = torch.cuda.CUDAGraph()
		with torch.cuda.graph(graph, capture_error_mode="thread_local"):
			dist.all_reduce(x)
			x += 1
			dist.all_gather_into_tensor(y, x)
		for i in range(10):
			x.fill_(float(rank + i))
			graph.replay()
			want = float(sum(r + i for r in range(n)) + 1)
			check(f"graph {size} {i}", y, torch.full((n * size,), want, device="cuda"))
			if i % 3 == 0:
				z = torch.ones(size, device="cuda")
				dist.all_reduce(z)
				check("eager between replays", z, torch.full((size,), float(n), device="cuda"))
	torch.cuda.synchronize()


def start(rank, n, devices, port, generation, seconds=120):
	device = rank % devices
	torch.cuda.set_device(device)
	os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + generation))
	dist.init_process_group("nccl", rank=rank, world_size=n, device_id=torch.device("cuda", device), timeout=datetime.timedelta(seconds=seconds))


def worker(rank, n, devices, port):
	sizes = [1, 17, 1000, 100003] if os.environ.get("QUICK") else [1, 17, 1000, 100003, 1 << 21]
	started = time.time()
	for generation in range(int(os.environ.get("GENERATIONS", "2"))):
		start(rank, n, devices, port, generation)
		for part in (reductions, movement, transfers):
			part(rank, n, sizes if generation == 0 else sizes[:2])
		for part in (objects, functools.partial(groups, generation=generation), asynchronous, graphs):
			part(rank, n)
			if rank == 0:
				print(f"  generation {generation}, {getattr(part, '__name__', 'groups')}: right after {time.time() - started:.1f} s", flush=True)
		torch.cuda.synchronize()
		dist.destroy_process_group()


def stuck(rank, n, devices, port):
	"""The last rank stays away from a collective; PyTorch's watchdog must be able to abort what the others wait in."""
	# Before it aborts, the watchdog sleeps four times as long as a dump may take.
	os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="1", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1000")
	start(rank, n, devices, port, 0, seconds=5)
	x = torch.ones(1 << 20, device="cuda")
	dist.all_reduce(x)
	torch.cuda.synchronize()
	if rank == n - 1:
		time.sleep(600)             # alive till the others have ended
	try:
		dist.all_reduce(x)
		torch.cuda.synchronize()
		print(f"  rank {rank}: let go by the abort", flush=True)
		time.sleep(30)                  # the watchdog ends the process
	except Exception as e:
		print(f"  rank {rank}: {str(e).splitlines()[0][:160]}", flush=True)
		os._exit(3)
	os._exit(0)


def victim(rank, n, devices, port):
	os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
	start(rank, n, devices, port, 0)
	x = torch.ones(1 << 20, device="cuda")
	dist.all_reduce(x)
	torch.cuda.synchronize()
	if rank == n - 1:
		os.kill(os.getpid(), signal.SIGKILL)
	try:
		for _ in range(100):
			dist.all_reduce(x)
			torch.cuda.synchronize()
	except Exception as e:
		print(f"  rank {rank}: {str(e).splitlines()[0][:160]}", flush=True)
		os._exit(3)
	os._exit(0)


def ending_badly(what, body, n, devices, port):
	"""Runs body on n ranks: all but the last, which kills itself or is killed afterwards, must end, and not well."""
	started = time.time()
	context = mp.get_context("spawn")
	ranks = [context.Process(target=body, args=(r, n, devices, port)) for r in range(n)]
	for p in ranks:
		p.start()
	try:
		for p in ranks[:-1]:
			p.join(90)
		codes = [p.exitcode for p in ranks[:-1]]
	finally:
		for p in ranks:
			p.kill()
	assert all(c not in (0, None) for c in codes), f"{what}: the others ended with {codes} (None: hangs)"
	print(f"  {what}: the others ended with {codes}, {time.time() - started:.1f} s in all", flush=True)


if __name__ == "__main__":
	count, gpus = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
	base = 20000 + os.getpid() % 10000
	print(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {count} ranks on {gpus} GPU(s)", flush=True)
	mp.spawn(worker, (count, gpus, base), count)
	if count > 1:
		ending_badly("killed rank", victim, count, gpus, base + 10)
		ending_badly("rank that stays away", stuck, count, gpus, base + 11)
	print("torch_calls: all right", flush=True)
