"""Plain Inductor with this package's partitioner: its own backend, caches and kernels, our choice of saved tensors."""

import torch
from torch import nn

import autoremat


def peak_of(model, x, **config):
    """Returns the gradients and the peak of a step that Inductor compiles with ``config``."""
    torch.compiler.reset()
    with torch._inductor.config.patch(config):
        step = torch.compile(lambda x: model(x).square().mean())
        for _ in range(2):  # the first step compiles
            model.zero_grad()
            with autoremat.track_peak() as peak:
                step(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], peak.bytes


torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())))
x = torch.randn(4096, 128)
expected, without = peak_of(model, x)
found, peak = peak_of(model, x, custom_partitioner_fn=autoremat.partitioner({"memory_budget": 0.6}))
for one, other in zip(found, expected, strict=True):
    torch.testing.assert_close(one, other)
print(f"plain Inductor {without / 2**20:.1f} MiB, with a partitioner for 0.6: {peak / 2**20:.1f} MiB, equal gradients")
