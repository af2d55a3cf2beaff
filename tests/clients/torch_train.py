#!/usr/bin/env python3
"""Trains a small transformer on 1 rank, then on several by DDP, by FSDP2 and tensor parallel: the losses must be the same.

Usage: torch_train.py RANKS [DEVICES]. Rank r takes GPU r % DEVICES (default 1: all share one GPU).
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, LENGTH, WORDS, WIDTH = 8, 16, 32, 128, 128


class Model(nn.Module):
	def __init__(self):
		super().__init__()
		self.embed = nn.Embedding(WORDS, WIDTH)
		layer = lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
		self.layers = nn.ModuleList(layer() for _ in range(3))
		self.head = nn.Linear(WIDTH, WORDS)

	def forward(self, x):
		h = self.embed(x)
		for layer in self.layers:
			h = layer(h)
		return self.head(h)


def train(rank, n, mode):
	torch.manual_seed(1)
	model = Model().cuda()
	if mode == "ddp":
		model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], bucket_cap_mb=1)
	elif mode == "fsdp":
		for layer in model.layers:
			fully_shard(layer)
		fully_shard(model)
	elif mode == "tensor":
		shards = {}
		for i in range(len(model.layers)):
			shards |= {f"layers.{i}.linear1": ColwiseParallel(), f"layers.{i}.linear2": RowwiseParallel()}
		parallelize_module(model, init_device_mesh("cuda", (n,)), shards)
	pieces = 1 if mode == "tensor" else n       # of a batch: tensor parallel ranks see all of it
	optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
	data = torch.Generator().manual_seed(2)
	losses = []
	for _ in range(STEPS):
		tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=data)
		mine = tokens[rank % pieces * BATCH // pieces:(rank % pieces + 1) * BATCH // pieces].cuda()
		logits = model(mine[:, :-1])
		loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), mine[:, 1:].reshape(-1))
		optimizer.zero_grad()
		loss.backward()
		optimizer.step()
		total = loss.detach().clone()
		if n > 1:
			dist.all_reduce(total, op=dist.ReduceOp.AVG)
		losses.append(total.item())
	return losses


def worker(rank, n, devices, mode, port, results):
	torch.cuda.set_device(rank % devices)
	torch.backends.cuda.matmul.allow_tf32 = False
	if n > 1:
		os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
		dist.init_process_group("nccl", rank=rank, world_size=n, device_id=torch.device("cuda", rank % devices))
	losses = train(rank, n, mode)
	if rank == 0:
		results.put(losses)
	if n > 1:
		dist.destroy_process_group()


def run(n, devices, mode, port):
	results = mp.get_context("spawn").SimpleQueue()
	started = time.time()
	mp.spawn(worker, (n, devices, mode, port, results), n)
	losses = results.get()
	print(f"  {mode}, {n} ranks: {' '.join(f'{x:.5f}' for x in losses)}   {time.time() - started:.1f} s", flush=True)
	return losses


if __name__ == "__main__":
	count, gpus = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
	base = 30000 + os.getpid() % 10000
	alone = run(1, 1, "single", base)
	assert alone[-1] < alone[0]
	for i, kind in enumerate(("ddp", "fsdp", "tensor")):
		several = run(count, gpus, kind, base + 1 + i)
		worst = max(abs(a - b) / abs(a) for a, b in zip(alone, several))
		assert worst < 1e-3, f"{kind}: losses differ by {worst:.2e}"
	print("torch_train: the same losses", flush=True)
