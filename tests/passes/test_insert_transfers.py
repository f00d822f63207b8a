"""Stays in code that runs: what is stored and loaded is bit by bit what was saved, at the peak that was planned."""

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import stays
import torch
from captured import Seen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import Outcome, differences, train_step
from random_modules import RandomModule, fresh_inputs
from strategies import GROUP, KINDS, Program, places_of, programs, systematic
from torch import Tensor, nn

import autoremat
from autoremat import PlanInvalid, host_memory, track_peak
from autoremat.basics.errors import find_cause
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Role, Transfer, Value
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

LEAST = 1
"""A budget that nothing fits: best effort then takes the plan of least memory."""


def compiled(function: Callable[..., Any], choose: stays.Choose, run: Callable[[Any], Any], **options: Any) -> tuple[Seen, Any]:
    """The plans and the compiled function, after one run of it by ``run``."""
    torch._dynamo.reset()
    fixed = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": LEAST, "on_infeasible": "best_effort"}
    caches = torch._inductor.config.patch(fx_graph_cache=False)
    with stays.staying(choose) as seen, caches, torch._functorch.config.patch(enable_autograd_cache=False):
        result = torch.compile(function, backend="autoremat", options=fixed | options)
        run(result)
    return seen, result


def outcome(program: Program, choose: stays.Choose, budget: float | int | None) -> tuple[Outcome, Seen]:
    """What a step of the program computes, the plans, and that the bytes that were moved are those of the plan."""
    torch.manual_seed(0)
    model = RandomModule(program)
    seen, function = compiled(model, choose, lambda f: train_step(f, model, fresh_inputs(), 0), memory_budget=budget)
    before = stays.statistics("cpu")
    found = train_step(function, model, fresh_inputs(), 1)
    moved, planned = stays.statistics("cpu"), stored_bytes(seen)
    assert moved.used_bytes == 0
    assert moved.to_host_bytes - before.to_host_bytes == planned
    assert moved.from_host_bytes - before.from_host_bytes == planned
    return found, seen


def stored_bytes(seen: Seen) -> int:
    return sum(plan.graph.values[stay.value].bytes for plan in seen.plans for stay in plan.schedule.stays)


def assert_exact(program: Program, seed: int, budget: float | int | None) -> Seen:
    expected, _ = outcome(program, stays.as_planned, budget)
    found, seen = outcome(program, stays.at_random(seed), budget)
    assert not differences(found, expected)
    return seen


