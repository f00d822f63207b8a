"""Saved tensors on the host, and layouts that Inductor chooses, on the emulated card: results, peaks, and copies."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import stays
import torch
from offload_cells import AMPLE, MODELS, STORES
from torch import Tensor, nn
from torch._inductor import scheduler
from torch.nn import functional as F

from autoremat.basics.errors import PlanInvalid, find_cause
from autoremat.host_memory import links, ops
from autoremat.planner.memory.allocations import ROUNDING as BLOCK
from emulated_cuda import card
from emulated_cuda.check_steps import block, images
from emulated_cuda.steps import ROUNDING, on_card, planned_step, relative_error

CARD = torch.device("cuda", 0)


@pytest.mark.parametrize(("store", "budget"), [("both", 0.55), ("bits", 0.8)])
def test_a_step_that_is_planned_with_forms_keeps_both_bounds(store, budget):
    model, x = MODELS["gated"]()
    module, inputs = on_card((model, (x,)))
    expected = planned_step(module, inputs, cost_model="roofline")
    host = {"host_memory": AMPLE} if "host" in STORES[store] else {}
    with stays.small_device():
        step = planned_step(module, inputs, cost_model="roofline", memory_budget=budget, store=STORES[store], **host)
    now = stays.statistics(CARD)
    assert relative_error(step.result.gradients, expected.result.gradients) <= 1e-5
    assert step.result.peak_bytes == step.replayed_bytes <= step.report.budget_bytes
    assert now.held_bytes == step.report.host_peak_bytes
    assert bool(now.to_host_bytes) is ("host" in STORES[store])
    assert set(STORES[store]) >= {stay.form for stay in step.report.plan.schedule.stays}


def test_streams_wait_for_each_other_and_nothing_else():
    log: list[str] = []
    link = links.Link(CARD)

    class Logged:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Logged") -> None:
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Any) -> None:
            log.append(f"{self.name} waits for an event")

        def record_event(self, event: Any) -> Any:
            log.append(f"{self.name} records an event")
            return event

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    link._to_host, link._from_host = Logged("to host"), Logged("from host")
    source = torch.randn(8, 8, device=CARD)
    with mock.patch.object(links, "compute_stream", return_value=Logged("compute")):
        host = link.copy_to_host(source, 256)
        link.wait_for_copy_to_host(host)
        back = link.copy_from_host(host)
        link.wait_for_copy_from_host(back, host)
    assert torch.equal(back, source)
    assert log == [
        "to host waits for compute", "to host waits for an event", "to host records an event", "compute waits for an event",
        "from host waits for compute", "from host waits for an event", "from host records an event",
        "compute waits for an event",
    ]  # fmt: skip


def test_what_was_loaded_for_a_backward_that_failed_is_kept_until_its_copy_is_complete():
    source = torch.randn(64, device=CARD)
    host = ops.wait_for_copy_to_host(ops.copy_to_host(source, source.nbytes), source)
    live = torch.cuda.memory_allocated()
    ops.copy_from_host(host, CARD)
    assert torch.cuda.memory_allocated() > live
    del host
    ops.copy_to_host(source, source.nbytes)
    assert torch.cuda.memory_allocated() == live


def test_cuda_graphs_are_refused():
    module, inputs = on_card(block(0.0))
    with stays.staying(stays.as_short_as_possible), pytest.raises(Exception, match="CUDA graphs") as caught:
        planned_step(module, inputs, memory_budget=0.9, **{"triton.cudagraphs": True})
    assert "reduce-overhead" in str(find_cause(caught.value, PlanInvalid))


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
    ("built", "dtype", "kernel", "layouts"),
    [
        (functools.partial(block, 0.3), torch.float32, "cudnn", contextlib.nullcontext),
        pytest.param(images, torch.float32, "cudnn", contextlib.nullcontext, marks=pytest.mark.slow),
        (rotated, torch.bfloat16, "cudnn", unkind_layouts),
        pytest.param(rotated, torch.float16, "flash", unkind_layouts, marks=pytest.mark.slow),
        pytest.param(rotated, torch.float32, "efficient", unkind_layouts, marks=pytest.mark.slow),
        pytest.param(lambda: rotated(norm=True), torch.bfloat16, "cudnn", unkind_layouts, marks=pytest.mark.slow),
        pytest.param(odd, torch.float32, "cudnn", unkind_layouts, marks=pytest.mark.slow),
        pytest.param(images, torch.float32, "cudnn", unkind_layouts, marks=pytest.mark.slow),
        pytest.param(channels_last, torch.float32, "cudnn", unkind_layouts, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_stays_has_the_replayed_peak_and_the_layouts_of_saved_tensors(built, dtype, kernel, layouts, monkeypatch):
    monkeypatch.setenv(card.ATTENTION_VARIABLE, kernel)
    module, inputs = on_card(built(), dtype)
    with stays.staying(stays.as_planned):
        expected = planned_step(module, inputs, cost_model="roofline").result.gradients
    for choose in (stays.as_short_as_possible, stays.at_random(1)):
        with layouts(), stays.staying(choose) as seen:
            step = planned_step(module, inputs, cost_model="roofline")
        assert relative_error(step.result.gradients, expected) <= ROUNDING[dtype]
        assert step.result.peak_bytes == step.replayed_bytes
        now, planned = stays.statistics(CARD), [seen.plan.graph.values[s.value].bytes for s in seen.plan.schedule.stays]
        # A copy of what is stored, in another layout, would lie in other memory of the host.
        assert (now.held_bytes, now.used_bytes) == (sum(planned), 0)
        assert now.to_host_bytes == now.from_host_bytes
        # Two steps ran. The plan counts what the allocator rounds up.
        assert 2 * (sum(planned) - len(planned) * BLOCK) < now.to_host_bytes <= 2 * sum(planned)


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
