"""The emulated card itself: it counts memory as CUDA does, and its kernels agree with the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F


def test_memory_is_counted_in_blocks_of_512_bytes():
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(3, device="cuda")
    assert torch.cuda.memory_allocated() - before == 512
    torch.cuda.reset_peak_memory_stats()
    del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 512


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_the_named_kernel_and_its_gradients_are_right(kernel, causal, monkeypatch):
    monkeypatch.setenv("EMULATED_ATTENTION", kernel)
    operands = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    dtype = torch.bfloat16

    def step(device: str) -> list[torch.Tensor]:
        q, k, v = (x.to(device, dtype).requires_grad_() for x in operands)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if device == "cuda":
            assert kernel in type(result.grad_fn).__name__.lower()
        result.float().square().sum().backward()
        return [x.grad.float().cpu() for x in (q, k, v)]

    for found, wanted in zip(step("cuda"), step("cpu"), strict=True):
        assert float((found - wanted).norm()) <= 0.02 * float(wanted.norm())


def test_dropout_of_attention_is_the_same_in_the_backward():
    q = torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True)
    value = torch.eye(16, 8, device="cuda").expand(1, 2, 16, 8).requires_grad_()
    result = F.scaled_dot_product_attention(q, q.detach(), value, dropout_p=0.5)
    (of_value,) = torch.autograd.grad(result.sum(), value)
    kept = of_value.cpu()[..., 0]
    assert not torch.equal(kept, kept.clone().fill_(1.0))
    assert torch.allclose(result.detach().sum().cpu(), (kept[..., :8]).sum(), atol=1e-4)
