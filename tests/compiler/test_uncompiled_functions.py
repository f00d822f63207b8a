"""A function that trains uncompiled, although a budget was asked for, says so once, with Dynamo's reason and what to do."""

import itertools
import os
import re
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._python_dispatch import TorchDispatchMode

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.compiler import breaks
from autoremat.torch_private import MINOR, frames

WIDTH, ROWS, TIMES = 8, 32, 2

PLACES = ("first", "middle", "loss")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


def in_a_loop(act: Callable[[Tensor], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def way(layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(TIMES):
            x = layer(x).tanh()
            act(x)
        return x

    return way


def around(context: Callable[[], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def way(layer: nn.Module, x: Tensor) -> Tensor:
        with context():
            return layer(x).tanh()

    return way


def tried(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        x = layer(x).tanh()
        torch._dynamo.graph_break()
    except ValueError:
        pass
    return x.tanh()


def branches(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x).tanh()
        if x.sum() > 1e9:
            x = x * 2
    return x


def chosen(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x).tanh()
        x = x + x[x > 0].sum()
    return x


def one_twice(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x)
        x = Product.apply(x, x)
    return x


def averaged(layer: nn.Module, x: Tensor) -> Tensor:
    norm = averaged.norms[id(layer)]
    for _ in range(TIMES):
        x = norm(layer(x))
    return x


averaged.norms = {}  # type: ignore[attr-defined]


def recurrent(layer: nn.Module, x: Tensor) -> Tensor:
    return NETWORK(layer(x)[None])[0][0]


NETWORK = nn.LSTM(WIDTH, WIDTH)


def repeated(layer: nn.Module, x: Tensor) -> Tensor:
    return while_loop(lambda i, x: i < TIMES, lambda i, x: (i + 1, layer(x).tanh()), (torch.tensor(0), x))[1]


@torch.compiler.disable
def left(x: Tensor) -> Tensor:
    return x


KINDS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "print": (in_a_loop(lambda x: print(end="")), "print"),
    "disabled": (in_a_loop(left), "disable"),
    "save_on_cpu": (around(torch.autograd.graph.save_on_cpu), "save_on_cpu|marked as skipped"),
    "file": (around(lambda: open(os.devnull)), "open|TextIOWrapper"),  # noqa: SIM115
    "try": (tried, "graph_break"),
    "branch": (branches, "[Dd]ata-dependent"),
    "chosen rows": (chosen, "shape"),
    "one tensor twice": (one_twice, "duplicate"),
    "BatchNorm(momentum=None)": (averaged, "item"),
    "LSTM": (recurrent, r"RNN, GRU, or LSTM(.|\n)*allow_rnn ?= ?True"),
    "while_loop": (repeated, "compiler"),
}
"""The ways by name, each with a pattern that Dynamo's reason matches."""


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).tanh()


def step_with(kind: str, place: str) -> Callable[[Tensor], Tensor]:
    """Returns a training step of three layers whose layer at ``place`` is not compiled."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in PLACES]
    averaged.norms.update({id(layer): nn.BatchNorm1d(WIDTH, momentum=None) for layer in layers})  # type: ignore[attr-defined]
    first, middle, last = (KINDS[kind][0] if at == place else plain for at in PLACES)

    def step(x: Tensor) -> Tensor:
        x = first(layers[0], x)
        x = middle(layers[1], x)
        return last(layers[2], x).square().mean()

    return step


OPTIONS = {"memory_budget": 0.9, "compiler": "aot_eager", "cost_model": "roofline"}


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(breaks, "_told", weakref.WeakKeyDictionary())
    monkeypatch.setattr(frames, "reasons", frames.Reasons())
    breaks.listen()


def warned(run, *calls) -> list[str]:
    """The texts on functions where no budget holds, after ``run`` has been called with each of ``calls``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            run(call)
    texts = [str(one.message) for one in caught if one.category is BudgetWarning]
    return [text for text in texts if "hold" in text]


def compiled(function, **options):
    return torch.compile(function, backend="autoremat", options=OPTIONS | options)


def inputs(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, requires_grad=True)


def cells() -> list[object]:
    """Each kind at one of the places in turn."""
    turns = zip(KINDS, itertools.cycle(PLACES), strict=False)
    return [pytest.param(*cell, marks=[pytest.mark.slow] * (cell[0] == "while_loop"), id=", ".join(cell)) for cell in turns]


@pytest.mark.filterwarnings("ignore")  # of torch, on what these steps do
@pytest.mark.parametrize(("kind", "place"), cells())
def test_each_way_not_to_be_compiled_is_told_of_with_its_reason(kind, place):
    if kind == "one tensor twice" and MINOR < 12:
        pytest.skip("this torch compiles it")
    step = compiled(step_with(kind, place))
    texts = warned(lambda x: step(x).backward(), inputs(), inputs())
    reasons = [text for text in texts if text.startswith("memory_budget=0.9 does not hold")]
    assert any(re.search(KINDS[kind][1], text) for text in reasons)
    assert len(texts) == len({text.partition(",")[0] for text in texts})  # each function once
    assert re.search(KINDS[kind][1], breaks.what_dynamo_said())


layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)])


def looped(x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
        torch._dynamo.graph_break()
    return x.mean()


def looped_too(x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
        print(end="")
    return x.mean()


def test_functions_that_do_not_train_or_have_no_budget_are_not_told_of():
    with torch.no_grad():
        assert warned(compiled(looped), inputs()) == []
    torch.compiler.reset()
    with torch.inference_mode():
        assert warned(compiled(looped), torch.randn(4, WIDTH)) == []
    torch.compiler.reset()
    without = torch.compile(looped, backend="autoremat", options={"compiler": "aot_eager"})
    assert warned(without, inputs()) == []
    torch.compiler.reset()
    assert warned(torch.compile(looped, backend="aot_eager"), inputs()) == []
    torch.compiler.reset()
    layers.requires_grad_(False)
    assert warned(compiled(looped), torch.randn(4, WIDTH)) == []
    layers.requires_grad_(True)


def test_warnings_as_errors_reach_the_caller_and_leave_dynamo_whole():
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", BudgetWarning)
            with pytest.raises(BudgetWarning, match="`looped`"):
                compiled(looped)(inputs())
        torch.compiler.reset()  # refuses while a callback is pending
        breaks._told.clear()
        breaks.listen()


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_function_that_is_compiled_too_often_names_the_limit(limit):
    def loss(x: torch.Tensor) -> torch.Tensor:
        return layers[0](x).square().mean()

    step = torch.compile(loss, backend="autoremat", dynamic=False, options=OPTIONS | {"memory_budget": "1MiB"})
    with torch._dynamo.config.patch({limit: 2}):
        (text,) = warned(lambda rows: step(inputs(rows)).backward(), *range(3, 8))
    assert f"torch._dynamo.config.{limit} (2)" in text
    assert "no longer holds in `loss`" in text


def test_a_hidden_error_is_told_of():
    step = compiled(lambda x: layers[0](x).square().mean(), memory_budget="1KiB")
    with torch._dynamo.config.patch(suppress_errors=True):
        (text,) = warned(step, inputs())
    assert "BudgetInfeasible" in text
    assert "suppress_errors" in text


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(MINOR < 13, reason="this torch does not say why it skips a frame")
def test_a_first_step_within_a_mode_of_the_dispatcher_is_told_of():
    def loss(x: torch.Tensor) -> torch.Tensor:
        return layers[0](x).square().mean()

    step = compiled(loss)
    with Mode():
        (text,) = warned(step, inputs())
    assert "outside of that mode" in text
    assert warned(step, inputs()) == []


@pytest.mark.skipif(MINOR < 13, reason="this torch does not say why it skips a frame")
def test_modules_of_torch_that_dynamo_skips_are_told_of():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    model.compile(backend="autoremat", options=OPTIONS)
    known = len(autoremat.reports())
    texts = warned(model, inputs(), inputs())
    if len(autoremat.reports()) > known:
        pytest.skip("this torch compiles such modules")
    (text,) = texts
    assert "`Linear.forward`" in text
    assert "a module with a forward of its own" in text
    torch.compiler.reset()
    breaks._told.clear()
    roomy = torch.compile(model, backend="autoremat", options=OPTIONS | {"memory_budget": "1MiB"})
    assert warned(roomy, inputs()) == []


def test_each_text_has_the_reasons_of_its_function_alone():
    compiled(looped, memory_budget=None)(inputs())
    torch.compiler.reset()
    before = frames.reasons.count
    with pytest.raises(autoremat.CaptureError, match="print") as raised:
        autoremat.explain(looped_too, inputs(), options={"compiler": "aot_eager"})
    assert "looped_too" in str(raised.value)
    assert "graph_break" not in str(raised.value)
    assert "graph_break" not in breaks.what_dynamo_said(before)
    assert "graph_break" in breaks.what_dynamo_said()


def test_the_reason_stands_behind_the_break_too():
    first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    first.register_forward_hook(lambda module, given, output: output.requires_grad_())
    model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    step = compiled(lambda x: model(x).square().mean())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(torch.randn(512, WIDTH)).backward()
    notes = [note for report in autoremat.reports()[-1:] for note in report.notes]
    assert any("requires_grad_()" in note for note in notes)
    assert all("requires_grad_()" in str(one.message) for one in caught if "broke the function" in str(one.message))
