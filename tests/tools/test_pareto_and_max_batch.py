"""``pareto``, ``max_batch`` and ``best_batch`` on small models, and the search for sizes on made-up ones."""

import time
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build
from strategies import chain, changed, graphs
from test_explain import EAGER, MIB, Mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.basics.units import format_bytes
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.reference import plan_of_partition
from autoremat.options.options import Options
from autoremat.planner.plans.limits import Limits, undominated
from autoremat.planner.search.planner import Planner
from autoremat.report.plots import BOUND, OURS, POLICY, TORCH
from autoremat.tools import max_batch
from autoremat.tools.advice import seconds_of
from autoremat.tools.explain import previews
from autoremat.tools.max_batch import SizeSearch
from autoremat.tools.pareto import Point, front_of
from autoremat.torch_private import compilers, fake_tensors


@pytest.fixture(scope="module")
def points():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
    return autoremat.pareto(
        lambda x: model(x).square().mean(), torch.randn(512, 64), points=5, torch_budgets=(1, 0.5), options=EAGER
    )


def test_all_families_are_there(points):
    assert {p.family for p in points} == {OURS, BOUND, POLICY, TORCH}
    assert [p.label for p in points if p.family == TORCH] == ["1", "0.5"]
    assert len({p.step_seconds for p in points}) == 1


def test_nothing_is_below_the_bound_and_nothing_of_torchs_beats_ours(points):
    ours = [p for p in points if p.family == OURS]
    for bound in (p for p in points if p.family == BOUND):
        assert all(p.added_seconds >= bound.added_seconds - 1e-12 for p in points if p.peak_bytes <= bound.peak_bytes)
    for theirs in (p for p in points if p.family == TORCH):
        assert not any(theirs.peak_bytes <= p.peak_bytes and theirs.added_seconds < p.added_seconds - 1e-12 for p in ours)


def test_our_points_lie_between_the_bound_and_no_recomputation():
    graph = chain(24, size=MIB, seconds=1e-3, forward_outputs=(24,), saving_seconds_per_byte=0.0)
    points = list(front_of(graph, 6, 5.0))
    ours, bounds = ([p for p in points if p.family == family] for family in (OURS, BOUND))
    planner = Planner(graph)
    assert ours[-1].peak_bytes == planner.baseline.peak_bytes
    assert ours[-1].added_seconds == 0.0
    assert ours[0].peak_bytes == planner.find(Limits(1)).smallest.peak_bytes  # the search for the least peak
    assert [p.added_seconds for p in ours] == sorted((p.added_seconds for p in ours), reverse=True)
    for bound in bounds:
        assert all(p.added_seconds >= bound.added_seconds for p in ours if p.peak_bytes <= bound.peak_bytes)


@settings(max_examples=25)
@given(graphs())
def test_no_policy_is_below_the_bound(graph):
    graph = changed(graph, saving_seconds_per_byte=0.0)
    front = list(front_of(graph, 4, 5.0))
    bounds = [p for p in front if p.family == BOUND]
    for point in (p for p in front if p.family == POLICY):
        assert all(point.added_seconds >= b.added_seconds - 1e-9 for b in bounds if point.peak_bytes <= b.peak_bytes)


def test_what_another_one_beats_is_left_out():
    points = [Point("a", "x", 10, 1.0, 2.0), Point("a", "y", 10, 2.0, 2.0), Point("b", "z", 20, 3.0, 2.0)]
    assert [p.label for p in undominated(points, lambda p: (p.peak_bytes, p.added_seconds))] == ["x"]
    assert points[0].overhead == 0.5


def halves_by_torch(priced):
    joint = priced.joint
    return fake_tensors.partition_for(1.0, joint.module, joint.inputs, joint.keywords)


