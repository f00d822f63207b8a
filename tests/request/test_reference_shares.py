"""Budgets as floats: a share of the peak that the step needs without autoremat, and how that peak is found."""

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
from block_models import Gelu, Regions, Tied, block
from torch import nn
from trained_steps import measured

import autoremat
from autoremat.basics.errors import BudgetWarning, best_effort_message
from autoremat.compiler import dynamo_backend, reference
from autoremat.compiler.peers import Peers
from autoremat.compiler.problem import Problem
from autoremat.options.options import Options
from autoremat.report.report import Report
from autoremat.request.request import Request, RequestedLimits

EAGER = {"compiler": "aot_eager"}
INPUT = (torch.randn(512, 64),)


def explained(budget: float | int, **options: object) -> Report:
    return autoremat.explain(Gelu(), *INPUT, options={"memory_budget": budget, "cost_model": "roofline", **options})


def test_a_share_is_one_of_the_code_that_inductor_generates_alone():
    report = explained(0.7)
    assert report.reference_source == reference.CODE
    assert report.reference_bytes < report.baseline_peak_bytes
    assert (report.budget_share, report.budget_bytes) == (0.7, math.floor(0.7 * report.reference_bytes))
    assert report.predicted_peak_bytes + report.code_headroom_bytes <= report.budget_bytes
    assert Report.from_json(report.to_json()).reference_bytes == report.reference_bytes
    assert explained(report.budget_bytes).reference_bytes is None


def test_a_reference_that_is_no_code_warns(monkeypatch):
    """Inductor may fail, and the simulator cannot follow every partition of torch's."""
    alone = explained(0.95)
    reference._known.clear()
    monkeypatch.setattr(reference.compilers, "compile_with_inductor", lambda *_: 1 / 0)
    with pytest.warns(BudgetWarning, match="share of a simulated peak"):
        simulated = explained(0.95)
    assert simulated.reference_source == reference.TORCH
    assert simulated.reference_bytes == pytest.approx(alone.reference_bytes, rel=0.1)
    monkeypatch.setattr(reference, "torchs_plan", lambda *_: None)
    with pytest.warns(BudgetWarning, match="step without recomputation"):
        assert explained(0.95).reference_source == reference.BASELINE
    reference._known.clear()


def test_the_whole_reference_is_always_feasible():
    """Also where constraints demand more."""
    report = explained(1.0, save=["aten.*"])
    assert report.reference_source == reference.SMALLEST
    assert report.predicted_peak_bytes + report.code_headroom_bytes <= report.budget_bytes == report.reference_bytes
    assert report.fits


def test_a_step_has_a_reference_of_its_own():
    model, (x,) = Gelu(), INPUT
    profile = autoremat.profile_step(model, x, memory_budget=0.9, options={"cost_model": "roofline"})
    assert profile.budget_bytes == math.floor(0.9 * profile.reference_peak_bytes)
    assert profile.minimum_peak_bytes <= profile.reference_peak_bytes < profile.baseline_peak_bytes
    assert profile.within(1.0).peak_bytes <= profile.reference_peak_bytes
    assert "reference peak" in str(profile)


def blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(count)), nn.Linear(64, 1))


def compiled(model: nn.Module, share: float = 0.6, **options: object):
    return torch.compile(
        lambda x: model(x).square().mean(), backend="autoremat", options=EAGER | {"memory_budget": share, **options}
    )


def test_a_smaller_last_batch_may_use_the_bytes_of_the_first():
    step = compiled(blocks(), 0.5)
    for size in (256, 256, 120):
        step(torch.randn(size, 64)).backward()
    first, last = autoremat.reports()[-2:]
    assert first.granted_bytes is None
    assert math.floor(0.5 * last.reference_bytes) < last.minimum_peak_bytes  # its own share would be too little
    assert last.budget_bytes == last.granted_bytes == first.budget_bytes
    assert last.fits


def test_a_plan_for_granted_bytes_holds_for_no_larger_sizes():
    """Otherwise the first batch of the next epoch would run under the plan of the small one."""
    model = blocks()
    step = compiled(model, 0.5)
    peaks, sizes = [], (256, 120)
    for size in 2 * sizes:
        model.zero_grad(set_to_none=True)
        x = torch.randn(size, 64)
        with autoremat.track_peak("cpu") as peak:
            step(x).backward()
        peaks.append(peak.bytes)
    assert max(peaks[len(sizes) :]) <= autoremat.reports()[-1].budget_bytes


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: nn.Sequential(f)], ids=["module", "container"])
def test_a_whole_function_that_does_not_fit_its_share_warns_and_needs_the_least(wrap):
    def step(share, **options):
        torch._dynamo.reset()
        fitting = EAGER | {"memory_budget": share, **options}
        torch.compile(wrap(blocks()), backend="autoremat", options=fitting)(torch.randn(64, 64)).sum().backward()
        return autoremat.reports()[-1]

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"memory_budget=0.1\b.* 10 % of the ") as refused:
        step(0.1, on_infeasible="raise")
    with pytest.warns(BudgetWarning, match=r"memory_budget=0.1, 10 % of the .* least share that works is 0\.\d+") as warned:
        report = step(0.1)
    least = float(re.search(r"share that works is ([\d.]+\d)", str(warned[0].message))[1])
    assert f"raise memory_budget to {least:g}, or to {report.peak_bytes} " in str(refused.value)
    assert report.peak_bytes == report.minimum_peak_bytes > report.budget_bytes
    assert "peak. No share works, for it needs more" in best_effort_message("the step", 65, 50, 0.8, reference=63)
    assert "KiB, module 0" in str(report)
    assert step(least).fits
    with pytest.warns(BudgetWarning):
        step(least - 0.001)


