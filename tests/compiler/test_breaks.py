"""What is said of functions that Dynamo breaks or leaves alone, of which the backend hears little or nothing."""

from __future__ import annotations

import contextlib
import pickle
import re
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, CaptureError, StepProfileError
from autoremat.compiler import breaks, dynamo_backend
from autoremat.report import registry
from autoremat.torch_private import dynamo, frames

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's look at inputs

OPTIONS = {"compiler": "aot_eager"}
REASON = r"Dynamo broke graphs(.|\n)*Dynamo does not support RNN, GRU, or LSTM. Set .*allow_rnn=True"


@pytest.fixture
def nothing_yet(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(registry, "_reports", [])
    monkeypatch.setattr(registry, "_graphs_seen", 0)
    monkeypatch.setattr(breaks, "_told", weakref.WeakKeyDictionary())
    monkeypatch.setattr(frames, "reasons", frames.Reasons())
    torch._dynamo.utils.counters.clear()


def with_lstm():
    lstm, head = nn.LSTM(8, 8), nn.Linear(8, 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return head(lstm(x)[0]).square().mean()

    return loss, torch.randn(5, 2, 8)


@pytest.fixture
def left_whole() -> bool:
    """Whether Dynamo leaves alone all of a function that calls an LSTM; torch 2.15 breaks the graph there."""
    graphs = []
    loss, x = with_lstm()
    torch.compile(loss, backend=lambda gm, _: graphs.append(gm) or gm)(x)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return not graphs


def test_reports_are_a_list_that_says_why_it_is_empty(nothing_yet):
    found = autoremat.reports()
    assert found == []
    assert isinstance(found, list)
    assert repr(found).startswith(
        "[] (no graph with a backward was compiled by autoremat in this process.\nThe backend was handed"
    )
    for index in (-1, 0):
        with pytest.raises(IndexError, match=r"handed no graph(.|\n)*nn.LSTM.*allow_rnn(.|\n)*DistributedDataParallel"):
            found[index]
    assert found[1:] == []


def test_graphs_without_a_backward_are_told_of(nothing_yet):
    with torch.no_grad():
        torch.compile(nn.Linear(4, 4), backend="autoremat", options=OPTIONS)(torch.randn(2, 4))
    with pytest.raises(IndexError, match=r"handed 1 graph without a backward: gradient mode was off"):
        autoremat.reports()[-1]


def test_reports_that_are_there_are_a_list(nothing_yet):
    torch.compile(nn.Linear(4, 1), backend="autoremat", options=OPTIONS)(torch.randn(2, 4)).sum().backward()
    found = autoremat.reports()
    assert found[-1] is found[0]
    assert repr(found).startswith("[<Report: no budget")
    with pytest.raises(IndexError, match="there are 1 reports"):
        found[1]


def test_an_rnn_that_dynamo_leaves_alone_is_told_of_once(left_whole, nothing_yet):
    loss, x = with_lstm()
    compiled = torch.compile(loss, backend="autoremat", options={**OPTIONS, "memory_budget": "1GiB"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            breaks.listen()  # as the backend does as it is looked up
            compiled(x).backward()
            torch.compiler.reset()
    (line,) = [str(one.message) for one in caught if one.category is BudgetWarning]
    assert line.startswith("memory_budget='1GiB' does not hold in `loss`")
    assert "RNN, GRU, or LSTM" in line
    assert "torch._dynamo.config.allow_rnn = True" in line
    assert re.search(REASON, breaks.what_dynamo_said())
    if left_whole:
        with pytest.raises(IndexError, match=rf"handed no graph(.|\n)*{REASON}"):
            autoremat.reports()[-1]
    else:
        assert [r.recomputed_ops for r in autoremat.reports()] == [0, 0]


def test_an_rnn_at_which_dynamo_breaks_a_function_is_told_of_once(nothing_yet, monkeypatch):
    monkeypatch.setattr(dynamo, "WITHOUT_RNN", "graph_break")  # as torch 2.15 does at an RNN
    loss, x = in_two_graphs()
    step = torch.compile(loss, backend="autoremat", options={**OPTIONS, "memory_budget": "1GiB"})
    with pytest.warns(BudgetWarning, match="does not hold for an RNN in `loss`.*allow_rnn") as caught:
        step(x).backward()
    assert len(caught) == 1


def test_explain_and_survey_name_what_dynamo_does_not_trace(left_whole):
    loss, x = with_lstm()
    for look, error in ((autoremat.explain, CaptureError), (autoremat.profile_step, StepProfileError)):
        before = frames.reasons.count
        with pytest.raises(error, match=REASON) if left_whole else contextlib.nullcontext():
            look(loss, x, options=OPTIONS)
        assert re.search(REASON, breaks.what_dynamo_said(before))
    with torch._dynamo.config.patch(allow_rnn=True):
        report = autoremat.explain(loss, x, options=OPTIONS)
    assert report.ops > 0
    assert any("mkldnn" in kernel for kernel in report.unknown_workspaces)


def in_two_graphs():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        h = first(x).tanh()
        torch._dynamo.graph_break()
        return second(h).square().mean()

    return loss, torch.randn(64, 8)


ADVICE = (
    r"one graph of several, for Dynamo broke the function(.*graph_break.*)?: share one budget among them, "
    r"by autoremat.profile_step"
)


@pytest.mark.parametrize("generous", [False, True], ids=["the first", "the second"])
def test_a_budget_that_one_graph_of_several_cannot_keep_names_the_survey(generous):
    loss, x = in_two_graphs()
    if not generous:
        with pytest.raises(BudgetInfeasible, match=ADVICE):
            autoremat.explain(loss, x, options={**OPTIONS, "memory_budget": "1KiB"})
    reports = [r for one in [autoremat.explain(loss, x, options=OPTIONS)] for r in (one, *one.others)]
    budget = min(r.minimum_peak_bytes for r in reports) if generous else 1024
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=ADVICE) as raised:
        torch.compile(loss, backend="autoremat", options={**OPTIONS, "memory_budget": budget})(x)
    error = raised.value.inner_exception
    assert str(error).count("autoremat.profile_step") == 1
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_graph_that_is_the_whole_function_has_no_such_advice():
    with pytest.raises(BudgetInfeasible) as raised:
        autoremat.explain(nn.Linear(8, 1), torch.randn(64, 8), options={**OPTIONS, "memory_budget": 1})
    assert "several" not in str(raised.value)


def test_reports_say_that_code_between_graphs_is_not_counted():
    loss, x = in_two_graphs()
    torch.compile(loss, backend="autoremat", options=OPTIONS)(x)
    first, second = (report.notes[-1] for report in autoremat.reports()[-2:])
    assert re.fullmatch(
        r"Dynamo broke the function after this graph \(.*graph_break.*\): the memory of code .* not counted", first
    )
    assert re.fullmatch(
        r"Dynamo broke the function before this graph \(.*graph_break.*\): the memory of code .* not counted", second
    )
    torch.compiler.reset()
    report = autoremat.explain(loss, x, options=OPTIONS)
    assert any(note.startswith("Dynamo broke graphs: the memory of code between") for note in report.notes)
    profile = autoremat.profile_step(loss, x, options=OPTIONS, memory_budget=1.0)
    torch.compile(loss, backend="autoremat", options={**OPTIONS, "memory_budget": profile})(x)
    assert not any("not counted" in note for note in autoremat.reports()[-1].notes)
    assert autoremat.explain(nn.Linear(8, 1), x, options=OPTIONS).notes == ()


def test_a_transform_of_torch_func_around_a_compiled_function_is_told_of_once(nothing_yet):
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


def test_who_waits_has_waited_since_dynamo_began(nothing_yet, monkeypatch):
    seen: list[float] = []

    def said(*_: object, waited: float, **__: object) -> contextlib.AbstractContextManager[None]:
        seen.append(waited)
        return contextlib.nullcontext()

    monkeypatch.setattr(breaks, "time", types.SimpleNamespace(monotonic=iter(range(100, 900, 3)).__next__))
    monkeypatch.setattr(dynamo_backend, "status_if_slow", said)
    breaks.listen()
    torch.compile(nn.Linear(4, 1), backend="autoremat", options=OPTIONS)(torch.randn(2, 4))
    assert len(seen) == 1
    assert seen[0] >= 3
    assert breaks.seconds_in_dynamo() == 0.0
