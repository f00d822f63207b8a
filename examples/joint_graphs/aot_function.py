"""Plans a joint graph by hand: AOTAutograd asks a partitioner, which plans, prints and splits. No code is generated."""

import torch
from torch import nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_module

import autoremat


class Training(nn.Module):
    """A model with its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())))

    def forward(self, x):
        return self.layers(x).square().mean()


def partition(joint, joint_inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **keywords):
    """Returns the halves of the joint graph, and prints the plan."""
    planned = autoremat.plan_joint(
        joint,
        joint_inputs,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices or (),
        options={"memory_budget": 0.5, "compiler": "aot_eager"},
    )
    print(planned.report.summary())
    return autoremat.apply_plan(planned)


def gradients(step, x):
    training.zero_grad()
    with autoremat.track_peak() as peak:
        step(x).backward()
    return [parameter.grad.clone() for parameter in training.parameters()], peak.bytes


torch.manual_seed(0)
training, x = Training(), torch.randn(4096, 128)
compiled = aot_module(training, fw_compiler=boxed_nop, partition_fn=partition)

expected, without = gradients(training, x)
gradients(compiled, x)  # the first call plans
found, peak = gradients(compiled, x)
assert all(map(torch.equal, found, expected))
print(f"eager {without / 2**20:.1f} MiB, planned {peak / 2**20:.1f} MiB, equal gradients")
