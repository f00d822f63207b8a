"""Tensor parallelism by DTensor: torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py"""

import torch
from tiny_model import Decoder, batch, join, loss_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoremat

rank, ranks = join()
mesh = init_device_mesh("cpu", (ranks,))
model = Decoder()
for block in model.blocks:
    projections = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    parallelize_module(
        block, mesh, projections | {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    )
compiled = torch.compile(model, backend="autoremat", options={"memory_budget": 0.7})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for step in range(3):
    tokens, targets = batch(seed=step)  # all ranks work on the same tokens
    loss = loss_of(compiled(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

reports = autoremat.gather_reports()
if rank == 0:
    print(f"loss {loss.item():.4f}")
    print(reports)
distributed.destroy_process_group()
