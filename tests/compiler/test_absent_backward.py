"""A budget that reaches no graph with a backward is told of, with the reason, and evaluation is not."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import autoremat
from autoremat.basics.errors import OptionWarning
from autoremat.compiler import absent_backward
from autoremat.torch_private import dynamo, frames

BUDGET = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": "1MiB"}
WEIGHT, X = torch.randn(8, 8), torch.randn(4, 8)


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ weight).square().mean()


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(absent_backward, "_trained", WeakTensorKeyDictionary())
    monkeypatch.setattr(frames, "reasons", frames.Reasons())


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
    with warnings.catch_warnings():
        warnings.simplefilter("error", OptionWarning)
        function.requires_grad_(False)
        function(X)
    with pytest.warns(OptionWarning, match="has no backward"):
        compiled(model(4).requires_grad_(False))(X)  # other sizes: Dynamo asks for a graph of its own
    assert len(absent_backward._trained) == 4
    del function
    gc.collect()
    torch.compiler.reset()
    gc.collect()
    assert len(absent_backward._trained) == 0


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return (x @ BROKEN).sum()


BROKEN = torch.randn(8, 8, requires_grad=True)


@pytest.mark.filterwarnings("error::autoremat.basics.errors.OptionWarning")
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
