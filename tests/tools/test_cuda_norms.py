"""The root-mean-square norm that is planned for CUDA devices where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoremat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def powers(image: Tensor, weight: Tensor | None, device: str | None) -> int:
    """The number of powers in the graph of a norm and of the mean of its squares."""

    def step(image: Tensor) -> Tensor:
        return nn.functional.rms_norm(image, [8], weight).square().mean()

    return [op.target for op in autoremat.explain(step, image, device=device).plan.graph.ops].count("aten.pow.Tensor_Scalar")


def image(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("weight", [None, torch.ones(8)])
def test_the_backward_of_the_card_reads_the_saved_deviation(weight):
    assert powers(image(4, 8), weight, device="H100-80GB") < powers(image(4, 8), weight, device=None)


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_where_cuda_has_no_kernel_the_norm_is_taken_apart():
    last = image(2, 3, 4, 8).detach().to(memory_format=torch.channels_last).requires_grad_()
    other_type = torch.ones(8, dtype=torch.float64)
    assert powers(last, None, device="H100-80GB") == powers(last, None, device=None)
    assert powers(image(4, 8), other_type, device="H100-80GB") == powers(image(4, 8), other_type, device=None)
