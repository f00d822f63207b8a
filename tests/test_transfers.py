"""Stays in code that runs: what is stored and loaded is bit by bit what was saved, at the peak that was planned."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import stays
import torch
from captured import Seen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import Outcome, differences, train_step
from random_modules import BATCH, SHAPE, TOKENS, VOCABULARY, RandomModule
from strategies import Program, programs
from test_exactness import GROUP, KINDS, systematic
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat import PlanInvalid, host_memory, track_peak
from autoremat.basics.errors import find_cause
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

LEAST = 1
"""A budget that nothing fits: best effort then takes the plan of least memory."""


def without_stays(_: Graph, schedule: Schedule) -> Schedule:
    return schedule


def compiled(function: Callable[..., Any], choose: stays.Choose, run: Callable[[Any], Any], **options: Any) -> tuple[Seen, Any]:
    """The plans and the compiled function, after one run of it by ``run``."""
    torch._dynamo.reset()
    fixed = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": LEAST, "on_infeasible": "best_effort"}
    caches = torch._inductor.config.patch(fx_graph_cache=False)
    with stays.staying(choose) as seen, caches, torch._functorch.config.patch(enable_autograd_cache=False):
        result = torch.compile(function, backend="autoremat", options=fixed | options)
        run(result)
    return seen, result


# -- uncompiled graphs -------------------------------------------------------------------------------------------------


def fresh_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x, y = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE, requires_grad=True)
    return x, y, torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def outcome(program: Program, choose: stays.Choose, budget: float | int | None) -> tuple[Outcome, Seen]:
    """What a step of the program computes, the plans, and that the bytes that were moved are those of the plan."""
    torch.manual_seed(0)
    model = RandomModule(program)
    seen, function = compiled(model, choose, lambda f: train_step(f, model, fresh_inputs(), 0), memory_budget=budget)
    before = host_memory.statistics("cpu")
    found = train_step(function, model, fresh_inputs(), 1)
    moved, planned = host_memory.statistics("cpu"), stored_bytes(seen)
    assert moved.used_bytes == 0
    assert moved.to_host_bytes - before.to_host_bytes == planned
    assert moved.from_host_bytes - before.from_host_bytes == planned
    return found, seen


def stored_bytes(seen: Seen) -> int:
    return sum(plan.graph.values[stay.value].bytes for plan in seen.plans for stay in plan.schedule.stays)


def assert_exact(program: Program, seed: int, budget: float | int | None) -> Seen:
    expected, _ = outcome(program, without_stays, budget)
    found, seen = outcome(program, stays.at_random(seed), budget)
    assert not differences(found, expected)
    return seen


@pytest.mark.parametrize("start", [pytest.param(n, marks=[pytest.mark.slow] * (n // GROUP % 3)) for n in range(0, len(KINDS), GROUP)])
def test_every_kind_of_step_is_exact(start):
    for budget in (None, LEAST):
        seen = assert_exact(systematic(KINDS[start : start + GROUP], 1), start, budget)
        assert stored_bytes(seen) > 0


@pytest.mark.slow
@settings(max_examples=16, phases=tuple(phase for phase in Phase if phase is not Phase.shrink))
@given(programs(), st.integers(0, 99))
def test_random_modules_are_exact(program, seed):
    for budget in (None, 0.7, LEAST):
        assert_exact(program, seed, budget)
