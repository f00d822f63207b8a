"""Warnings name the user's line, however deep they come from."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import autoremat
from autoremat.basics.errors import BudgetWarning, ConstraintWarning, FallbackWarning, OptionWarning
from autoremat.basics.warn import warn_user

OURS = (BudgetWarning, ConstraintWarning, FallbackWarning, OptionWarning)
EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}


def inside(module: str, called: Callable[[], object]) -> Callable[[], object]:
    """A function that calls ``called`` from a frame of another module."""
    namespace: dict[str, Any] = {"__name__": module, "called": called}
    exec(compile("def call():\n    return called()", f"/elsewhere/{module}.py", "exec"), namespace)
    return namespace["call"]


def through(*modules: str) -> Callable[[], object]:
    """A function that warns from within frames of ``modules``, the innermost last."""
    call: Callable[[], object] = functools.partial(warn_user, "text", OptionWarning)
    for module in reversed(modules):
        call = inside(module, call)
    return call


@pytest.mark.parametrize(
    "modules",
    [
        ("torch._dynamo.b", "autoremat.compiler.a"),
        ("autoremat.cli", "torch", "contextlib", "torch._dynamo.b", "functools", "autoremat"),
    ],
)
def test_frames_of_torch_and_of_the_package_are_passed_over(modules):
    with pytest.warns(OptionWarning) as caught:
        through(*modules)()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", ["torch_geometric.nn", "autorematic", "__main__"])
def test_the_innermost_frame_of_another_package_is_named(module):
    with pytest.warns(OptionWarning) as caught:
        through(module, "torch._dynamo.b", "autoremat.compiler.a")()
    assert caught[0].filename == f"/elsewhere/{module}.py"
    assert caught[0].lineno == 2


def test_without_a_frame_of_the_user_the_warning_comes_all_the_same():
    frames = inside("torch.a", inside("autoremat.b", functools.partial(warn_user, "text", OptionWarning)))
    with ThreadPoolExecutor(1, initializer=frames) as pool, pytest.warns(OptionWarning, match="text"):
        pool.submit(int).result()


@contextmanager
def warned() -> Iterator[None]:
    """Checks that all warnings of the package, at least one, name a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = [one for one in caught if one.category in OURS]
    assert own
    assert {one.filename for one in own} == {__file__}, own


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
    with warned():
        way()
