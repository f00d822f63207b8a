"""A trainer that owns its graphs: exports the joint graph of a model with its loss, plans, and compiles the halves."""

import contextlib

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors

import autoremat


class Training(nn.Module):
    """A model with its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())))

    def forward(self, x):
        return self.layers(x).square().mean()


torch.manual_seed(0)
training, x = Training(), torch.randn(4096, 128)
with contextlib.ExitStack() as stack:
    joint = aot_export_joint_with_descriptors(stack, training, (x,))
    print(f"joint graph of {len(joint.graph_module.graph.nodes)} nodes")
    # Here the trainer runs its own passes on `joint.graph_module`, such as those that shard it.
    step = aot_compile_joint_with_descriptors(
        joint, partition_fn=autoremat.partitioner({"memory_budget": 0.5, "compiler": "aot_eager"})
    )

inputs = (*training.parameters(), *training.buffers(), x)
with autoremat.track_peak() as peak:
    step(*inputs).backward()
found = [parameter.grad.clone() for parameter in training.parameters()]
training.zero_grad()
with autoremat.track_peak() as eager:
    training(x).backward()
assert all(map(torch.equal, found, (parameter.grad for parameter in training.parameters())))
print(f"eager {eager.bytes / 2**20:.1f} MiB, planned {peak.bytes / 2**20:.1f} MiB, equal gradients")
