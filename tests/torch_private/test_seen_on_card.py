"""Tensors of the CPU that stand for a card's: decompositions and Inductor's patterns act as on the card, ops on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from emulated_cuda.small_steps import Norms
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autoremat
from autoremat.torch_private.seen_on_card import decided_as_on_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def ops(step: nn.Module, *inputs: torch.Tensor, device: str | None) -> list[str]:
    return [op.target for op in autoremat.explain(step, *inputs, device=device).plan.graph.ops]


def test_a_norm_is_scaled_after_it_is_centred_on_the_card():
    step, x = Norms(), torch.randn(2, 4, 8, 8, requires_grad=True)
    assert ops(step, x, device=None).count("aten.neg.default") > ops(step, x, device="H100-80GB").count("aten.neg.default")


def test_a_decomposition_finds_the_card_and_makes_tensors_of_the_cpu():
    found: list[tuple[torch.device, bool]] = []

    def gelu(x, approximate="none"):
        found.append((x.device, x.is_cuda))
        return x * torch.ones(x.shape, device=x.device) + torch.zeros_like(x)

    with FakeTensorMode(), decided_as_on_card():
        x = torch.empty(4)
        traced = make_fx(nn.GELU(), decomposition_table={torch.ops.aten.gelu.default: gelu})(x)
        assert (x.device.type, x.is_cuda) == ("cpu", False)
    assert found == [(torch.device("cuda", 0), True)]
    called = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert len(called) == 4
    assert {node.meta["val"].device.type for node in called} == {"cpu"}
    assert {node.kwargs.get("device", torch.device("cpu")).type for node in called} == {"cpu"}


def test_other_threads_find_the_cpu_and_nothing_stays_changed():
    def attributes():
        return vars(FakeTensor)["device"], vars(FakeTensor).get("is_cuda")

    before, found = attributes(), []

    def decompose(x):
        def look():
            found.append(x.device.type)

        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return x * 2

    with FakeTensorMode(), decided_as_on_card():
        make_fx(torch.relu, decomposition_table={torch.ops.aten.relu.default: decompose})(torch.empty(4))
    assert found == ["cuda", "cpu"]
    assert attributes() == before
