"""Recomputation changes no bit of random modules under several budgets, against torch's graphs that save everything."""

import functools
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import NO_RECOMPUTATION, Outcome, differences, measured_step, train_step
from random_modules import FUNCTIONS, RandomModule, fresh_inputs
from strategies import GROUP, KINDS, Program, Step, programs, systematic

import autoremat
from autoremat import Report

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

LEAST = 1
"""A budget that nothing fits: best effort then takes the plan of least memory."""

WHILE_COMPILING = tuple(phase for phase in Phase if phase is not Phase.shrink)
"""A failing program is readable as it is; making it smaller would take minutes of compiling."""

GROUPS = [pytest.param(n, marks=[pytest.mark.slow] * (n // GROUP % 2)) for n in range(0, len(KINDS), GROUP)]
"""The first of each group of kinds; the quick tests run every second group."""

CHOICES = (0, *(pytest.param(choice, marks=pytest.mark.slow) for choice in (1, 2)))
"""Variants of the steps; the quick tests run one."""


def compiled_module(program: Program, backend: str, **arguments: object):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = RandomModule(program)
    return model, torch.compile(model, backend=backend, fullgraph=True, **arguments)


def two_steps(model: torch.nn.Module, compiled) -> list[Outcome]:
    """The second step sees the buffers that the first one left."""
    return [train_step(compiled, model, fresh_inputs(), seed) for seed in (1, 2)]


def planned(program: Program, budget: float | int | None):
    """(outcomes, report, model, compiled) of the program under a budget, as close to it as can be."""
    options = {"memory_budget": budget, "compiler": "aot_eager", "on_infeasible": "best_effort"}
    model, compiled = compiled_module(program, "autoremat", options=options)
    return two_steps(model, compiled), autoremat.reports()[-1], model, compiled


def assert_same(found: list[Outcome], expected: list[Outcome], report: Report) -> None:
    for step, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        assert not differences(ours, reference), f"budget {report.budget_bytes}, step {step}, {report.summary()}"


@functools.cache
def at_least(start: int, choice: int) -> tuple[list[Outcome], Report]:
    """Outcomes and report of so many kinds of steps from ``start``, at the least budget."""
    return planned(systematic(KINDS[start : start + GROUP], choice), LEAST)[:2]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("start", GROUPS)
def test_every_kind_of_step_is_exact(start, choice):
    expected = two_steps(*compiled_module(systematic(KINDS[start : start + GROUP], choice), NO_RECOMPUTATION))
    found, least = at_least(start, choice)
    assert_same(found, expected, least)
    assert least.recomputed_ops > 0


@pytest.mark.slow
@settings(max_examples=16, phases=WHILE_COMPILING)
@given(programs(), st.sampled_from((None, 0.6, LEAST)))
def test_random_modules_are_exact_at_every_budget(program, budget):
    found, report, _, _ = planned(program, budget)
    assert_same(found, two_steps(*compiled_module(program, NO_RECOMPUTATION)), report)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("start", range(0, len(KINDS), 2 * GROUP))
def test_eager_autograd_agrees(start, choice):
    torch.manual_seed(0)
    model = RandomModule(systematic(KINDS[start : start + GROUP], choice))
    expected = two_steps(model, model)
    found, _ = at_least(start, choice)
    for ours, eager in zip(found, expected, strict=True):
        for name, tensor in eager.items():
            torch.testing.assert_close(ours[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=8, phases=WHILE_COMPILING)
@given(programs(max_outputs=0), st.sampled_from([0.9, 0.7, 0.5]))
def test_measured_peak_of_random_modules_is_within_the_budget(program, share):
    check_peak(program, share)


@pytest.mark.parametrize("start", GROUPS)
def test_measured_peak_of_every_kind_of_step_is_within_the_budget(start):
    check_peak(Program(systematic(KINDS[start : start + GROUP], 1).steps), 0.7)


def check_peak(program: Program, share: float) -> None:
    """The measured peak is within the budget; if that is infeasible, within the least that was said to be feasible."""
    _, report, model, compiled = planned(program, share)
    assert report.budget_bytes == math.floor(share * report.reference_bytes + 1e-6)
    measured = measured_step(compiled, model, fresh_inputs())
    assert measured <= (report.budget_bytes if report.fits else report.minimum_peak_bytes), report.summary()
    assert report.fits == (report.minimum_peak_bytes <= report.budget_bytes)


@pytest.mark.parametrize("budget", [1.0, None])
def test_measured_peak_without_need_to_recompute(budget):
    program = Program(tuple(Step("linear" if i % 2 else "gelu", i + 2, 0, i % 3) for i in range(8)))
    _, report, model, compiled = planned(program, budget)
    measured = measured_step(compiled, model, fresh_inputs())
    assert report.lower_bound_bytes <= report.predicted_peak_bytes
    assert measured <= report.predicted_peak_bytes <= report.baseline_peak_bytes


def test_the_strategy_has_a_function_for_every_step():
    own = {"linear", "tied", "embed", "batch_norm", "layer_norm", "convolve", "average_", "gather", "checkpoint"}
    assert set(KINDS) == own | set(FUNCTIONS)
