"""FSDP2, block by block: torchrun --nproc-per-node 2 examples/distributed/fsdp2.py"""

import torch
from tiny_model import Decoder, batch, join, loss_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autoremat

rank, ranks = join()
mesh = init_device_mesh("cpu", (ranks,))
model = Decoder()
for block in model.blocks:
    block.compile(backend="autoremat")  # before fully_shard, so that the hooks of FSDP stay outside of the graphs
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_at(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_of(model(tokens), targets)


# One budget for the whole step of this rank, with the parameters that FSDP gathers. All ranks profile at the same time.
profile = autoremat.profile_step(loss_at, *batch(seed=rank), memory_budget=0.8, regional=True)
autoremat.configure(memory_budget=profile)
for step in range(3):
    loss = loss_at(*batch(seed=10 * step + rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

reports = autoremat.gather_reports()
if rank == 0:
    print(f"loss {loss.item():.4f}")
    print(profile)
    print(reports)
distributed.destroy_process_group()
