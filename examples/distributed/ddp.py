"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/distributed/ddp.py"""

import torch
from tiny_model import Decoder, batch, join, loss_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import autoremat

rank, _ = join()
# The gradients are views of the buckets that are reduced. Otherwise every gradient is in memory twice.
model = DistributedDataParallel(Decoder(), gradient_as_bucket_view=True)
compiled = torch.compile(model, backend="autoremat", options={"memory_budget": 0.7})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    tokens, targets = batch(seed=10 * step + rank)
    loss = loss_of(compiled(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

reports = autoremat.gather_reports()
if rank == 0:
    print(f"loss {loss.item():.4f}")
    print(reports)
distributed.destroy_process_group()