GROUPS = [pytest.param(n, marks=[pytest.mark.slow] * (n // GROUP % 3)) for n in range(0, len(KINDS), GROUP)]
"""The first of each group of kinds; the quick tests run every third group."""


@pytest.mark.parametrize("start", GROUPS)
def test_every_kind_of_step_is_exact(start):
    for budget in (None, LEAST):
        seen = assert_exact(systematic(KINDS[start : start + GROUP], 1), start, budget)
        assert stored_bytes(seen) > 0


@pytest.mark.slow
@settings(max_examples=8, phases=tuple(phase for phase in Phase if phase is not Phase.shrink))
@given(programs(), st.integers(0, 99), st.sampled_from((None, 0.7, LEAST)))
def test_random_modules_are_exact(program, seed, budget):
    assert_exact(program, seed, budget)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x.view(8, 32, 32).transpose(0, 1)).transpose(0, 1).reshape(x.shape)
        return x.square().mean(), x.sin()


INPUT = functools.partial(torch.randn, 256, 32)


def step(function: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs and gradients of a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss, other = function(x)
    torch.autograd.backward((loss, other), (torch.ones(()), torch.ones_like(other)))
    return [loss.detach(), other.detach(), *(parameter.grad for parameter in model.parameters())]


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Blocks(), INPUT()


@pytest.mark.slow
@pytest.mark.parametrize(("choose", "budget"), [(stays.as_short_as_possible, LEAST), (stays.at_random(1), None)])
def test_code_computes_the_same_at_the_planned_peak(choose, budget):
    model, x = model_and_input()
    run = functools.partial(step, model=model, x=x)
    options = {"compiler": "inductor", "memory_budget": budget, "reorder_for_peak_memory": budget is not None}
    expected = run(compiled(model, stays.as_planned, run, **options)[1])
    seen, function = compiled(model, choose, run, **options)
    report = autoremat.reports()[-1]
    before = stays.statistics("cpu")
    with track_peak("cpu") as peak:
        found = run(function)
    moved = stays.statistics("cpu")
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference)
    assert peak.bytes == report.compiled_peak_bytes - report.code_headroom_bytes
    assert moved.to_host_bytes - before.to_host_bytes == moved.from_host_bytes - before.from_host_bytes > 0
    assert moved.to_host_bytes - before.to_host_bytes == stored_bytes(replace(seen, plans=seen.plans[-1:]))


def gradients_of(losses: list[Tensor], model: nn.Module, **keywords: bool) -> list[Tensor]:
    return [g for loss in losses for g in torch.autograd.grad(loss, list(model.parameters()), **keywords)]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def trained(request) -> Iterator[tuple[nn.Module, Callable[..., Any], int]]:
    """A model, its compiled form with stays, and the bytes that one call keeps on the host."""
    model, x = model_and_input()
    model.eval()
    run = functools.partial(step, model=model, x=x)
    with torch._functorch.config.patch(donated_buffer=False):  # torch then allows a second backward
        seen, function = compiled(model, stays.at_random(5), run, compiler=request.param, memory_budget=None)
        yield model, function, stored_bytes(replace(seen, plans=seen.plans[-1:]))


def bytes_on_host() -> tuple[int, int]:
    now = stays.statistics("cpu")
    return now.held_bytes, now.used_bytes


def test_a_graph_may_be_kept_for_a_second_backward(trained):
    model, function, size = trained
    loss, _ = function(INPUT())
    first = gradients_of([loss], model, retain_graph=True)
    assert bytes_on_host() == (size, size)
    second = gradients_of([loss], model)
    assert all(map(torch.equal, first, second))
    del loss
    assert bytes_on_host() == (size, 0)


def test_calls_in_flight_have_buffers_of_their_own(trained):
    model, function, size = trained
    inputs = [INPUT() for _ in range(3)]
    alone = [gradients_of([function(x)[0]], model) for x in inputs]
    assert bytes_on_host() == (size, 0)
    for _ in range(2):
        losses = [function(x)[0] for x in inputs]
        assert bytes_on_host() == (3 * size, 3 * size)
        together = [gradients_of([loss], model) for loss in losses]
        del losses
        assert bytes_on_host() == (3 * size, 0)
        assert all(all(map(torch.equal, *pair)) for pair in zip(alone, together, strict=True))


def test_many_steps_use_the_same_buffers(trained):
    model, function, size = trained
    x = INPUT()
    first = gradients_of([function(x)[0]], model)
    objects = len(weakref.finalize._registry)
    for _ in range(50):
        last = gradients_of([function(x)[0]], model)
    assert all(map(torch.equal, first, last))
    assert bytes_on_host() == (size, 0)
    assert len(weakref.finalize._registry) == objects


def masked(x: Tensor, y: Tensor) -> Tensor:
    """Two masks that the backward reads, one of them in another layout. Their numbers of elements are no multiples of 8."""
    first, second = x > 0.3, (y * 2 > 0).t().contiguous()
    return (torch.where(first, x * 3, 0.5) + torch.where(second.t(), y.exp(), x)).square().mean()


def masks_as_bits(graph: Graph, schedule: Schedule) -> Schedule:
    everything = build_schedule(graph, graph.forward_values)

    def stay(value: int) -> Stay:
        made, last_read, first_read = places_of(graph, everything, value)
        return Stay(value, "bits", made, last_read, first_read, first_read)

    chosen = sorted(v for v in everything.saved(graph) if graph.values[v].forms)
    return replace(everything, stays=tuple(map(stay, chosen)))


def with_bits(graph: Graph) -> Graph:
    """The graph, in which booleans may be packed."""

    def with_form(value: Value) -> Value:
        is_mask, at_once = value.role is Role.COMPUTED and value.bytes == 13 * 9, Transfer(Engine.COMPUTE, 0.0)
        return replace(value, forms=(Form("bits", at_once, at_once, -(-value.bytes // 8)),)) if is_mask else value

    return replace(graph, values=tuple(map(with_form, graph.values)))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_are_packed_as_bits(compiler):
    inputs = [torch.randn(13, 9, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(masked(*inputs), inputs)
    kept: list[int] = []

    def run(function: Callable[..., Any]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            loss = function(*inputs)
        found = torch.autograd.grad(loss, inputs)
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, reference)

    with mock.patch.object(stays, "with_host_forms", with_bits):
        seen, _ = compiled(masked, masks_as_bits, run, compiler=compiler, memory_budget=None)
    assert seen.plan.schedule.stays
    assert kept.count(-(-13 * 9 // 8)) == len(seen.plan.schedule.stays)
    assert 13 * 9 not in kept


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_may_change_from_call_to_call(compiler):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
    batches = [torch.randn(rows, 8) for rows in (24, 7, 16)]
    for batch in batches:
        torch._dynamo.mark_dynamic(batch, 0, min=2, max=32)
    options = {"compiler": compiler, "memory_budget": 2**20}
    seen, function = compiled(
        lambda x: model(x).square().mean(), stays.as_short_as_possible, lambda f: f(batches[0]), **options
    )
    for batch in batches:
        expected = gradients_of([model(batch).square().mean()], model)
        for ours, reference in zip(gradients_of([function(batch)], model), expected, strict=True):
            torch.testing.assert_close(ours, reference)
    assert len(seen.plans[-1].schedule.stays) > 0
    assert bytes_on_host()[0] == stored_bytes(replace(seen, plans=seen.plans[-1:]))


@pytest.mark.filterwarnings("ignore:host_memory has no effect on a graph")  # its forms come from the test
def test_a_stored_plan_is_carried_out_with_its_stays_where_the_graph_has_the_forms():
    model, x = model_and_input()
    run = functools.partial(step, model=model, x=x)
    seen, _ = compiled(model, stays.at_random(6), run)
    with host_memory.stand_in():
        again, _ = compiled(model, stays.as_planned, run, plan=seen.plan, host_memory="1GiB")
    assert again.plan.schedule == seen.plan.schedule
    assert stays.statistics("cpu").to_host_bytes == stored_bytes(seen) > 0
    with mock.patch.object(stays, "with_host_forms", lambda graph: graph), pytest.raises(Exception, match="has no form 'host'"):
        compiled(model, stays.as_planned, run, plan=seen.plan)


def test_a_wrapper_in_cpp_is_refused():
    model, x = model_and_input()
    run = functools.partial(step, model=model, x=x)
    with pytest.raises(Exception, match="does not go together with a wrapper in C") as caught:
        compiled(model, stays.as_short_as_possible, run, compiler="inductor", cpp_wrapper=True)
    assert find_cause(caught.value, PlanInvalid) is not None
