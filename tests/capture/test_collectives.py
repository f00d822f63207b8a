"""Collectives run twice where the model orders it, as under torch. One process is its own world; others are pretended."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from oracles import same_bits
from processes import group_of
from test_gathers import IGNORED_WARNINGS, LEAST, NAMESPACE, Step, inputs, planned_calls, run
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat import Report
from autoremat.basics.errors import ConstraintWarning
from autoremat.compiler.peers import Peers
from autoremat.planner.graph.op import Constraint, Op, Trait
from autoremat.report.decisions import Decision, Reason

pytestmark = IGNORED_WARNINGS

Gather = Callable[[Tensor], Tensor]
GATHERS: dict[str, Gather] = {
    "all_gather": lambda w: functional.all_gather_tensor_autograd(w, 0, dist.group.WORLD),
    "all_reduce": lambda w: functional.all_reduce(w, "sum", dist.group.WORLD),
    "all_to_all": lambda w: functional.all_to_all_single_autograd(w, None, None, dist.group.WORLD),
}


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with group_of():
        yield


def in_region(gather: Gather, region: str) -> Gather:
    """``gather`` in a checkpoint region, in one with a policy (as SimpleFSDP reshards after the forward), or in none."""
    if region == "none":
        return gather
    arguments: dict[str, object] = {"use_reentrant": False}
    if region == "policy":
        arguments["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE
        )
    return lambda w: checkpoint(gather, w, **arguments)


def step(gather: Gather) -> Step:
    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ gather(w))
        return x.square().mean()

    return loss


@functools.cache
def by_torch(collective: str, region: str) -> tuple[list[Tensor], list[str]]:
    """The gradients of the step and the collectives that ran, by torch's debugging backend."""
    return run(step(in_region(GATHERS[collective], region)), inputs(1, layers=3), backend="aot_eager")


def planned(gather: Gather, **options: object) -> tuple[list[Tensor], list[str], Report]:
    gradients, names = run(step(gather), inputs(1, layers=3), backend="autoremat", options=LEAST | options)
    return gradients, names, autoremat.reports()[-1]


forgets_the_order = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="this torch forgets the order of a region without a policy inside an autograd function",
)


@pytest.mark.parametrize("region", ["policy", pytest.param("checkpoint", marks=forgets_the_order)])
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "all_to_all"])
def test_a_collective_that_the_model_recomputes_runs_as_often_as_under_torch(collective, region):
    expected, under_torch = by_torch(collective, region)
    gradients, names, report = planned(in_region(GATHERS[collective], region))
    assert all(same_bits(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    called = [value for value in report.values if value.op.startswith(NAMESPACE)]
    assert Counter(names) == Counter(under_torch)
    assert Counter(under_torch) != Counter(by_torch(collective, "none")[1])
    assert {(value.decision, value.reason) for value in called} == {(Decision.RECOMPUTED, Reason.CONSTRAINT)}
    assert names == planned_calls(report)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes other ranks exist, without an agreement with them."""
    monkeypatch.setattr(Peers, "may_repeat_collectives", False)


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_a_collective_that_nobody_orders_runs_once(others, collective):
    _, names, report = planned(GATHERS[collective])
    assert Counter(names) == Counter(by_torch(collective, "none")[1])
    assert report.recomputed_ops > 0


def test_even_alone_only_gathers_run_again():
    _, names, report = planned(GATHERS["all_to_all"])
    assert Counter(names) == Counter(by_torch("all_to_all", "none")[1])
    assert report.recomputed_ops > 0


def test_a_pattern_does_not_make_a_collective_run_twice(others):
    with pytest.warns(ConstraintWarning, match=r"may not run twice \(collective\)"):
        _, names, _ = planned(GATHERS["all_gather"], recompute=("*all_gather*",))
    assert Counter(names)[f"{NAMESPACE}::all_gather_into_tensor"] == 3


@pytest.mark.parametrize("other", [Trait.NONE, Trait.MUTATING, Trait.OPAQUE, Trait.READS_MUTATED_INPUT])
@pytest.mark.parametrize("order", Constraint)
def test_only_communication_is_repeatable_by_order(order, other):
    op = Op("gather", "t", (), (), True, traits=Trait.COLLECTIVE | other, constraint=order)
    assert op.rematerializable == (order is Constraint.RECOMPUTE and other is Trait.NONE)
