"""Several processes that compile one graph: they plan it alike, whatever differs between them, and fail together."""

import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import run_ranks
from torch import nn

import autoremat
from autoremat.basics.errors import find_cause
from autoremat.compiler import compile_loop, dynamo_backend, joint_graph, peers
from autoremat.compiler.exchange import Session
from autoremat.compiler.joint_graph import Partitioner
from autoremat.torch_private import compilers
from autoremat.torch_private.inductor_lowering import LoweredPeak

EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline"}
SHARE = EAGER | {"memory_budget": 0.6}


def blocks(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def step(options: dict[str, Any], width: int = 64, depth: int = 6, rows: int = 256) -> dict[str, Any]:
    """The plan and the figures of a step, with the topics of its exchanges, or its error. Its graph counts as communicating."""
    torch._dynamo.reset()
    model = blocks(width, depth)
    compiled = torch.compile(model, backend="autoremat", options=options)
    begin, topics, true = time.monotonic(), [], Session.exchange
    noting = mock.patch.object(Session, "exchange", lambda self, topic, own: topics.append(topic) or true(self, topic, own))
    try:
        with noting, mock.patch.object(dynamo_backend, "may_communicate", return_value=True):
            compiled(torch.randn(rows, width)).square().mean().backward()
    except Exception as error:
        cause = find_cause(error, autoremat.AutorematError) or error
        return {"error": type(cause).__name__, "text": str(cause), "rank": getattr(cause, "rank", None)}
    report = autoremat.reports()[-1]
    return {
        "schedule": report.plan.schedule, "budget": report.budget_bytes,
        "added": (report.recompute_seconds, report.step_seconds), "peak": report.peak_bytes,
        "seconds": time.monotonic() - begin, "topics": topics, "replans": report.replans,
        "gradients": [p.grad for p in model.parameters()],
    }  # fmt: skip


pytestmark = pytest.mark.slow  # each rank is a process


def with_costs_reversed(options: dict[str, Any]) -> dict[str, Any]:
    """A step for which the dearest ops of this process are the cheapest ones."""
    true = joint_graph.capture

    def capture(*given: Any) -> Any:
        found = true(*given)
        dearest = max(op.seconds for op in found.graph.ops)
        ops = tuple(dataclasses.replace(op, seconds=1.1 * dearest - op.seconds) for op in found.graph.ops)
        return dataclasses.replace(found, graph=dataclasses.replace(found.graph, ops=ops))

    with mock.patch.object(joint_graph, "capture", capture):
        return step(options)


def with_code(excess: float) -> dict[str, Any]:
    """A step whose first code needs more than its plan, by a share of the budget. Its graphs then run uncompiled."""
    codes = []

    def lower(problem: Any, partitioning: Any, identity: Any, decide: Any) -> Any:
        function = compilers.compile_uncompiled(problem.module, problem.inputs, Partitioner(partitioning))
        report = partitioning.planned.report
        codes.append(report.predicted_peak_bytes + report.code_headroom_bytes)
        peak = codes[-1] + (0 if len(codes) > 1 else int(excess * report.budget_bytes))
        halves = {half: LoweredPeak(half, peak) for half in (False, True)}
        verdict = decide(halves)
        return None if verdict else function, halves, verdict

    with mock.patch.object(compile_loop, "lower", lower), mock.patch.object(compile_loop, "load_record", return_value=None):
        return step({"memory_budget": 0.8, "cost_model": "roofline"})


def without_capture(options: dict[str, Any]) -> dict[str, Any]:
    """A step whose graph this process cannot capture."""
    with mock.patch.object(joint_graph, "capture", side_effect=RuntimeError("an unknown op")):
        return step(options)


def falling_back(take: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """The warning of a step that falls back."""
    with pytest.warns(autoremat.FallbackWarning) as caught:
        take(SHARE | {"on_planning_error": "fallback"})
    return str(caught[0].message)


def with_an_uneven_batch(rank: int) -> tuple[list[int], list[str]]:
    """The rows that this rank has plans for, and its warnings. The second batch of rank 1 is larger; gradients are summed."""
    torch._dynamo.reset()
    model, before = blocks(64, 6), len(autoremat.reports())
    compiled = torch.compile(model, backend="autoremat", options=SHARE, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autoremat.OptionWarning)
        for rows in (256, 300 if rank else 256):
            compiled(torch.randn(rows, 64)).square().mean().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
    return [report.budget_bytes for report in autoremat.reports()[before:]], [str(one.message) for one in caught]


def scenarios(rank: int) -> dict[str, Any]:
    """Steps of one rank of two, by the thing that differs between the ranks."""
    return {
        "costs": (with_costs_reversed if rank else step)(SHARE),
        "code": with_code(0.1 if rank else 0.0),
        "costs, each by itself": (with_costs_reversed if rank else step)(SHARE | {"agreement": "off"}),
        "budget": step(EAGER | {"memory_budget": 600_000 if rank else 10**9}),
        "infeasible": step(EAGER | {"memory_budget": 1000 if rank else 10**9}),
        "kind of budget": step(EAGER | {"memory_budget": 0.5 if rank else 10**9}),
        "options": step(SHARE | {"save": ["*.1"] if rank else []}),
        "failure": (without_capture if rank else step)(SHARE),
        "fallback": falling_back(without_capture if rank else step),
        "sizes": step(SHARE, rows=256 + 64 * rank),
        "sizes, one of them infeasible": step(EAGER | {"memory_budget": 700_000}, rows=256 + 2048 * rank),
        "time of arrival": time.sleep(2 * rank) or step(SHARE),
        "nothing": step(SHARE),
        "uneven batch": with_an_uneven_batch(rank),  # afterwards, rank 1 does not wait
    }


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Any, Any]]:
    """The scenarios' results on both ranks, from two processes."""
    first, second = run_ranks(scenarios, 2, timeout=300)
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.parametrize("difference", ["time of arrival", "nothing", "budget"])
def test_ranks_find_one_plan_although_something_differs(found, difference):
    first, second = found[difference]
    assert first["schedule"] == second["schedule"]
    assert (first["added"], first["budget"]) == (second["added"], second["budget"])
    assert all(map(torch.equal, first["gradients"], second["gradients"]))
    assert first["topics"] == second["topics"] == ["options", "graph", "plans"]


