"""Layouts that Inductor chooses: attention reads its operands, and stored tensors are moved as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import stays
import torch
from torch import Tensor, nn
from torch._inductor import scheduler
from torch.nn import functional as F

from autoremat import host_memory
from emulated_cuda import card
from emulated_cuda.cells import ROUNDING
from emulated_cuda.check_steps import images
from emulated_cuda.steps import on_card, planned_step, relative_error

CARD = torch.device("cuda", 0)


@contextlib.contextmanager
def unkind_layouts() -> Iterator[None]:
    """Reverses what Inductor's heuristic says of layouts and loops. Nothing may depend on it but speed."""
    kind: Callable[..., list[int]] = scheduler.pick_loop_order

    def unkind(strides: Sequence[Sequence[int]], sizes: Sequence[Any], priorities: Sequence[int] = ()) -> list[int]:
        return kind(strides, sizes, priorities)[::-1]

    with mock.patch.object(scheduler, "pick_loop_order", unkind):
        yield


class Rotated(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm, self.project, self.out = norm, nn.Linear(64, 128, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        def heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (-1, 16)).transpose(1, 2)

        def rotated(tensor: Tensor) -> Tensor:
            first, second = tensor.chunk(2, -1)
            return tensor * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

        query, key, value = map(heads, self.project(x).split((64, 32, 32), -1))
        query, key, value = rotated(query), *(t.repeat_interleave(2, 1) for t in (rotated(key), value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        loss = (x + self.out(mixed.transpose(1, 2).flatten(2))).float().square().mean()
        return loss + query.float().pow(4).mean() if self.norm else loss


def rotated(norm: bool = False) -> Any:
    torch.manual_seed(0)
    return Rotated(norm), (torch.randn(2, 64, 64), torch.randn(64, 16))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 1100), nn.Linear(1100, 1031), nn.Linear(1031, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin()
        hidden = self.second(hidden).tanh() * hidden[:, :1031].sigmoid()
        return self.third(hidden.sin()).square().mean()


def odd() -> Any:
    torch.manual_seed(0)
    return Odd(), (torch.randn(64, 32),)


def channels_last() -> Any:
    module, (image, label) = images()
    return module.to(memory_format=torch.channels_last), (image.to(memory_format=torch.channels_last), label)


@pytest.mark.parametrize(
    ("built", "dtype", "kernel"),
    [
        (rotated, torch.bfloat16, "cudnn"),
        pytest.param(rotated, torch.float16, "flash", marks=pytest.mark.slow),
        pytest.param(rotated, torch.float32, "efficient", marks=pytest.mark.slow),
        pytest.param(lambda: rotated(norm=True), torch.bfloat16, "cudnn", marks=pytest.mark.slow),
        pytest.param(odd, torch.float32, "cudnn", marks=pytest.mark.slow),
        pytest.param(images, torch.float32, "cudnn", marks=pytest.mark.slow),
        pytest.param(channels_last, torch.float32, "cudnn", marks=pytest.mark.slow),
    ],
)
def test_stored_tensors_keep_the_layouts_of_saved_ones(built, dtype, kernel, monkeypatch):
    monkeypatch.setenv(card.ATTENTION_VARIABLE, kernel)
    module, inputs = on_card(built(), dtype)
    with stays.staying(lambda _, schedule: schedule):
        expected = planned_step(module, inputs, cost_model="roofline").result.gradients
    for choose in (stays.as_short_as_possible, stays.at_random(1)):
        with unkind_layouts(), stays.staying(choose) as seen:
            step = planned_step(module, inputs, cost_model="roofline")
        assert relative_error(step.result.gradients, expected) <= ROUNDING[dtype]
        assert step.result.peak_bytes == step.replayed_bytes
        # A copy of what is stored, in another layout, would lie in other memory of the host.
        assert host_memory.statistics(CARD).held_bytes == sum(
            seen.plan.graph.values[s.value].bytes for s in seen.plan.schedule.stays
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recompute=")  # of the loss, which the pattern matches too
def test_attention_reads_tensors_that_are_computed_again():
    module, inputs = on_card(rotated(norm=True), torch.bfloat16)
    expected = planned_step(module, inputs, cost_model="roofline")
    with unkind_layouts():
        step = planned_step(
            module, inputs, cost_model="roofline", policy="full", recompute=["*add*", "*mul*", "*cat*", "*cos*", "*sin*"]
        )
    assert step.report.recomputed_ops
    assert relative_error(step.result.gradients, expected.result.gradients) <= ROUNDING[torch.bfloat16]
    assert step.result.peak_bytes == step.replayed_bytes
