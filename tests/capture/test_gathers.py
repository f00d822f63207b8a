"""An all-gather with its wait is one op: it is priced by its bytes, and runs again where that is cheaper than its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathering_steps import (
    COALESCED,
    FAST,
    GATHER,
    IGNORED_WARNINGS,
    LAYERS,
    LEAST,
    MANY_ROWS,
    NAMESPACE,
    WIDTH,
    GatherTwo,
    Step,
    again,
    captured,
    coalesced_step,
    collectives,
    explained,
    inputs,
    measured_peaks,
    planned_calls,
    run,
    sharded_step,
)
from oracles import same_bits
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.planner.graph.op import Trait
from autoremat.planner.search.planner import Planner
from autoremat.report.report import Report

pytestmark = IGNORED_WARNINGS


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of as many ranks as the parameter says: of gloo for one, else without the others."""
    ranks: int = request.param
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    yield ranks
    dist.destroy_process_group()


def in_world(*ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", ranks, indirect=True)


@in_world(64)
def test_a_gather_is_priced_by_the_bytes_that_it_sends(world):
    graph = captured(sharded_step, *inputs(world), interconnect_bandwidth=1e6, interconnect_latency=0.5).graph
    gathers = [op for op in graph.ops if op.target == GATHER]
    assert len(gathers) == LAYERS
    assert not [op for op in graph.ops if "wait_tensor" in op.target]
    for op in gathers:
        assert [graph.values[v].bytes for v in op.outputs] == [2 * WIDTH * WIDTH]
        assert op.seconds == pytest.approx(0.5 + 2 * WIDTH * WIDTH * (world - 1) / world / 1e6)
        assert op.traits is Trait.GATHER
        assert op.rematerializable
    scatters = [op for op in graph.ops if "reduce_scatter" in op.target]
    assert {op.seconds for op in scatters} == {gathers[0].seconds}
    assert {op.rematerializable for op in scatters} == {False}


def awaited_twice(x: Tensor, shard: Tensor) -> Tensor:
    gathered = collectives.all_gather_into_tensor(shard, 2, dist.group.WORLD.group_name)
    return (x @ (collectives.wait_tensor(gathered) + collectives.wait_tensor(gathered.view(-1)).view(WIDTH, WIDTH))).mean()


def read_before_the_wait(x: Tensor, shard: Tensor) -> Tensor:
    gathered = collectives.all_gather_into_tensor(shard, 2, dist.group.WORLD.group_name)
    return (x @ (collectives.wait_tensor(gathered) * gathered.sin())).exp().mean()


@in_world(2)
@pytest.mark.parametrize("step", [awaited_twice, read_before_the_wait])
def test_a_gather_that_others_read_stays_apart_from_its_wait_and_runs_once(world, step):
    x, shard = inputs(2)[:2]
    priced = captured(step, x, shard.detach())
    assert [op.rematerializable for op in priced.graph.ops if NAMESPACE in op.target] == [False] * (2 + (step is awaited_twice))
    assert not priced.gathering_ranks


@in_world(2)
def test_no_gather_runs_again_where_other_ranks_may_plan_otherwise(world):
    priced = captured(sharded_step, *inputs(2))
    assert priced.gathering_ranks == {0, 1}
    once = priced.with_gathers_once()
    assert not once.gathering_ranks
    assert not [op for op in once.graph.ops if op.target == GATHER and op.rematerializable]
    assert [op.seconds for op in once.graph.ops] == [op.seconds for op in priced.graph.ops]


@in_world(2)
def test_a_gather_that_the_model_saves_is_saved(world):
    def must_save(*_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def step(x: Tensor, *shards: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, must_save)
        return checkpoint(sharded_step, x, *shards, use_reentrant=False, context_fn=contexts)

    assert not again(explained(step, *inputs(2), **LEAST))
    assert GATHER in again(explained(sharded_step, *inputs(2), **LEAST))


@in_world(64)
def test_tighter_budgets_gather_more_and_faster_links_cost_less(world):
    tensors, added = inputs(world, layers=8), {}
    for rate in (1e9, 1e10):
        planner = Planner(captured(sharded_step, *tensors, interconnect_bandwidth=rate).graph)
        most, least = planner.baseline.peak_bytes, planner.search.smallest.peak_bytes
        plans = [planner.find(budget).plan for budget in (most, (most + least) // 2, least)]
        repeated = [sum(planner.graph.ops[index].target == GATHER for index in plan.recomputed) for plan in plans]
        assert 0 == repeated[0] < repeated[1] < repeated[2]
        added[rate] = plans[1].cost_seconds
    assert added[1e9] > added[1e10]


def repeated(step: Step, expected_of: Step, gather: str) -> tuple[Report, list[str]]:
    """The report of ``step`` with the least memory, which repeats ``gather`` alone, and the collectives that ran."""
    tensors = inputs(1, rows=MANY_ROWS)
    expected, _ = run(expected_of, tensors, backend="aot_eager")
    gradients, names = run(step, tensors, backend="autoremat", options=LEAST | FAST)
    report = autoremat.reports()[-1]
    assert all(map(same_bits, gradients, expected))
    assert set(again(report)) == {gather}
    return report, names


@in_world(1)
@pytest.mark.parametrize(("step", "gather"), [(sharded_step, GATHER), (coalesced_step, COALESCED)])
def test_gathers_run_again_with_their_waits_in_the_order_of_the_plan(world, step, gather):
    report, names = repeated(step, expected_of=step, gather=gather)
    assert names == planned_calls(report)


@pytest.fixture
def wait_for_all() -> Iterator[Callable[[list[Tensor]], list[Tensor]]]:
    """The wait for several tensors, which earlier versions of torch lack. There it waits for one after the other."""
    if hasattr(collectives, "wait_tensors"):
        yield collectives.wait_tensors
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
    library.impl("wait_tensors", lambda tensors: list(map(collectives.wait_tensor, tensors)), "CPU")
    library.impl("wait_tensors", lambda tensors: list(map(torch.empty_like, tensors)), "Meta")
    yield collectives.wait_tensors
    library._destroy()
    collectives.__dict__.pop("wait_tensors", None)  # torch 2.13 leaves it there


@in_world(1)
def test_one_wait_for_several_gathers_belongs_to_them(world, wait_for_all):
    class Gathered(GatherTwo):
        @staticmethod
        def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
            group = dist.group.WORLD.group_name
            return tuple(wait_for_all(collectives.all_gather_into_tensor_coalesced(list(shards), 1, group)))

    def step(x: Tensor, *shards: Tensor) -> Tensor:
        for first, second in zip(shards[::2], shards[1::2], strict=True):
            for weight in Gathered.apply(first, second):
                x = torch.tanh(x @ weight)
        return x.square().mean()

    report, names = repeated(step, expected_of=coalesced_step, gather=COALESCED)
    runs = LAYERS // 2 + len(again(report))
    assert names.count(f"{NAMESPACE}::wait_tensors") == names.count(f"{NAMESPACE}::all_gather_into_tensor_coalesced") == runs
    assert not [op for op in report.plan.graph.ops if "wait_tensors" in op.target]


@pytest.mark.slow
@in_world(2)
def test_the_simulated_peak_is_measured(world):
    tensors, step = inputs(2, layers=6), coalesced_step
    for share in (0.8, 1):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="autoremat", options=LEAST | {"memory_budget": share})
        _, peak = measured_peaks(compiled, tensors, 2)
        report = autoremat.reports()[-1]
        assert peak == report.predicted_peak_bytes
    assert again(report)


@in_world(1)
@pytest.mark.parametrize("share", [1.0, 1])
def test_what_gloo_allocates_beside_the_results_counts(world, share):
    tensors = inputs(1)
    torch._dynamo.reset()
    compiled = torch.compile(coalesced_step, backend="autoremat", options=LEAST | {"memory_budget": share})
    peaks = measured_peaks(compiled, tensors, 6)
    report = autoremat.reports()[-1]
    graph = report.plan.graph
    held = 2 * max(op.workspace_bytes + sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs)) for op in graph.ops)
    assert report.predicted_peak_bytes <= min(peaks)
    assert max(peaks) <= report.predicted_peak_bytes + held


@pytest.mark.slow
@in_world(1)
def test_generated_code_runs_collectives_in_the_order_of_the_plan(world):
    tensors = inputs(1, layers=6, rows=MANY_ROWS)
    expected, _ = run(sharded_step, tensors, backend="inductor")
    options = LEAST | {"compiler": "inductor", "recompute": ["*all_gather*"]}
    gradients, names = run(sharded_step, tensors, backend="autoremat", options=options)
    report = autoremat.reports()[-1]
    assert len(again(report)) >= 6
    assert names == planned_calls(report)
    for own, other in zip(gradients, expected, strict=True):
        assert (own - other).norm() <= 0.05 * other.norm()  # 16 bits, which fused code rounds elsewhere