def test_the_plan_of_the_lowest_rank_holds_where_ranks_find_different_ones(found):
    (first, second), (alone, _) = found["costs"], found["costs, each by itself"]
    assert first["schedule"] == second["schedule"] == alone["schedule"]
    assert all(map(torch.equal, first["gradients"], second["gradients"]))
    assert first["topics"] == second["topics"] == ["options", "graph", "plans", "told plan", "plans"]


def test_the_plan_of_the_rank_whose_code_needs_the_most_headroom_holds(found):
    first, second = found["code"]
    assert first["schedule"] == second["schedule"]
    assert first["topics"] == second["topics"] == ["options", "graph", "plans", "told plan", "plans"]
    assert first["peak"] <= 0.95 * first["budget"], "the plan of rank 1, whose first code exceeded the budget"


def test_without_agreement_ranks_plan_by_their_own_costs(found):
    first, second = found["costs, each by itself"]
    assert first["schedule"] != second["schedule"]


def test_the_least_budget_holds_on_all_ranks(found):
    assert [(one["budget"], one["peak"] <= 600_000) for one in found["budget"]] == [(600_000, True)] * 2


def test_a_budget_that_fails_on_one_rank_fails_on_all(found):
    first, second = found["infeasible"]
    assert first == second
    assert (first["error"], first["rank"]) == ("BudgetInfeasible", 1)
    assert "within the budget of rank 1" in first["text"]
    assert "1000 bytes" in first["text"]


@pytest.mark.parametrize(
    ("difference", "said"),
    [("kind of budget", "1000000000 on rank 0, 0.5 on rank 1"), ("options", "save is [] on rank 0, ['*.1'] on rank 1")],
)
def test_options_that_differ_are_refused_on_all_ranks(found, difference, said):
    assert [(one["error"], said in one["text"]) for one in found[difference]] == [("AgreementError", True)] * 2


def test_planning_that_fails_on_one_rank_fails_on_all(found):
    first, second = found["failure"]
    assert (first["error"], first["rank"]) == ("AgreementError", 1)
    assert "failed on rank 1" in first["text"]
    assert "an unknown op" in first["text"]
    assert second["error"] == "PlanningError"


def test_a_graph_that_does_not_communicate_is_planned_by_each_rank_alone(found):
    (first, _), (second, warned) = found["uneven batch"]
    assert (len(first), len(second)) == (1, 2)
    assert second[1] > second[0] == first[0]
    assert not warned


def test_all_ranks_fall_back_together(found):
    assert all("an unknown op" in text for text in found["fallback"])


def test_ranks_with_graphs_of_different_sizes_plan_by_themselves(found):
    first, second = found["sizes"]
    assert first["budget"] < second["budget"]


def test_a_rank_that_cannot_compile_ends_ranks_with_other_graphs(found):
    first, second = found["sizes, one of them infeasible"]
    assert [(one["error"], one["rank"]) for one in (first, second)] == [("BudgetInfeasible", 1), ("BudgetInfeasible", None)]
    assert "within the budget of rank 1" in first["text"]


def cached(rank: int, folders: tuple[str, ...]) -> dict[str, Any]:
    """A step by Inductor with caches of its own for each rank."""
    for name in ("AUTOREMAT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = str(Path(folders[rank]) / name)
    planned: list[Any] = []
    true = compile_loop.plan_graph
    compile_loop.plan_graph = lambda *given, **more: planned.append(1) or true(*given, **more)
    result = step({"memory_budget": 0.9, "cost_model": "roofline"}, width=128, depth=3)
    return result | {"planned": len(planned)}


def test_caches_of_single_ranks_have_no_influence(tmp_path):
    folders = [str(tmp_path / name) for name in "abc"]
    cold = run_ranks(cached, 2, timeout=600, args=(folders[:2],))
    mixed = run_ranks(cached, 2, timeout=600, args=((folders[0], folders[2]),))
    warm = run_ranks(cached, 2, timeout=600, args=((folders[0], folders[2]),))
    for found in (cold, mixed, warm):
        assert found[0]["schedule"] == found[1]["schedule"] == cold[0]["schedule"]
        assert found[0]["peak"] == found[1]["peak"] <= found[0]["budget"]
    assert all(one["planned"] >= 1 for one in (*cold, *mixed))
    assert [one["planned"] for one in warm] == [0, 0]


@pytest.mark.parametrize(
    ("replications", "ranks", "expected"),
    [
        (["one", "one", "one", "one"], [[0, 1], [0, 1], [2, 3], [2, 3]], True),  # two groups of a mesh
        (["one", "other", "one", "one"], [[0, 1], [0, 1], [2, 3], [2, 3]], False),  # a number of the rank in the graph
        (["one", "one", "one", "one"], [[0, 1], [0, 1], [2, 3], [3, 4]], False),  # a rank with another graph
    ],
)
def test_ranks_gather_together_if_all_of_them_have_the_graph_and_compute_alike(replications, ranks, expected):
    rows = enumerate(zip(replications, ranks, strict=True))
    terms = {rank: {"graph": "graph", "replication": own, "gathers": over} for rank, (own, over) in rows}
    assert peers._same_graph(terms, "graph") == peers._SameGraph((0, 1, 2, 3), expected)
