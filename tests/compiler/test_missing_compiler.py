"""Without a C++ compiler, Inductor's own error comes at once, before anything is measured or planned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config
from torch._inductor.exc import InvalidCxxCompiler

import autoremat
from autoremat.basics.errors import find_cause
from autoremat.compiler import dynamo_backend

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
    monkeypatch.setattr(dynamo_backend, "_compile_whole", lambda *_: pytest.fail("it is too late for this error"))
    with pytest.raises(Exception, match=r"No working C\+\+ compiler found") as caught:
        step(**options)
    assert find_cause(caught.value, InvalidCxxCompiler)
    assert not find_cause(caught.value, autoremat.AutorematError)


@config.patch({"cpp.cxx": NOWHERE})
def test_uncompiled_graphs_need_none():
    step(compiler="aot_eager")
