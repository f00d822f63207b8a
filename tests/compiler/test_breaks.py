"""What is said of functions that Dynamo breaks or leaves alone, and of budgets that reach no graph with a backward."""

import contextlib
import gc
import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import autoremat
from autoremat.basics.errors import BudgetWarning, CaptureError, OptionWarning, StepProfileError
from autoremat.compiler import breaks, dynamo_backend
from autoremat.report import registry
from autoremat.torch_private import dynamo, frames

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's look at inputs

OPTIONS = {"compiler": "aot_eager"}
REASON = r"Dynamo broke graphs(.|\n)*Dynamo does not support RNN, GRU, or LSTM. Set .*allow_rnn=True"


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(dynamo_backend, "_trained", WeakTensorKeyDictionary())
    monkeypatch.setattr(registry, "_reports", [])
    monkeypatch.setattr(registry, "_graphs_seen", 0)
    monkeypatch.setattr(breaks, "_told", weakref.WeakKeyDictionary())
    monkeypatch.setattr(frames, "reasons", frames.Reasons())
    torch._dynamo.utils.counters.clear()


def with_lstm():
    lstm, head = nn.LSTM(8, 8), nn.Linear(8, 1)
    return (lambda x: head(lstm(x)[0]).square().mean()), torch.randn(5, 2, 8)


@pytest.fixture
def left_whole() -> bool:
    """Whether Dynamo leaves alone all of a function that calls an LSTM; torch 2.15 breaks the graph there."""
    graphs = []
    loss, x = with_lstm()
    torch.compile(loss, backend=lambda gm, _: graphs.append(gm) or gm)(x)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return not graphs


def test_explain_and_survey_name_what_dynamo_does_not_trace(left_whole):
    loss, x = with_lstm()
    for look, error in ((autoremat.explain, CaptureError), (autoremat.profile_step, StepProfileError)):
        torch.compiler.reset()
        before = frames.reasons.count
        with pytest.raises(error, match=REASON) if left_whole else contextlib.nullcontext():
            look(loss, x, options=OPTIONS)
        assert re.search(REASON, breaks.what_dynamo_said(before))
    with torch._dynamo.config.patch(allow_rnn=True):
        report = autoremat.explain(loss, x, options=OPTIONS)
    assert report.ops > 0
    assert any("mkldnn" in kernel for kernel in report.unknown_workspaces)


def test_reports_say_that_code_between_graphs_is_not_counted():
    layers, x = [nn.Linear(8, 8), nn.Linear(8, 8)], torch.randn(64, 8)

    def log() -> None:
        torch._dynamo.graph_break("as transformers logs `loss_type=None`")

    def loss(x: torch.Tensor) -> torch.Tensor:
        h = layers[0](x).tanh()
        log()
        return layers[1](h).square().mean()

    torch.compile(loss, backend="autoremat", options=OPTIONS)(x)
    for side, note in zip(("after", "before"), (report.notes[-1] for report in autoremat.reports()[-2:]), strict=True):
        assert re.search(rf"{side} this graph \(.*graph_break.* at .*test_breaks.py:\d+\).*not counted. model.loss_type", note)
    torch.compiler.reset()
    report = autoremat.explain(loss, x, options=OPTIONS)
    told = r"Dynamo broke graphs \(.*graph_break.* at .*test_breaks.py:\d+\).*not counted. model.loss_type"
    assert re.search(told, "\n".join(report.notes))
    profile = autoremat.profile_step(loss, x, options=OPTIONS, memory_budget=1.0)
    torch.compile(loss, backend="autoremat", options={**OPTIONS, "memory_budget": profile})(x)
    assert not any("not counted" in note for note in autoremat.reports()[-1].notes)
    assert autoremat.explain(nn.Linear(8, 1), x, options=OPTIONS).notes == ()


def test_a_transform_of_torch_func_around_a_compiled_function_is_told_of_once():
    weight, x = torch.randn(8, 8), torch.randn(4, 8)
    options = {**OPTIONS, "memory_budget": 0.5}
    compiled = torch.compile(lambda weight, x: (x @ weight).square().mean(), backend="autoremat", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            breaks.listen()
            torch.func.grad(compiled)(weight, x)
            torch.compiler.reset()
    (line,) = [str(one.message) for one in caught if one.category is BudgetWarning]
    assert "inside of a transform of torch.func, as in torch.func.grad(compiled)" in line
    with pytest.raises(IndexError, match=r"handed no graph(.|\n)*inside of a transform of torch\.func"):
        autoremat.reports()[-1]


BUDGET = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": "1MiB"}
WEIGHT, X = torch.randn(8, 8), torch.randn(4, 8)


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ weight).square().mean()


def compiled(function, **options):
    return torch.compile(function, backend="autoremat", options=BUDGET | options)


@pytest.mark.parametrize("function", [torch.func.grad(loss), torch.func.vmap(torch.func.grad(loss), (None, 0))])
def test_gradients_by_torch_func_are_told_of(function):
    with pytest.warns(OptionWarning, match=r"no effect on the graph at .*: it computes gradients itself, by torch\.func\.grad"):
        compiled(function)(WEIGHT, X)


def test_a_function_that_requires_no_gradient_is_told_of():
    with pytest.warns(OptionWarning, match=r"it has no backward, because no parameter or input requires a gradient"):
        compiled(loss)(WEIGHT, X)


def test_a_model_that_trains_does_not_silence_another_of_the_same_code():
    def model(width):
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1))

    function = compiled(model(8))
    function(X).sum().backward()
    function.requires_grad_(False)
    function(X)  # a warning would be an error
    with pytest.warns(OptionWarning, match="has no backward"):
        compiled(model(4).requires_grad_(False))(X)  # other sizes: Dynamo asks for a graph of its own
    assert len(dynamo_backend._trained) == 4
    del function
    gc.collect()
    torch.compiler.reset()
    gc.collect()
    assert len(dynamo_backend._trained) == 0


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return (x @ BROKEN).sum()


BROKEN = torch.randn(8, 8, requires_grad=True)


def test_evaluation_and_parts_of_functions_are_not_told_of():
    model = nn.Linear(8, 1)
    function = compiled(lambda x: model(x).mean())
    with torch.no_grad():
        function(X)
    function(X)
    model.requires_grad_(False)
    function(X)  # another graph of a function that trains
    compiled(broken)(X)
    torch.compile(loss, backend="autoremat", options={"compiler": "aot_eager"})(WEIGHT, X)
    torch.compiler.reset()
    autoremat.configure(memory_budget="1MiB")
    torch.compile(nn.Linear(8, 1).requires_grad_(False), backend="autoremat", options={"compiler": "aot_eager"})(X)


def test_gradients_of_torch_autograd_within_a_graph_are_known():
    def penalty(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss(BROKEN, x), BROKEN)[0]

    found = []
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch breaks the graph there")
    with torch._dynamo.config.patch(trace_autograd_ops=True), warnings.catch_warnings():
        torch.compile(penalty, backend=lambda gm, _: found.append(gm) or gm)(X)
    assert [dynamo.computes_gradients(gm) for gm in found] == [True]
