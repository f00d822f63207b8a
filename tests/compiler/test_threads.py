"""Threads, copies and budgets of one process: what others do while a graph is compiled, and must not see of it."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from oracles import same_bits
from torch import Tensor, fx, nn
from trained_steps import gradients

import autoremat
from autoremat.compiler import compile_loop
from autoremat.options.options import Options
from autoremat.request.surroundings import RECEIVER
from autoremat.step_profile.recording import Recording
from autoremat.torch_private import compilers, hooks, inductor_lowering, symbolic_sizes
from autoremat.torch_private.hooks import held

LIMIT = 300
"""Seconds after which a thread is taken to wait for ever."""


def elsewhere(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(LIMIT)


def test_a_recording_and_planned_sizes_belong_to_their_thread():
    sizes: dict[Any, int] = {Mock(symbol="s0", least=2): 64}
    made = Recording(Options())
    with held(RECEIVER, made.compile), symbolic_sizes.planned_for(sizes):
        assert RECEIVER.get() == made.compile
        assert elsewhere(RECEIVER.get) is None
        assert symbolic_sizes.planned_identity() == "[('s0', 2, 64)]"
        assert elsewhere(symbolic_sizes.planned_identity) == "[]"
    assert RECEIVER.get() is None


def test_a_survey_leaves_the_compilations_of_other_threads_alone():
    inside, compiled = threading.Event(), threading.Event()
    model, other = (nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1)) for width in (32, 48))
    x = torch.ones(64, 16)

    @torch.compiler.disable
    def meet() -> None:
        inside.set()
        assert compiled.wait(LIMIT)

    def step(x: Tensor) -> Tensor:
        meet()
        return model(x).sum()

    def train_other() -> int:
        assert inside.wait(LIMIT)
        before = len(autoremat.reports())
        try:
            torch.compile(other, backend="autoremat", options={"compiler": "aot_eager"})(x).sum().backward()
        finally:
            compiled.set()
        return len(autoremat.reports()) - before

    with ThreadPoolExecutor(1) as pool:
        reports = pool.submit(train_other)
        profile = autoremat.profile_step(step, x, options={"compiler": "aot_eager"})
        assert reports.result(LIMIT) == 1
    assert len(profile.step.graphs) == 1


def graph_of(width: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph as Dynamo hands it over, and its inputs."""

    def compute(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        return ((x @ up).tanh().exp() @ down,)

    torch.manual_seed(width)
    inputs = [torch.randn(128, 32), torch.randn(32, width, requires_grad=True), torch.randn(width, 32, requires_grad=True)]
    return fx.symbolic_trace(compute), inputs


POINTS = {
    "before compilation": (compilers, "compile_with_inductor"),
    "planning": (compile_loop, "plan_graph"),
    "after code generation": (inductor_lowering, "_lowered_peak"),
}
"""Functions that run while a graph is compiled, each once or more."""


class Visits:
    """Calls a visitor in another thread, once at each of the points of a compilation, and waits for it."""

    def __init__(self, visitor: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.visitor, self.results = visitor, {}
        self.threads: set[int] = set()
        for point, (module, name) in POINTS.items():
            monkeypatch.setattr(module, name, self.wrapped(point, getattr(module, name)))
        monkeypatch.setattr(inductor_lowering, "_pin_order", self.noted(inductor_lowering._pin_order))

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose threads are kept."""

        def run(*arguments: Any, **named: Any) -> Any:
            self.threads.add(threading.get_ident())
            return function(*arguments, **named)

        return run

    def wrapped(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` after a visit, which takes place at the first call."""
        noted = self.noted(function)

        def run(*arguments: Any, **named: Any) -> Any:
            if point not in self.results:
                self.results[point] = None  # the visitor may come here too, if hooks do not keep to their thread
                self.results[point] = elsewhere(lambda: self.visitor(point))
            return noted(*arguments, **named)

        return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_plain_inductor_compiles_and_runs_backwards_at_all_points_of_our_compilation(monkeypatch):
    def compile_ours() -> autoremat.Report:
        before = len(autoremat.reports())
        autoremat.backend(*graph_of(96), options={"memory_budget": "1MiB", "cost_model": "roofline"})
        (report,) = autoremat.reports()[before:]
        return report

    def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def model_of(width: int) -> nn.Module:
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1))

    def visit(point: str) -> bool:
        lazy, loss = known[point]
        fresh = model_of(144)
        expected = gradients_of(fresh(x).sum(), fresh), gradients_of(lazy(x).sum(), lazy)
        found = gradients_of(torch.compile(fresh)(x).sum(), fresh), gradients_of(loss, lazy)
        return all(torch.allclose(a, b, atol=1e-5) for one, two in zip(found, expected, strict=True)
                   for a, b in zip(one, two, strict=True))  # fmt: skip

    x = torch.randn(64, 16)
    with compilers.without_caches():
        alone = compile_ours()
        known = {}
        for point in POINTS:
            model = model_of(80)
            known[point] = model, torch.compile(model)(x).sum()
        visits = Visits(visit, monkeypatch)
        report = compile_ours()
    assert visits.results == dict.fromkeys(POINTS, True)
    assert visits.threads == {threading.get_ident()}
    assert (report.compiled_peak_bytes, report.replans) == (alone.compiled_peak_bytes, alone.replans)


def test_a_substitute_acts_in_its_thread_and_is_put_back():
    module = ModuleType("module")
    module.double = double = lambda number: 2 * number
    entered, left = threading.Event(), threading.Event()

    def second() -> int:
        with hooks.substituted(module, "double", lambda number: 20):
            entered.set()
            assert left.wait(LIMIT)
            return module.double(5)

    with ThreadPoolExecutor(1) as pool:
        with hooks.substituted(module, "double", lambda number: 7):
            other = pool.submit(second)
            assert entered.wait(LIMIT)
            assert module.double(5) == 7
            assert elsewhere(lambda: module.double(5)) == 10
        assert module.double(5) == 10
        left.set()
        assert other.result(LIMIT) == 20
    assert module.double is double


@pytest.mark.slow
def test_threads_that_compile_together_keep_their_own_budgets():
    model, barrier = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh()))), threading.Barrier(3)
    model_of, x = {share: copy.deepcopy(model) for share in (0.75, 0.85, 1.0)}, torch.linspace(-1, 1, 256 * 32).view(256, 32)

    def train(share: float) -> list[Tensor]:
        options = {"compiler": "aot_eager", "memory_budget": share}
        compiled = torch.compile(model_of[share], backend="autoremat", options=options)
        return gradients(lambda x: compiled(x).exp().mean(), model_of[share], x)

    expected = train(1.0)
    torch._dynamo.reset()
    before = len(autoremat.reports())
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda share: barrier.wait() >= 0 and train(share), model_of))
    assert all(all(map(same_bits, one, expected)) for one in found)
    reports = autoremat.reports()[before:]
    assert sorted(r.budget_bytes for r in reports) == [int(s * reports[0].baseline_peak_bytes) for s in sorted(model_of)]
