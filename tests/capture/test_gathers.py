"""An all-gather with its wait is one op: priced by its bytes, and run again where that is cheaper than its memory."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from captured import priced
from oracles import same_bits
from processes import group_of, run_ranks
from sharded_models import Sharded
from torch import Tensor
from torch.profiler import profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.planner.graph.op import Trait
from autoremat.report.report import Report

collectives = torch.ops._c10d_functional
NAMESPACE = "_c10d_functional"
GATHER, COALESCED = f"{NAMESPACE}.all_gather_into_tensor.default", f"{NAMESPACE}.all_gather_into_tensor_coalesced.default"
EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline", "on_planning_error": "raise"}
LEAST = EAGER | {"memory_budget": 1, "on_infeasible": "best_effort"}
FAST: dict[str, Any] = {"interconnect_bandwidth": 1e12, "interconnect_latency": 1e-9}
WIDTH, LAYERS, ROWS = 64, 4, 16
MANY_ROWS = 128
"""So many that the peak lies where the backward begins, not at the last gradient, on processors of all kinds."""

Step = Callable[..., Tensor]

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]
"""Warnings of the steps that their tests do not look at."""


def sharded_step(x: Tensor, *shards: Tensor) -> Tensor:
    """A chain of layers, each with a weight that is gathered in 16 bits."""
    gather = Sharded(torch.bfloat16)
    for shard in shards:
        x = torch.tanh(x.bfloat16() @ gather(shard))
    return x.float().square().mean()


def coalesced_step(x: Tensor, *shards: Tensor) -> Tensor:
    """The same, with two weights per gather."""
    for first, second in zip(shards[::2], shards[1::2], strict=True):
        for weight in GatherTwo.apply(first, second):
            x = torch.tanh(x @ weight)
    return x.square().mean()


class GatherTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
        gathered = collectives.all_gather_into_tensor_coalesced(
            list(shards), dist.get_world_size(), dist.group.WORLD.group_name
        )
        return tuple(map(collectives.wait_tensor, gathered))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(functional.reduce_scatter_tensor(g.contiguous(), "sum", 0, dist.group.WORLD) for g in gradients)


def inputs(ranks: int, layers: int = LAYERS, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, WIDTH), *[(WIDTH // ranks, WIDTH)] * layers]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def run(step: Step, tensors: list[Tensor], **arguments: Any) -> tuple[list[Tensor], list[str]]:
    """The gradients of a compiled step, and the collectives in the order in which they ran."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, **arguments)
    for _ in range(2):  # the first step is compiled
        for tensor in tensors:
            tensor.grad = None
        with profile() as ran:
            compiled(*tensors).backward()
    names = [event.name for event in ran.events() if event.name.startswith(NAMESPACE)]
    return [tensor.grad for tensor in tensors if tensor.grad is not None], names


def planned_calls(report: Report) -> list[str]:
    """The collectives of the plan in its sequence, as they show up in a profile, each with its waits."""
    assert report.plan is not None
    graph, found = report.plan.graph, []
    for index in report.plan.schedule.sequence:
        op = graph.ops[index]
        if op.target.startswith(NAMESPACE):
            found += [op.target.replace(".default", "").replace(".", "::"), *[f"{NAMESPACE}::wait_tensor"] * len(op.outputs)]
    return found


def again(report: Report) -> list[str]:
    """The targets of the collectives that the plan repeats."""
    assert report.plan is not None
    targets = (report.plan.graph.ops[index].target for index in report.plan.recomputed)
    return [target for target in targets if target.startswith(NAMESPACE)]


def measured_peaks(compiled: Step, tensors: list[Tensor], steps: int) -> list[int]:
    """The peak of each of so many steps."""
    peaks = []
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = None
        with autoremat.track_peak() as tracked:
            compiled(*tensors).backward()
        peaks.append(tracked.bytes)
    return peaks


pytestmark = IGNORED_WARNINGS


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of as many ranks as the parameter says."""
    with group_of(request.param):
        yield request.param


def in_world(*ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", ranks, indirect=True)


@in_world(64)
def test_a_gather_is_priced_by_the_bytes_that_it_sends(world):
    graph = priced(sharded_step, *inputs(world), interconnect_bandwidth=1e6, interconnect_latency=0.5).graph
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
    found = priced(step, x, shard.detach())
    assert [op.rematerializable for op in found.graph.ops if NAMESPACE in op.target] == [False] * (2 + (step is awaited_twice))
    assert not found.gathering_ranks


@in_world(2)
def test_no_gather_runs_again_where_other_ranks_may_plan_otherwise(world):
    found = priced(sharded_step, *inputs(2))
    assert found.gathering_ranks == {0, 1}
    once = found.with_gathers_once()
    assert not once.gathering_ranks
    assert not [op for op in once.graph.ops if op.target == GATHER and op.rematerializable]
    assert [op.seconds for op in once.graph.ops] == [op.seconds for op in found.graph.ops]


@in_world(2)
def test_a_gather_that_the_model_saves_is_saved(world):
    def step(x: Tensor, *shards: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
        return checkpoint(sharded_step, x, *shards, use_reentrant=False, context_fn=contexts)

    assert not again(autoremat.explain(step, *inputs(2), options=LEAST))
    assert GATHER in again(autoremat.explain(sharded_step, *inputs(2), options=LEAST))


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


def one_rank(rank: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[str], list[str], list[int], int]:
    """Gradients, those of plain eager graphs, the collectives that ran, those that the plan repeats, peaks and the budget."""
    tensors = inputs(2, layers=24, seed=rank)
    expected, _ = run(sharded_step, tensors, backend="aot_eager")
    gradients, names = run(sharded_step, tensors, backend="autoremat", options=options)
    report = autoremat.reports()[-1]
    assert names == planned_calls(report)
    peaks = measured_peaks(torch.compile(sharded_step, backend="autoremat", options=options), tensors, 4)
    return gradients, expected, names, again(report), peaks, report.budget_bytes or 0


AGREEMENTS = ("auto", "off")


def with_agreements(rank: int) -> dict[str, Any]:
    options = EAGER | {"memory_budget": 0.85, "on_infeasible": "best_effort"}
    return {agreement: one_rank(rank, options | {"agreement": agreement}) for agreement in AGREEMENTS}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """The results of two processes, by their agreement."""
    return run_ranks(with_agreements, 2, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("agreement", AGREEMENTS)
def test_two_ranks_repeat_the_same_gathers_under_an_agreement_and_none_without(two_ranks, agreement):
    ranks = [rank[agreement] for rank in two_ranks]
    for gradients, expected, _, repeated, peaks, budget in ranks:
        assert all(map(same_bits, gradients, expected))
        assert bool(repeated) == (agreement == "auto")
        assert agreement == "off" or min(peaks) <= budget  # gloo's threads may hold a tensor for a moment longer
    assert ranks[0][2] == ranks[1][2]


def calibrated_rank(rank: int) -> tuple[str, tuple[int, ...], str]:
    """The interconnect of the report, the ranks that share the plan, and the schedule."""
    options = {"compiler": "aot_eager", "cost_model": "calibrated", "memory_budget": 0.9, "on_infeasible": "best_effort"}
    run(sharded_step, inputs(2, seed=rank), backend="autoremat", options=options)
    report = autoremat.reports()[-1]
    return report.interconnect, report.ranks, str(report.plan.schedule)


@pytest.mark.slow
def test_ranks_plan_with_the_rates_of_one_of_them():
    first, second = run_ranks(calibrated_rank, 2)
    assert first == second
    assert first[0].endswith("/s (assumed)")
    assert first[1] == (0, 1)
