"""The backend through `torch.compile`: what is obeyed, left alone, refused, logged and reported, and its options."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from block_models import Chain
from folders import ROOT
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config
from torch._inductor.exc import InvalidCxxCompiler
from trained_steps import LEAST

import autoremat
from autoremat import BudgetInfeasible, OptionsError, Report
from autoremat.basics.errors import find_cause
from autoremat.compiler import dynamo_backend, planning

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def Mlp() -> nn.Module:
    return Chain(3, 64, activation=torch.relu)


@pytest.fixture
def new_reports() -> Callable[[], list[Report]]:
    """Gives the reports since the test began."""
    before = len(autoremat.reports())
    return lambda: autoremat.reports()[before:]


def compile_(function, options=None, **arguments):
    return torch.compile(function, backend="autoremat", options=LEAST if options is None else options, **arguments)


def test_inference_goes_untouched(new_reports):
    model, x = Mlp(), torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(compile_(model)(x), model(x))
    assert new_reports() == []


def test_dynamic_sizes_in_views_and_outputs(new_reports):
    weight = nn.Parameter(torch.randn(6, 6))

    def step(x):
        rows = x.shape[0]
        hidden = (x @ weight).view(rows * 2, 3).tanh().exp()
        return hidden.reshape(rows, 6) @ weight, rows + 1, hidden.expand(2, rows * 2, 3)

    compiled = compile_(step, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        outputs, expected = compiled(x), step(x)
        weight.grad = None
        (outputs[0].sum() + outputs[2].sum()).backward()
        found, weight.grad = weight.grad, None
        (expected[0].sum() + expected[2].sum()).backward()
        torch.testing.assert_close(found, weight.grad)
        assert outputs[1] == rows + 1
    assert len(new_reports()) == 2  # up to 4 rows, and up to 8


@pytest.mark.parametrize("count", [1, 2])
def test_that_dynamo_traces_a_function_again_is_no_failure(count, monkeypatch):
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    from autoremat.compiler import dynamo_backend, split_budget

    def restart(*_: object) -> None:
        raise TensorifyScalarRestartAnalysis

    monkeypatch.setattr(dynamo_backend, "compile_graph", restart)
    monkeypatch.setattr(split_budget, "step_of", restart)
    raised = []

    def backend(gm, inputs):
        with pytest.raises(TensorifyScalarRestartAnalysis) as caught:
            dynamo_backend.backend(gm, inputs, options={"memory_budget": "1GiB", "early_gradients": count > 1 and count})
        raised.append(caught.value)
        return gm

    torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend=backend)(torch.randn(4, 8))
    assert len(raised) == 1


def failure(**options: object) -> BaseException:
    """What the backend raised, as `torch.compile` hands it on."""
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(Mlp(), backend="autoremat", options={"compiler": "aot_eager", **options})(torch.randn(8, 64))
    return caught.value.inner_exception


@pytest.mark.parametrize("options", [{"memory_budget": "6 pounds"}, {"max_autotun": True}, {"custom_partitioner_fn": None}])
def test_bad_options_are_refused_when_the_model_is_first_called(options):
    error = failure(**options)
    assert isinstance(error, OptionsError)
    assert next(iter(options)) in str(error)


def test_an_infeasible_budget_says_what_is_possible():
    error = failure(memory_budget=1000)
    assert isinstance(error, BudgetInfeasible)
    assert error.budget_bytes == 1000
    assert 1000 < error.lower_bound_bytes <= error.minimum_bytes
    assert error.occupants
    assert "block_models.py" in str(error)  # where the occupants come from
    torch._dynamo.reset()
    compile_(Mlp(), {"compiler": "aot_eager", "memory_budget": error.minimum_bytes})(torch.randn(8, 64)).backward()
    assert autoremat.reports()[-1].fits
    torch._dynamo.reset()
    assert isinstance(failure(memory_budget=error.minimum_bytes - 1), BudgetInfeasible)


NOWHERE = (None, "/nowhere/c++")


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sum()


def step(**options) -> None:
    compiled = torch.compile(loss, backend="autoremat", options={"memory_budget": 1.0, **options})
    compiled(torch.randn(64, requires_grad=True)).backward()


@pytest.fixture(params=["setting", "option"])
def options(request) -> Iterator[dict[str, object]]:
    """Options of a step whose compiler is nowhere."""
    with config.patch({"cpp.cxx": NOWHERE} if request.param == "setting" else {}):
        yield {} if request.param == "setting" else {"cpp.cxx": NOWHERE}


def test_the_error_comes_before_a_plan(options, monkeypatch):
    monkeypatch.setattr(dynamo_backend, "_compile_request", lambda *_: pytest.fail("it is too late for this error"))
    with pytest.raises(Exception, match=r"No working C\+\+ compiler found") as caught:
        step(**options)
    assert find_cause(caught.value, InvalidCxxCompiler)
    assert not find_cause(caught.value, autoremat.AutorematError)


@config.patch({"cpp.cxx": NOWHERE})
def test_uncompiled_graphs_need_none():
    step(compiler="aot_eager")


def test_a_minimum_without_code_is_said_to_be_simulated(monkeypatch):
    monkeypatch.setattr(planning, "QUICK_OPS", 0)
    with pytest.raises(BudgetInfeasible) as raised:
        autoremat.explain(Mlp(), torch.randn(8, 64), options={"memory_budget": 1, "cost_model": "roofline"})
    assert raised.value.is_simulated


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
options = {"memory_budget": 0.9, "compiler": "aot_eager", "on_infeasible": "best_effort"}
torch.compile(model, backend="autoremat", options=options)(torch.randn(64, 8)).sum().backward()
"""


def test_one_line_per_graph_at_info(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    with caplog.at_level(logging.INFO, logger="autoremat"):
        compiled = torch.compile(model, backend="autoremat", options={"compiler": "aot_eager", "memory_budget": "1GiB"})
        compiled(torch.randn(64, 8)).sum().backward()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "autoremat"]
    assert line == autoremat.reports()[-1].summary()
    for word in ("within 1.00 GiB", "saving all", "; time +"):
        assert word in line


@pytest.mark.slow
def test_torch_switches_it_on_and_traces_the_report(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "TORCH_LOGS": "+autoremat", "TORCH_TRACE": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stderr.splitlines() if "the budget of" in line and "torch alone" in line]
    assert len([line for line in lines if " INFO" in line or line.startswith("I")]) == 1, done.stderr
    (trace,) = tmp_path.glob("*.log")
    text = trace.read_text().splitlines()
    marks = [number for number, line in enumerate(text) if '"autoremat_report"' in line]
    assert len(marks) == 1
    payload = []
    for line in text[marks[0] + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    report = autoremat.Report.from_json("\n".join(payload))
    assert report.predicted_peak_bytes > 0
    assert json.loads(text[marks[0]].split("] ", 1)[1])["artifact"]["encoding"] == "json"
