"""Budgets under data parallelism: buckets of ``DistributedDataParallel`` share one, and ``fully_shard`` frees parameters."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from block_models import MeanSquare
from oracles import same_bits
from processes import group_of, run_ranks
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, find_cause
from autoremat.planner.multigraph.ledger import Border, Part, moments_of

# Dynamo looks at `.grad` of what it is handed after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

EAGER = {"compiler": "aot_eager"}
WIDTH, ROWS = 256, 512

LEAST_USED = 0.8
"""Share of a budget that a step uses at least. A small step has few plans, and the next one needs more than the budget."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + torch.tanh(self.down(hidden * torch.sigmoid(torch.exp(-hidden * hidden))))


def Layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return MeanSquare(*(Layer() for _ in range(count)))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()


def measured(step: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Returns the least peak of five steps that are compiled, and the gradients."""
    peaks = []
    for number in range(8):
        step.zero_grad(set_to_none=True)
        if number < 3:  # compiles; the wrapper allocates its buckets anew after the first backward
            step(x).backward()
            continue
        with autoremat.track_peak("cpu") as peak:
            step(x).backward()
        peaks.append(peak.bytes)
    return min(peaks), [local(p.grad) for p in step.parameters()]


def with_ddp(views: bool, **arguments: Any) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(DistributedDataParallel(Layers(2), bucket_cap_mb=1, gradient_as_bucket_view=views), **arguments)


def planned_ddp(views: bool, budget: object, **options: object) -> nn.Module:
    return with_ddp(views, backend="autoremat", options={**EAGER, "memory_budget": budget, **options})


def with_fsdp(whole: bool, reshard: bool = True, mixed: bool = False, **arguments: Any) -> nn.Module:
    torch.compiler.reset()
    model = Layers(2)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.layers:
        if not whole:
            layer.compile(**arguments)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if whole:
        model.compile(**arguments)
    return model


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of():
        yield


@pytest.mark.slow
def test_an_infeasible_budget_names_the_minimum_of_all_buckets(one_rank):
    with pytest.raises(Exception, match="buckets of DistributedDataParallel together") as caught:
        planned_ddp(False, 1000)(batch())
    error = find_cause(caught.value, BudgetInfeasible)
    assert error is not None
    peak, _ = measured(planned_ddp(False, error.minimum_bytes), batch())
    assert LEAST_USED * error.minimum_bytes <= peak <= error.minimum_bytes


def test_the_best_effort_warns_once_for_all_buckets(one_rank):
    with pytest.warns(BudgetWarning, match=r"buckets of DistributedDataParallel\) need") as caught:
        planned_ddp(False, 1000, on_infeasible="best_effort")(batch()).backward()
    assert sum("DistributedDataParallel" in str(one.message) for one in caught) == 1


@dataclass(frozen=True)
class Trained:
    """A step of one rank under a budget."""

    peak: int
    budget: int
    same_bits: bool
    """True if the gradients have the bits of a step without a budget, or under Inductor its values."""
    notes: tuple[str, ...] = ()
    """The notes of the reports."""


def check(results: list[Trained]) -> None:
    """Asserts that each rank uses its budget and keeps it."""
    for one in results:
        assert LEAST_USED * one.budget <= one.peak <= one.budget
        assert one.same_bits


def train_ddp(rank: int, views: bool) -> Trained:
    torch.set_num_threads(1)
    plain, expected = measured(with_ddp(views, backend="aot_eager"), batch(rank))
    budget, before = int(0.85 * plain), len(autoremat.reports())
    peak, found = measured(planned_ddp(views, budget), batch(rank))
    notes = tuple(report.notes[0] for report in autoremat.reports()[before:])
    return Trained(peak, budget, all(map(same_bits, found, expected)), notes)


SHARDED = {
    "by layer": {"whole": False, "reshard": True, "mixed": False},
    "by layer, not freed": {"whole": False, "reshard": False, "mixed": False},
    "by layer, in two types": {"whole": False, "reshard": True, "mixed": True},
    "whole, in two types": {"whole": True, "reshard": True, "mixed": True},
}
"""Ways to compile and shard a model."""


def in_all_ways(rank: int) -> dict[str, Trained]:
    """Trains in all ways, because a process costs more than a step."""
    by_ddp = {"views": train_ddp(rank, True), "no views": train_ddp(rank, False)}
    return by_ddp | {name: train_fsdp(rank, **way) for name, way in SHARDED.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Trained]]:
    return run_ranks(in_all_ways, 2, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["views", "no views", *SHARDED])
def test_every_rank_keeps_its_budget(ranks, way):
    check([rank[way] for rank in ranks])
    for notes in (rank[way].notes for rank in ranks):
        count = len(notes)
        assert count > 3 or way in SHARDED
        assert [note.partition(" of Dist")[0] for note in notes] == [f"bucket {n + 1} of {count}" for n in range(count)]


def train_ddp_by_inductor(rank: int) -> Trained:
    """Trains three layers under a budget that plain Inductor exceeds."""
    torch.set_num_threads(1)
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(rank))

    def step(**arguments: Any) -> tuple[int, list[Tensor]]:
        torch.compiler.reset()
        model = Layers(0)
        model.layers.extend(one for _ in range(3) for one in (nn.Linear(512, 512), nn.GELU()))
        return measured(torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **arguments), x)

    plain, expected = step()
    budget = int(0.85 * plain)
    peak, found = step(backend="autoremat", options={"memory_budget": budget, "compiler": "inductor"})
    torch.testing.assert_close(found, expected)
    return Trained(peak, budget, same_bits=True)


@pytest.mark.slow
def test_every_rank_keeps_a_budget_under_inductor_that_plain_inductor_exceeds():
    check(run_ranks(train_ddp_by_inductor, 2, timeout=600))


def test_the_ledger_counts_a_border_once_whoever_holds_it():
    borders = (Border(10, 0, (1,), gradient_bytes=10), Border(1, 1, (), leaves=True, gradient_bytes=1))
    parts = (Part(0, 10, 3, keeps=Counter([0])), Part(1, 1, 5, keeps=Counter([0])))
    forward0, forward1, between, backward1, after1, backward0, after0 = moments_of(parts, borders)
    assert (forward0.base_bytes, forward0.open, forward0.running) == (0, (), 0)
    assert (forward1.base_bytes, forward1.open) == (0, (0,))  # graph 0 counts the border
    assert (between.base_bytes, between.open) == (10 - 20 + 1, (0, 1))  # both count it; the caller holds the loss
    assert (backward1.base_bytes, backward1.open) == (1 - 1 - 10, (0,))  # its output is live once, and so is the border
    assert after1.base_bytes == 1 + 5 + 10  # the loss, finished gradients, the gradient for graph 0
    assert (backward0.base_bytes, backward0.open) == (1 - 10 + 5, ())  # the border is its output, which it counts
    assert after0.base_bytes == 1 + 5 + 3


def test_the_caller_holds_the_gradient_of_a_loss_to_the_end_of_the_backward():
    borders = (Border(10, 0, (1,), gradient_bytes=10), Border(1, 1, (), leaves=True, gradient_bytes=1, given_bytes=1))
    *_, backward1, after1, backward0, after0 = moments_of((Part(0, 10, keeps=Counter([0])), Part(1, 1)), borders)
    assert backward1.base_bytes == 1 - 1  # the plan counts its output and the gradient that it receives
    assert after1.base_bytes == 2 + 10
    assert (backward0.base_bytes, after0.base_bytes) == (2 - 10, 2)


def test_a_gradient_with_several_readers_waits_for_the_first_of_them():
    borders = (Border(10, 0, (1, 2), gradient_bytes=10),)
    moments = moments_of((Part(0), Part(1), Part(2)), borders)
    base = {(m.running, m.backward): m.base_bytes for m in moments if m.running is not None}
    assert base[1, False] == base[2, False] == 10  # held for the graphs that receive it
    assert base[2, True] == 0
    assert base[1, True] == 10  # the gradient from graph 2
    assert base[0, True] == 0  # it is the tangent, which the plan counts


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.bfloat16() @ self.weight.bfloat16().t().contiguous()).float().tanh()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_copy_of_a_sharded_parameter_is_not_saved(one_rank, sharded):
    model, before = nn.Sequential(Cast(), Cast()), len(autoremat.reports())
    for layer in (*model, model) if sharded else ():
        fully_shard(layer)
    model.compile(backend="autoremat", options=EAGER)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    sizes = [tensor.bytes for report in autoremat.reports()[before:] for tensor in report.saved]
    assert (2 * WIDTH * WIDTH in sizes) is not sharded


def test_a_profile_counts_the_gradients_of_shards_and_drops_them(one_rank):
    model = with_fsdp(True, backend="autoremat", options=EAGER)
    profile = autoremat.profile_step(model, batch(), options=EAGER)
    assert all(parameter.grad is None for parameter in model.parameters())
    at_the_end = profile.step.moments[-1]
    assert at_the_end.running is None
    assert at_the_end.base_bytes >= sum(p.numel() * p.element_size() for p in model.parameters())


def train_fsdp(rank: int, whole: bool, reshard: bool, mixed: bool) -> Trained:
    torch.set_num_threads(1)
    x = batch(rank)
    _, expected = measured(with_fsdp(whole, reshard, mixed, backend="aot_eager"), x)
    model = with_fsdp(whole, reshard, mixed, backend="autoremat", options=EAGER)
    unbounded = autoremat.profile_step(model, x, options=EAGER)
    # Halfway, because a thread of gloo may hold a large buffer for a moment while the step is profiled.
    profile = unbounded.within((unbounded.minimum_peak_bytes + unbounded.baseline_peak_bytes) // 2)
    budget = int(profile.budget_bytes or 0)
    options = {**EAGER, "memory_budget": profile}
    peak, found = measured(with_fsdp(whole, reshard, mixed, backend="autoremat", options=options), x)
    return Trained(peak, budget, all(map(same_bits, found, expected)))