def test_what_torch_saves_it_does_not_recompute():
    """A saved value is a placeholder of torch's backward, with the name of the op that made it."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
    options = Options.parse(EAGER, None, compilers.inductor_config_names)

    def look(priced):
        captured, halves = priced.captured, halves_by_torch(priced)
        plan = plan_of_partition(captured, *halves)
        counted = [captured.op_nodes[op].name for op in plan.schedule.sequence]
        op_names = {node.name for node in captured.op_nodes}
        called = [node.name for half in halves for node in half.graph.nodes if node.op == "call_function"]
        assert counted == [name for name in called if name in op_names]
        assert not [name for name in (captured.op_nodes[op].name for op in plan.recomputed) if "mm" in name or "tanh" in name]
        return len(plan.saved)

    (saved,), _ = previews(lambda x: model(x).square().mean(), (torch.randn(512, 64),), {}, options, None, look)
    assert saved >= 8


def test_random_ops_that_torch_repeats_are_told_apart():
    """It calls them by numbers then; attention counts as random."""

    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = super().forward(x).view(4, 32, 4, 16).transpose(1, 2)
            return x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(4, 32, 64)

    blocks = torch.nn.ModuleList(Block(64, 64) for _ in range(3))

    def step(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    def look(priced):
        captured, halves = priced.captured, halves_by_torch(priced)
        plan = plan_of_partition(captured, *halves)
        plan.check()
        return [captured.op_nodes[op].name for op in plan.recomputed if "attention" in captured.op_nodes[op].name]

    options = Options.parse({}, None, compilers.inductor_config_names)
    (repeated,), _ = previews(step, (torch.randn(4, 32, 64),), {}, options, None, look)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert repeated == [f"{name}_2", f"{name}_1", name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gpt2", "unet"])
def test_without_a_budget_no_more_memory_is_planned_than_torch_needs(name):
    model, inputs = build(name, **({"layers": 2} if name == "gpt2" else {}))

    def look(priced):
        theirs = plan_of_partition(priced.captured, *halves_by_torch(priced)).peak_bytes
        planned = plan_graph(priced)
        assert planned.plan.peak_bytes <= theirs == planned.report.soft_budget_bytes
        assert planned.fastest.cost_seconds <= planned.plan.cost_seconds
        return True

    options = Options.parse({"time_limit": 600}, None, compilers.inductor_config_names)
    assert previews(model, inputs, {}, options, None, look)[0] == [True]


def test_the_time_between_attempts_is_not_the_planners(monkeypatch):
    now, passed = time.thread_time, [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now() + passed[0])

    def look(priced):
        plan_graph(priced)
        passed[0] += 1000.0  # code is generated
        first = plan_graph(priced)
        passed[0] += 1000.0
        assert first.gain(first.report.budget_bytes // -10) > 0.0
        assert not first.planner.limit.interrupted
        passed[0] += 1000.0  # the graph is traced again
        again = plan_graph(priced)
        return not again.planning.interrupted and len(priced.problem.searches.planners) == 1

    options = Options.parse({"time_limit": 600, "memory_budget": 0.75}, None, compilers.inductor_config_names)
    model, inputs = build("gpt2", layers=1)
    assert previews(model, inputs, {}, options, None, look)[0] == [True]


def test_pareto_refuses_a_budget():
    with pytest.raises(OptionsError, match="leave it out"):
        autoremat.pareto(Mlp(), torch.randn(8, 64), options={"memory_budget": 0.5})
    with pytest.raises(OptionsError, match="2 or more"):
        autoremat.pareto(Mlp(), torch.randn(8, 64), points=1)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    model = Mlp()
    fit = autoremat.max_batch(lambda rows: torch.randn(rows, 64), model, MIB, options=EAGER)
    assert fit.report.predicted_peak_bytes <= MIB < fit.next_minimum_bytes
    assert fit.size < fit.next_size <= fit.size * 33 / 32
    assert len(fit.tried) < 8
    assert autoremat.explain(model, torch.randn(fit.size, 64), options=EAGER | {"memory_budget": MIB}).fits
    with pytest.raises(BudgetInfeasible) as refused:
        autoremat.explain(model, torch.randn(fit.next_size, 64), options=EAGER | {"memory_budget": MIB})
    assert refused.value.minimum_bytes == fit.next_minimum_bytes
    assert f"{fit.next_size} (least {format_bytes(fit.next_minimum_bytes)})" in str(fit)
    assert f"{format_bytes(MIB)}\n" in str(fit)


def test_a_search_that_is_stopped_tells_what_it_knows(monkeypatch):
    def stops(model, inputs, *rest):
        if len(inputs[0]) > 1:
            raise KeyboardInterrupt
        return explain_by(model, inputs, *rest)

    explain_by = max_batch.explain_by
    monkeypatch.setattr(max_batch, "explain_by", stops)
    with pytest.raises(KeyboardInterrupt, match="stopped while 2 was planned; known: 1 fits"):
        autoremat.max_batch(lambda size: torch.randn(size, 64), Mlp(), "1GiB", options=EAGER)


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(BudgetInfeasible) as caught:
        autoremat.max_batch(lambda rows: torch.randn(rows, 64), Mlp(), "1KiB", options=EAGER)
    assert caught.value.budget_bytes == 1024 < caught.value.minimum_bytes
    for budget in (0.5, None):
        with pytest.raises(OptionsError, match="needs bytes"):
            autoremat.max_batch(lambda rows: torch.randn(rows, 64), Mlp(), budget)
    with pytest.raises(OptionsError, match="1 <= step <= limit"):
        autoremat.max_batch(lambda rows: torch.randn(rows, 64), Mlp(), MIB, step=8, limit=4)


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.floats(1.0, 2.0), st.integers(1, 10**5))
def test_the_search_finds_the_last_that_fits(slope, start, power, largest):
    def peak(count: int) -> int:
        return start + int(slope * count**power)

    budget = peak(largest)

    def outcome_of(count: int):
        if peak(count) > budget:
            return BudgetInfeasible(budget_bytes=budget, minimum_bytes=peak(count), lower_bound_bytes=0)
        return types.SimpleNamespace(minimum_peak_bytes=peak(count), budget_bytes=budget, others=())

    search = SizeSearch(outcome_of, 10**6)
    search.run()
    assert peak(search.fits) <= budget
    assert search.misses - search.fits <= max(search.fits // 32, 1)
    assert peak(search.misses) > budget
    assert len(search.outcomes) < 20


model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 32)


@pytest.mark.slow
def test_the_best_of_given_sizes_has_the_most_samples_per_second():
    found = autoremat.best_batch(rows, loss, "400KiB", candidates=(256, 32, 64, 1024, 64), options=EAGER)
    assert [size for size, _, _ in found.tried] == [32, 64, 256, 1024]
    speeds = {size: size / seconds for size, seconds, _ in found.tried}
    assert found.samples_per_second == speeds[found.size] == max(speeds.values())
    assert speeds[1024] == 0.0
    assert found.report.fits
    for size, seconds, peak in found.tried[:3]:
        again = autoremat.explain(loss, rows(size), options=EAGER | {"memory_budget": "400KiB"})
        assert (seconds, peak) == (seconds_of(again), again.minimum_peak_bytes)
    assert f"{found.size} is best within 400.00 KiB" in str(found)
    slow = autoremat.best_batch(rows, loss, "400KiB", candidates=(64, 128, 256), seconds_per_step=1.0, options=EAGER)
    assert slow.samples_per_second == pytest.approx(256 / (1.0 + slow.tried[-1][1]))


def test_best_batch_refuses_what_cannot_be_searched():
    for sizes in (None, [8, 16]):
        with pytest.raises(BudgetInfeasible):
            autoremat.best_batch(rows, loss, "1KiB", candidates=sizes, options=EAGER)
    with pytest.raises(OptionsError, match="needs bytes"):
        autoremat.best_batch(rows, loss, 0.5)
    for sizes in ([], [0], [1.5]):
        with pytest.raises(OptionsError, match="candidates="):
            autoremat.best_batch(rows, loss, "1MiB", candidates=sizes)
