import copy
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import ROOT

import autoremat
from autoremat.basics import errors

PACKAGE = Path(autoremat.__file__).parent

OCCUPANTS = (
    errors.Occupant("add_2", 4 * 2**20, "", ""),
    errors.Occupant("log_softmax", 64 * 2**20, "loss", "train.py:31 in step"),
    errors.Occupant("mm_7", 4 * 2**20, "layers.3.mlp", "model.py:12 in forward"),
)


def infeasible(**changes):
    arguments = {
        "budget_bytes": 100 * 2**20,
        "minimum_bytes": 150 * 2**20 + 1,
        "lower_bound_bytes": 120 * 2**20,
        "occupants": OCCUPANTS,
        "device": "cuda:0",
    }
    return errors.BudgetInfeasible(**arguments | changes)


def test_message_of_an_infeasible_budget():
    said = str(infeasible())
    for part in (
        "cuda:0",
        "104857600 bytes",
        "157286401 bytes",
        "125829120 bytes",
        "(3 tensors, 72.00 MiB)",
        "CUDA out of memory.",
    ):
        assert part in said
    assert re.search(r"64.00 MiB  log_softmax .*\n +4.00 MiB  add_2 .*\n +4.00 MiB  mm_7  +layers.3.mlp  model.py:12", said)
    assert re.search(r'raise memory_budget to 157286401 \(150.00 MiB\)(.|\n)*on_infeasible="best_effort"', said)


def test_what_binds_the_minimum_is_named():
    parts = [
        ("gradients", 60 * 2**20),
        ("operands of mm_7", 30 * 2**20),
        ("workspace of mm_7", 8 * 2**20),
        ("tangents", 2 * 2**20),
    ]
    error = infeasible(parts=parts)
    assert "60.00 MiB (60%) of gradients, 30.00 MiB (30%) of operands of mm_7" in str(error)
    assert str(errors.BudgetInfeasible(**error.figures() | {"occupants": error.occupants})) == str(error)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AutorematError)]
WITH_FIGURES = (errors.BudgetInfeasible, errors.DeviceTooSmall)
ALL_ERRORS = [
    *(kind("text") for kind in KINDS if kind not in WITH_FIGURES), errors.AgreementError("rank 1 has ended", 1), infeasible(),
    infeasible(plan_file="plan.json"), infeasible(occupants=(), device=None, rank=3),
    errors.DeviceTooSmall(part="first step", budget_bytes=1, minimum_bytes=2, lower_bound_bytes=2, occupants=OCCUPANTS),
]  # fmt: skip


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_error_that_says_all_is_shown_without_its_way_through_the_planner(inner):
    model = torch.nn.Linear(64, 64)
    options = {"memory_budget": 1000, "compiler": inner, "cost_model": "roofline"}
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.randn(64, 64))
    shown = "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value.inner_exception, errors.BudgetInfeasible)
    assert shown.count("no plan was found") == 1
    frames = [line for line in shown.splitlines() if line.lstrip().startswith(f'File "{PACKAGE}/')]
    assert len(frames) == 1


def test_an_error_is_imported_without_the_planner():
    code = "import sys, autoremat; autoremat.BudgetInfeasible; print(*sorted(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    modules = set(answer.stdout.split())
    assert "autoremat.basics.errors" in modules
    assert not {"autoremat.planner", "autoremat.options", "numpy", "rich", "ortools", "torch"} & modules


def test_causes_end_where_what_wraps_an_error_is_its_context():
    error, wrapper, later = ValueError(), RuntimeError(), KeyError()
    vars(wrapper)["inner_exception"], error.__context__, later.__context__ = error, wrapper, error
    assert list(errors.causes(later)) == [later, error, wrapper]
    assert errors.find_cause(later, errors.PlanInvalid) is None


OURS = (errors.BudgetWarning, errors.ConstraintWarning, errors.FallbackWarning, errors.OptionWarning)
EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="autoremat", options=EAGER | options)


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().square().sum()


def x() -> torch.Tensor:
    return torch.randn(64, requires_grad=True)


def over_budget() -> None:
    compiled(loss, memory_budget=1, on_infeasible="best_effort")(x()).backward()


def without_backward() -> None:
    compiled(lambda x: x.cos().sum(), memory_budget="1GiB")(torch.randn(64))


def late_defaults() -> None:
    compiled(loss)(x()).backward()
    try:
        autoremat.configure(memory_budget="1GiB")
    finally:
        autoremat.configure()


def useless_options() -> None:
    compiled(loss, memory_budget="1GiB", host_memory="1GiB", tiles=4, chunk_loss=4, early_gradients=4)(x()).backward()


def unmatched_policy() -> None:
    compiled(loss, memory_budget="1GiB", save=["*.nothing"])(x()).backward()


def several_open_calls() -> None:
    run = compiled(lambda x: loss(x).reshape(1), memory_budget="1KiB", on_infeasible="best_effort")
    kept = [run(x()) for _ in range(3)]
    sum(kept).sum().backward()


def unknown_variable() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOREMAT_NONSENSE", "1")
        compiled(loss)(x()).backward()


def fallback() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoremat.compiler.joint_graph.capture", lambda *_, **__: 1 / 0)
        compiled(loss, on_planning_error="fallback")(x()).backward()


WAYS = [over_budget, without_backward, late_defaults, useless_options, unmatched_policy, several_open_calls, unknown_variable,
        fallback]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_warnings_of_steps_name_the_users_file(way):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # after a graph break, a graph without a backward may be a part
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way()
    own = [one for one in caught if one.category in OURS]
    assert own
    assert {one.filename for one in own} == {__file__}, own
