"""Stored plans: what is written is read, what is broken or for another graph is refused, and what is applied is obeyed."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_models import Chain
from folders import TESTS
from hypothesis import given
from requests_of_options import key_of
from strategies import chain, graphs, saved_sets
from torch import nn
from trained_steps import trained

import autoremat
from autoremat.basics.errors import BudgetInfeasible, OptionsError, PlanFileError
from autoremat.options.options import Options, configure
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans import plan_file
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.plans.plan_json import READABLE, VERSION


@pytest.fixture
def plan() -> Plan:
    return autoremat.plan(chain(8, size=64, forward_outputs=(8,)), memory_budget=0.75)


@given(graphs().flatmap(lambda graph: saved_sets(graph).map(lambda saved: Plan.of(graph, build_schedule(graph, saved), "l"))))
def test_a_plan_comes_back_as_it_was(plan):
    again = Plan.loads(plan.dumps())
    assert (again.graph, again.schedule, again.label) == (plan.graph, plan.schedule, plan.label)
    assert again.peak_bytes == plan.peak_bytes
    assert again == plan
    assert hash(again) == hash(plan)
    assert plan_file.graph_hash(again.graph) == plan_file.graph_hash(plan.graph)


def test_what_is_known_of_the_budget_comes_back(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    for name in ("budget_bytes", "lower_bound_bytes", "lower_bound_seconds", "interrupted", "status", "gap"):
        assert getattr(again, name) == getattr(plan, name)
    impossible = autoremat.plan(plan.graph, memory_budget=1)
    json.loads(impossible.dumps(), parse_constant=pytest.fail)
    assert Plan.loads(impossible.dumps()).status is impossible.status


def changed(plan: Plan, change: Callable[[dict], object]) -> str:
    record = json.loads(plan.dumps())
    change(record)
    return json.dumps(record)


def rows(record: dict, table: str) -> list[list]:
    return record["graph"][table]["rows"]


def add_column(record: dict, table: str, name: str, cell: object) -> None:
    record["graph"][table]["columns"].append(name)
    for row in rows(record, table):
        row.append(cell)


BROKEN: dict[str, Callable[[dict], object]] = {
    "a column twice": lambda r: r["graph"]["ops"]["columns"].__setitem__(0, "target"),
    "an op that does not exist": lambda r: r["backward"].append(1000),
    "a negative op": lambda r: r["backward"].append(-1),
    "a share of an op": lambda r: r["backward"].append(0.5),
    "a read of what is not there": lambda r: r.update(forward=[]),
    "a short row": lambda r: rows(r, "ops")[0].pop(),
    "an unknown kind": lambda r: add_column(r, "ops", "kind", "magic"),
    "a value that does not exist": lambda r: r["graph"].update(backward_outputs=[10**9]),
    "a negative size": lambda r: rows(r, "values")[0].__setitem__(r["graph"]["values"]["columns"].index("bytes"), -1),
    "a negative workspace": lambda r: add_column(r, "ops", "workspace_bytes", -1),
    "negative seconds": lambda r: rows(r, "ops")[0].__setitem__(r["graph"]["ops"]["columns"].index("seconds"), -1.0),
    "a negative budget": lambda r: r.update(budget_bytes=-1),
    "a bound above the peak": lambda r: r.update(lower_bound_bytes=10**6),
    "no graph": lambda r: r.update(graph=None),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plan_is_refused(plan, change):
    with pytest.raises(PlanFileError, match="p.json holds no valid plan"):
        Plan.loads(changed(plan, change), "p.json")


@pytest.mark.parametrize("text", ["", "[]", '{"format": "zip"}', "[" * 100_000])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanFileError):
        Plan.loads(text)


def test_another_version_is_refused_by_its_number(plan):
    with pytest.raises(PlanFileError, match="version 99 .* reads 3 to 4"):
        Plan.loads(changed(plan, lambda r: r.update(version=99)))


UNKNOWN: dict[str, Callable[[dict], object]] = {
    "a plan file has no field 'tiers'": lambda r: r.update(tiers=[]),
    "Graph has no field 'links'": lambda r: r["graph"].update(links=[]),
    "Value has no field 'shelf'": lambda r: add_column(r, "values", "shelf", []),
    "Op has no field 'engine'": lambda r: add_column(r, "ops", "engine", 0),
}


@pytest.mark.parametrize(("message", "change"), UNKNOWN.items(), ids=UNKNOWN.keys())
def test_a_field_that_this_version_does_not_know_is_named(plan, message, change):
    with pytest.raises(PlanFileError, match=message):
        Plan.loads(changed(plan, change))


def test_the_option_takes_paths_and_plans(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    digests = {key_of(Options(plan=given)) for given in (tmp_path / "plan.json", str(tmp_path / "plan.json"), plan, [plan])}
    assert len(digests) == 1, "the content decides, not where it lies"
    other = dataclasses.replace(plan, label="another")
    assert key_of(Options(plan=[plan, other])) not in digests
    assert key_of(Options(plan=other)) not in digests
    assert Options().plan is Options(plan=None).plan is None
    configure(plan=plan)
    assert Options.parse({}).plan[0].plan.schedule == plan.schedule


def test_other_values_of_the_option_are_refused(tmp_path):
    for value in (7, "", " ", [], ()):
        with pytest.raises(OptionsError, match=re.escape(f"plan={value!r} is not accepted")):
            Options(plan=value)
    with pytest.raises(PlanFileError):
        Options(plan=tmp_path / "nothing.json")


def file_of(plan: Plan) -> plan_file.PlanFile:
    return plan_file.PlanFile.of(plan)


def test_names_lines_and_seconds_may_differ(plan):
    graph = plan.graph
    ops = tuple(dataclasses.replace(op, name=f"x{op.name}", seconds=7.0, source="elsewhere:1") for op in graph.ops)
    values = tuple(dataclasses.replace(value, name=f"x{value.name}", module="m") for value in graph.values)
    renamed = dataclasses.replace(graph, ops=ops, values=values)
    _, applied = plan_file.fitted([file_of(plan)], renamed)
    assert applied.graph is renamed
    assert applied.schedule == plan.schedule


def test_the_error_says_what_differs(plan):
    ops = list(plan.graph.ops)
    ops[3] = dataclasses.replace(ops[3], target="aten.mm.default", module="layers.3", source="model.py:7")
    with pytest.raises(PlanFileError) as caught:
        plan_file.fitted([file_of(plan)], dataclasses.replace(plan.graph, ops=tuple(ops)))
    for part in ("first op that differs is number 3", "test.op", "aten.mm.default", "in layers.3 at model.py:7"):
        assert part in str(caught.value)


def test_a_plan_that_breaks_an_order_is_refused(plan):
    ops = list(plan.graph.ops)
    again = plan.recomputed[0]
    ops[again] = dataclasses.replace(ops[again], constraint=Constraint.SAVE)
    with pytest.raises(PlanFileError, match="breaks a rule of this graph: .* is to be saved, but runs twice"):
        plan_file.fitted([file_of(plan)], dataclasses.replace(plan.graph, ops=tuple(ops)))


def test_each_graph_takes_its_own_of_several_plans(plan):
    other = autoremat.plan(chain(5, size=64), memory_budget=0.6)
    files = [file_of(plan), file_of(other)]
    assert plan_file.fitted(files, other.graph)[1].schedule == other.schedule
    with pytest.raises(PlanFileError, match="none of 2 plans"):
        plan_file.fitted(files, chain(6, size=64))


def train(width: int = 32, **options: object) -> tuple[autoremat.Report, torch.Tensor]:
    """The report and the gradient of one step."""
    torch.manual_seed(0)
    model, x = Chain(4, width, activation=nn.functional.gelu), torch.randn(256, width)
    found = trained(model, model, x, steps=1, **options)
    return found.report, found.tensors[1]


def test_a_stored_plan_is_applied_as_it_is(tmp_path):
    report, gradient = train(memory_budget=0.6)
    assert report.plan.peak_bytes == report.predicted_peak_bytes
    assert report.plan.budget_bytes == report.budget_bytes
    report.plan.save(tmp_path / "plan.json")
    again, same = train(plan=tmp_path / "plan.json")
    assert again.plan.schedule == report.plan.schedule
    assert again.strategy.startswith("stored plan")
    assert torch.equal(gradient, same)
    for name in ("predicted_peak_bytes", "baseline_peak_bytes", "lower_bound_bytes", "saved", "recomputed_ops"):
        assert getattr(again, name) == getattr(report, name)
    assert again.budget_bytes is None
    assert 0 <= again.lower_bound_seconds <= again.recompute_seconds
    everything, _ = train()
    assert everything.plan.schedule != report.plan.schedule, "else the test shows nothing"


GOLDEN = sorted((TESTS / "data").glob("plan_version_*.json"))
"""A plan file of each version of the format. They are never written again."""


def test_each_version_that_is_read_has_a_golden_file():
    versions = {path.name: json.loads(path.read_text())["version"] for path in GOLDEN}
    assert versions == {f"plan_version_{version}.json": version for version in READABLE}
    assert VERSION in READABLE


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_file_is_read_and_applied(path):
    stored = Plan.load(path)
    assert (stored.peak_bytes, stored.saved_bytes, len(stored.recomputed), stored.status) == (42240, 18432, 4, Status.FEASIBLE)
    assert (stored.budget_bytes, stored.lower_bound_bytes, stored.label) == (
        43622, 42240, "3 segments, one cut in 2 saved, recreated",
    )  # fmt: skip
    widths = (8, 32, 32, 32, 32, 8)
    layers = [(nn.Linear(*pair, bias=False), nn.Tanh()) for pair in itertools.pairwise(widths)]
    compiled = torch.compile(
        nn.Sequential(*itertools.chain(*layers)), backend="autoremat", options={"compiler": "aot_eager", "plan": path}
    )
    compiled(torch.randn(64, 8)).square().mean().backward()
    report = autoremat.reports()[-1]
    assert report.plan.schedule == stored.schedule
    assert report.strategy == f"stored plan ({stored.label})"


def test_a_stored_plan_over_the_budget_is_an_error(tmp_path):
    report, _ = train(memory_budget=0.9)
    report.plan.save(path := tmp_path / "plan.json")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        train(plan=path, memory_budget=report.predicted_peak_bytes - 1)
    error = caught.value.inner_exception
    assert isinstance(error, BudgetInfeasible)
    assert error.minimum_bytes == report.predicted_peak_bytes
    assert f"the stored plan {path} does not keep" in str(error)
    assert "leave out the option `plan`" in str(error)
    with pytest.warns(autoremat.BudgetWarning):
        best_effort, _ = train(plan=path, memory_budget=1, on_infeasible="best_effort")
    assert best_effort.plan.schedule == report.plan.schedule


def test_a_plan_of_another_model_is_an_error_and_not_left_to_torch(tmp_path):
    report, _ = train(width=16)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="first op that differs"):
        train(width=32, plan=report.plan)


@pytest.mark.slow
def test_under_inductor_the_plan_is_applied_and_a_warm_start_has_it_too(tmp_path: Path):
    report, gradient = train(compiler="inductor", memory_budget=0.8)
    report.plan.save(path := tmp_path / "plan.json")
    stored, same = train(compiler="inductor", plan=path)
    assert stored.plan.schedule == report.plan.schedule
    assert (stored.compiled_peak_bytes, stored.replans) == (report.compiled_peak_bytes, 0)
    assert torch.equal(gradient, same)
    warm, _ = train(compiler="inductor", memory_budget=0.8)
    assert warm == report
    assert warm.plan.schedule == report.plan.schedule
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="the stored plan"):
        train(compiler="inductor", plan=path, memory_budget=report.compiled_peak_bytes // 2)


def test_a_schedule_that_repeats_for_ever_is_refused(plan):
    record = json.loads(plan.dumps())
    record["forward"] = record["forward"] * 200_000
    with pytest.raises(PlanFileError, match="executions of .* ops are more than 10000, which no plan needs"):
        Plan.loads(json.dumps(record))


def test_control_characters_of_a_file_do_not_reach_the_terminal(plan):
    record = json.loads(plan.dumps())
    record["label"] = "quiet\x1b]0;owned\x07\x9b31m\nplan"
    column = record["graph"]["values"]["columns"].index("name")
    record["graph"]["values"]["rows"][0][column] = "\x1b[2J"
    found = Plan.loads(json.dumps(record))
    assert found.label == r"quiet\x1b]0;owned\x07\x9b31m" "\nplan"
    assert found.graph.values[0].name == r"\x1b[2J"