@pytest.mark.parametrize("trains", [True, False])
def test_bytes_are_strict_except_in_evaluation(trains):
    model = blocks().train(trains)
    step = torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": "1KiB"})
    if trains:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no plan was found"):
            step(torch.randn(64, 64))
        return
    with pytest.warns(BudgetWarning, match="evaluation mode"):
        step(torch.randn(64, 64))


def test_another_model_has_a_share_of_its_own():
    x = torch.randn(256, 64)

    def step(model, share):
        torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": share})(x).square().mean().backward()
        return autoremat.reports()[-1]

    large, small = blocks(6), blocks(3)
    assert step(large, 0.7).granted_bytes is None
    assert step(small, 0.7).granted_bytes is None
    assert step(large, 0.65).granted_bytes is None
    torch._dynamo.reset()
    assert step(large, 0.7).granted_bytes is None


@dataclasses.dataclass
class Ranks:
    """A session of this process and of one more, whose earlier graph was granted ``theirs``."""

    theirs: int | None

    def exchange(self, _, terms):
        return {0: terms, 1: {**terms, "granted": self.theirs}}


@pytest.mark.parametrize(("ours", "theirs", "agreed"), [(300, 200, 200), (200, 300, 200), (300, 0, 0)])
def test_ranks_use_the_least_bytes_that_one_of_them_was_granted(ours, theirs, agreed):
    request = Request(Options(cost_model="roofline"), RequestedLimits(reference_share=0.5, granted_bytes=ours))
    found = Peers(Ranks(theirs)).agree(Problem(request), torch.device("cpu"))
    assert found.request.limits == RequestedLimits(reference_share=0.5, granted_bytes=agreed)


class Broken(nn.Module):
    """Blocks, a break of the graph, and a loss, which has nothing to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(*(block() for _ in range(6))), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads those of a graph's inputs
def test_the_graphs_of_a_broken_function_train_under_one_share(monkeypatch, caplog):
    monkeypatch.setattr(dynamo_backend, "_given", set())
    model, x = Broken(), torch.randn(512, 64)
    before = len(autoremat.reports())
    step = torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": 0.6})
    for _ in range(2):
        step(x).backward()
    first, last = autoremat.reports()[before:]
    assert caplog.text.count("Dynamo broke the function") == 1
    assert first.within_budget
    assert not last.within_budget  # the share of its own reference peak is too little
    assert first.saved_bytes + last.peak_bytes <= 0.6 * (first.reference_saved_bytes + last.reference_bytes)
    assert all("one graph of several" in str(report) and "OVER" not in str(report) for report in (first, last))
    previewed = autoremat.explain(model, x, options=EAGER | {"memory_budget": 0.6})
    assert previewed.predicted_peak_bytes == first.predicted_peak_bytes
    assert previewed.others[0].predicted_peak_bytes == last.predicted_peak_bytes


def test_a_broken_step_over_its_share_warns():
    """Dynamo breaks at the hook. What follows it is the only graph."""
    model, x = blocks(8), torch.randn(512, 64)
    model[6].register_full_backward_hook(lambda *_: None)
    step = compiled(model)
    with pytest.warns(autoremat.BudgetWarning, match="Dynamo broke the function"):
        step(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


STEPS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "gelu": lambda: (Gelu(), torch.randn(512, 64)),
    "tied": lambda: (Tied(500, 32), torch.randint(500, (512,))),
    "regions": lambda: (Regions(*(block() for _ in range(4))), torch.randn(512, 64)),
    "batch norm in regions": lambda: (Regions(*(normalized() for _ in range(4))), torch.randn(32, 8, 32, 32)),
}


def measured_alone(step: str, backend: str) -> tuple[int, nn.Module, torch.Tensor]:
    """Returns the measured peak of a step without this package, and the step."""
    model, x = STEPS[step]()
    _, peak = measured(torch.compile(model, backend=backend), model, x)
    return peak, model, x


@pytest.mark.parametrize("step", STEPS)
def test_the_reference_of_uncompiled_code_is_what_aot_eager_needs(step):
    """Torch's partition recomputes checkpointed regions there too."""
    alone, model, x = measured_alone(step, "aot_eager")
    report = autoremat.explain(model, x, options={"compiler": "aot_eager"} | {"memory_budget": 1.0})
    assert report.reference_source in (reference.TORCH, reference.SMALLEST)
    assert report.reference_bytes == pytest.approx(alone, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_reference_is_what_plain_inductor_needs(step):
    alone, model, x = measured_alone(step, "inductor")
    report = autoremat.explain(model, x, options={"memory_budget": 0.95, "cost_model": "roofline"})
    assert report.reference_source == reference.CODE
    assert report.reference_bytes == pytest.approx(alone, rel=0.03)
