"""Public names of earlier versions: each warns and does as the new one."""

import dataclasses
import json

import pytest
import torch
from strategies import chain
from torch import nn

import autoremat
from autoremat.options.renamed import renamed
from autoremat.planner.constraints import policies


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"inner": "aot_eager"}, {"compiler": "aot_eager"}),
        ({"reserve": "1GiB"}, {"auto_headroom": "1GiB"}),
        ({"on_unplannable": "warn"}, {"on_planning_error": "fallback"}),
        ({"on_unplannable": "raise"}, {"on_planning_error": "raise"}),
        ({"cost_model": "profile"}, {"cost_model": "calibrated"}),
        ({"policy": "selective", "recompute_modules": ["mlp"]}, {"policy": "selective:mlp"}),
    ],
)
def test_options_under_old_names(old, new):
    with pytest.warns(DeprecationWarning, match="will be removed in the next release"):
        found = autoremat.Options.parse(old)
    assert found == autoremat.Options.parse(new)
    with pytest.warns(DeprecationWarning, match="will be removed in the next release"):
        autoremat.configure(**old)
    assert autoremat.Options.parse({}) == found


def test_a_cost_model_of_the_environment_under_its_old_name(monkeypatch):
    monkeypatch.setenv("AUTOREMAT_COST_MODEL", "profile")
    with pytest.warns(DeprecationWarning, match="cost_model='calibrated'"):
        assert autoremat.Options.parse({}).cost_model == "calibrated"


def test_an_option_under_both_names_is_an_error():
    with pytest.raises(autoremat.OptionsError, match="'compiler' is given twice"):
        renamed({"inner": "aot_eager", "compiler": "inductor"})


def test_modules_belong_to_a_policy_that_was_configured():
    autoremat.configure(policy="selective")
    with pytest.warns(DeprecationWarning, match="selective:mlp"):
        assert autoremat.Options.parse({"recompute_modules": ["mlp"]}).policy == policies.Selective(("mlp",))
    with pytest.raises(autoremat.OptionsError, match="belongs to policy=\"selective\", and the policy is 'full'"):
        autoremat.Options.parse({"policy": "full", "recompute_modules": ["mlp"]})
    with pytest.raises(autoremat.OptionsError, match="recompute_modules='mlp' is not accepted"):
        autoremat.Options.parse({"recompute_modules": "mlp"})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("survey", "profile_step"), ("Survey", "StepProfile"), ("SurveyError", "StepProfileError"),
        ("OrderWarning", "ConstraintWarning"), ("UnplannedWarning", "FallbackWarning"), ("UnplannedError", "PlanningError"),
    ],
)  # fmt: skip
def test_old_names_of_the_package(old, new):
    with pytest.warns(DeprecationWarning, match=f"autoremat.{old} is deprecated.* use autoremat.{new}"):
        assert getattr(autoremat, old) is getattr(autoremat, new)


@pytest.mark.parametrize(("old", "new"), [("chain", "segments"), ("all", "recompute_all"), ("none", "save_all")])
def test_solvers_under_old_names(old, new):
    graph = autoremat.Graph.from_dag([1, 1, 1], [8, 8, 8], [(0, 1), (1, 2), (0, 2)], outputs=[2], num_forward=2)
    with pytest.warns(DeprecationWarning, match=f"use '{new}'"):
        assert autoremat.plan(graph, solver=old).schedule == autoremat.plan(graph, solver=new).schedule


def test_repeatable_ops_of_a_dag():
    with pytest.warns(DeprecationWarning, match="rematerializable="):
        old = autoremat.Graph.from_dag([1, 1], [8, 8], [(0, 1)], repeatable=[False, True])
    assert old == autoremat.Graph.from_dag([1, 1], [8, 8], [(0, 1)], rematerializable=[False, True])


def test_plan_files_of_the_format_before(tmp_path):
    plan = autoremat.plan(chain(4, size=8), 0.9)
    record = json.loads(plan.dumps())
    record["version"] = 2
    columns = record["graph"]["ops"]["columns"]
    for old, new in {"order": "constraint", "insists": "demanded", "traffic_seconds": "memory_bound_seconds"}.items():
        columns[columns.index(new)] = old
    for old, new in {"pinned": "must_run", "whole_runs": "fusion_groups_hold_buffers"}.items():
        record["graph"][old] = record["graph"].pop(new)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    assert autoremat.Plan.load(path).schedule == plan.schedule


def test_reports_and_plans_of_a_model():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.ones(4, 8)
    report = autoremat.explain(model, x, options={"compiler": "aot_eager", "memory_budget": 1.0})
    for old, new in (("inner", "compiler"), ("reserved_bytes", "code_headroom_bytes"), ("loss_parts", "loss_chunks")):
        with pytest.warns(DeprecationWarning, match=f"Report.{old} is deprecated.* use {new}"):
            assert getattr(report, old) == getattr(report, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        report.__getattr__("nothing")
    fields = json.loads(report.to_json())
    fields["inner"], fields["measured_share"], fields["untimed_ops"] = fields.pop("compiler"), 0.0, 0
    for value in fields["values"]:
        value["fate"] = value.pop("decision")
    assert autoremat.Report.from_json(json.dumps(fields)) == dataclasses.replace(report, plan=None)
    with pytest.warns(DeprecationWarning, match="selective_checkpoint_context"):
        assert report.plan.as_selective_checkpoint_context(model) is not None
