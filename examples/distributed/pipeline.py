"""A pipeline with the 1F1B schedule: torchrun --nproc-per-node 2 examples/distributed/pipeline.py"""

import torch
from tiny_model import Decoder, batch, join, loss_of
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autoremat

rank, ranks = join()
model, layers = Decoder(), 4 // ranks


class Part(nn.Module):
    """The layers of one rank, with the embedding on the first and the output projection on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = model.embed if rank == 0 else nn.Identity()
        self.blocks = nn.Sequential(*model.blocks[rank * layers : (rank + 1) * layers])
        self.head = model.head if rank == ranks - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


part = Part()
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
calls = autoremat.in_flight(schedule, rank)
part.compile(backend="autoremat", options={"memory_budget": 0.8, "in_flight": calls})
for step in range(3):
    tokens, targets = batch(seed=step)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(tokens, return_outputs=False)
    else:
        schedule.step(target=targets, losses=losses, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()

reports = autoremat.gather_reports()
if rank == ranks - 1:
    print(f"loss {torch.stack(losses).mean().item():.4f}")
    print(reports)
distributed.destroy_process_group()
