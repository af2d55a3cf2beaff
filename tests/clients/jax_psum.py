#!/usr/bin/env python3
"""JAX: psum, all_gather, psum_scatter, all_to_all, ppermute under shard_map, and a training step, a process a rank.

Usage: jax_psum.py RANKS [DEVICES]. Rank r takes GPU r % DEVICES.
"""
import multiprocessing
import os
import sys


def rank_main(rank, n, devices, port):
	os.environ.update(CUDA_VISIBLE_DEVICES=str(rank % devices), XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1")
	import jax
	import jax.numpy as jnp
	import numpy as np
	from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
	jax.distributed.initialize(f"127.0.0.1:{port}", n, rank, local_device_ids=[0])
	mesh = Mesh(np.array(jax.devices()), ("i",))
	sharding = NamedSharding(mesh, P("i"))

	def run(body, x, out=P("i")):
		given = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
		f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=out, check_vma=False))
		return np.asarray(jax.block_until_ready(f(given)).addressable_data(0))

	x = np.arange(n * n * 24, dtype=np.float32).reshape(n * n, 24)
	mine = slice(rank * n, (rank + 1) * n)
	parts = x.reshape(n, n, 24)
	assert (run(lambda a: jax.lax.psum(a, "i"), x) == parts.sum(0)).all()
	assert (run(lambda a: jax.lax.pmax(a, "i"), x) == parts.max(0)).all()
	assert (run(lambda a: jax.lax.all_gather(a, "i", tiled=True), x) == x).all()
	assert (run(lambda a: jax.lax.psum_scatter(a, "i", tiled=True), x) == parts.sum(0)[rank:rank + 1]).all()
	assert (run(lambda a: jax.lax.all_to_all(a, "i", 0, 0, tiled=True), x) == parts[:, rank]).all()
	assert (run(lambda a: jax.lax.ppermute(a, "i", [(r, (r + 1) % n) for r in range(n)]), x) == parts[(rank - 1) % n]).all()
	big = np.ones((n * 1024, 1024), np.float32)
	assert (run(lambda a: jax.lax.psum(a, "i"), big) == n).all()

	# A step of training, the batch over the ranks: the compiler puts in the all-reduce. Beside it the same step on this rank alone.
	weights = np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)
	batch = np.random.default_rng(7).standard_normal((8 * n, 16)).astype(np.float32)
	step = jax.jit(lambda w, b: w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(b @ w) ** 2))(w))
	shared = jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
	everywhere = jax.make_array_from_callback(weights.shape, NamedSharding(mesh, P()), lambda index: weights[index])
	trained, alone = everywhere, jnp.asarray(weights)
	for _ in range(3):
		trained, alone = step(trained, shared), step(alone, jnp.asarray(batch))
	assert np.allclose(np.asarray(trained.addressable_data(0)), np.asarray(alone), atol=1e-4)
	jax.distributed.shutdown()


if __name__ == "__main__":
	n, devices = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
	port = 40000 + os.getpid() % 10000
	context = multiprocessing.get_context("spawn")
	ranks = [context.Process(target=rank_main, args=(r, n, devices, port)) for r in range(n)]
	for p in ranks:
		p.start()
	for p in ranks:
		p.join(150)
		if p.is_alive():
			p.kill()
	assert all(p.exitcode == 0 for p in ranks), [p.exitcode for p in ranks]
	print(f"jax_psum: {n} ranks, all right", flush=True)
