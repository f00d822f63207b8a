"""Budgets on reserved bytes: plans and code for a card by name, the allocator's settings, errors and warnings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, OptionsError, OptionWarning
from autoremat.compiler import counting
from autoremat.compiler.attempts import Attempt, Purpose, allocated_peak_bytes, code_peak_bytes
from autoremat.options.options import Options
from autoremat.planner.memory.allocations import FREED, Allocations
from autoremat.planner.memory.allocator_settings import CLASSES, MIB, AllocatorSettings
from autoremat.planner.memory.reserved import unsplit_bytes
from autoremat.torch_private import allocator
from autoremat.torch_private.private_name import MINOR

CARD = "H100-80GB"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


class Network(nn.Module):
    """Blocks whose tensors have 3 to 12 MiB, and a mean of squares."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        widths = [768 * (1 + number % 4) for number in range(depth)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, w), nn.GELU(), nn.Linear(w, 256)) for w in widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def explained(lower: bool = False, **options) -> autoremat.Report:
    with torch.device("meta"):
        model, x = Network(), torch.randn(2048, 256)
    return autoremat.explain(model, x, device=CARD, options=options, lower=lower)


@pytest.fixture(scope="module")
def free() -> autoremat.Report:
    return explained()


@pytest.mark.slow
def test_a_budget_bounds_the_reserved_bytes_of_the_plan(free):
    assert free.reserved is not None
    assert free.reserved.bytes == free.reserved.default_bytes > free.peak_bytes
    budget = int(0.6 * free.reserved.bytes)
    allocated, reserved = (explained(memory_budget=budget, count=count) for count in ("allocated", "reserved"))
    assert allocated.counted_bytes == allocated.peak_bytes <= budget < allocated.reserved.bytes
    assert reserved.counted_bytes == reserved.reserved.bytes <= budget
    assert reserved.peak_bytes < reserved.reserved.bytes
    assert reserved.within_budget
    assert "of reserved bytes" in str(reserved)
    assert " reserved" in reserved.summary()
    assert autoremat.Report.from_json(reserved.to_json()).counted_bytes == reserved.counted_bytes


def test_a_share_is_one_of_the_reserved_bytes_of_the_baseline(free):
    whole, part = (explained(memory_budget=share, count="reserved") for share in (1.0, 0.8))
    assert whole.within_budget
    assert whole.budget_bytes >= free.reserved.bytes
    assert part.budget_bytes == pytest.approx(0.8 * whole.budget_bytes, rel=1e-6)
    assert part.reserved.bytes <= part.budget_bytes


@pytest.mark.slow
def test_the_error_names_reserved_and_allocated_bytes_and_the_setting_that_helps():
    with pytest.raises(BudgetInfeasible) as raised:
        explained(memory_budget="30MiB", count="reserved")
    error, text = raised.value, str(raised.value)
    assert error.allocated_bytes < error.minimum_bytes
    assert "least reserved bytes found" in text
    assert "allocated at the peak of that plan" in text
    assert explained(memory_budget=error.minimum_bytes, count="reserved").reserved.bytes <= error.minimum_bytes
    assert BudgetInfeasible(**{**error.figures(), "occupants": error.occupants}).allocated_bytes == error.allocated_bytes


@pytest.mark.slow
def test_the_settings_of_the_allocator_count(free, monkeypatch):
    monkeypatch.setattr(counting, "settings_of_process", lambda: AllocatorSettings(expandable_segments=True))
    report = explained()
    assert report.reserved.bytes == free.reserved.expandable_bytes == report.reserved.expandable_bytes
    assert report.reserved.is_expandable
    assert "expandable_segments" not in str(report)
    budget = int(0.6 * free.reserved.bytes)
    assert explained(memory_budget=budget, count="reserved").reserved.expandable_bytes <= budget


def test_settings_without_a_rule_are_noted(monkeypatch):
    settings = AllocatorSettings(ignored=("garbage_collection_threshold:0.8",))
    monkeypatch.setattr(counting, "settings_of_process", lambda: settings)
    assert "without garbage_collection_threshold:0.8" in str(explained())


def test_the_settings_are_those_of_the_environment(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator.settings_of_process() == AllocatorSettings(largest_split_bytes=64 * MIB)


@pytest.mark.skipif(MINOR < 12, reason="this torch does not tell the settings")
def test_settings_of_the_process_come_first(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:True", raising=False)
    assert allocator.settings_of_process() == AllocatorSettings(expandable_segments=True)


@pytest.mark.slow
def test_the_best_effort_names_the_reserved_bytes():
    report = explained(memory_budget="30MiB", count="reserved", on_infeasible="best_effort")
    assert not report.within_budget
    excess = report.reserved.bytes - 30 * MIB
    assert f"by {excess / MIB:.2f} MiB" in str(report)


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [({"memory_budget": 1.0}, None, "runs on cpu"), ({}, CARD, "no memory_budget")],
)
def test_a_count_without_effect_warns(options, device, reason):
    model, x = Network(1), torch.randn(64, 256)
    with pytest.warns(OptionWarning, match=reason):
        report = autoremat.explain(model, x, device=device, options={"count": "reserved", **options})
    assert report.count == "allocated"


def test_a_compiled_step_on_a_cpu_warns_too():
    options = {"compiler": "aot_eager", "count": "reserved", "memory_budget": 1.0}
    compiled = torch.compile(Network(1), backend="autoremat", options=options)
    with pytest.warns(OptionWarning, match="runs on cpu"):
        compiled(torch.randn(64, 256))
    assert autoremat.reports()[-1].count == "allocated"


def test_other_values_and_places_are_refused():
    with pytest.raises(OptionsError, match="count="):
        Options(count="live")
    with pytest.raises(OptionsError, match="pareto"):
        autoremat.pareto(Network(1), torch.randn(8, 256), options={"count": "reserved"})


def test_the_report_of_an_attempt_has_the_allocated_peak():
    """The decision is on reserved bytes; the accepted code's peak is in allocated ones."""
    facts = {"budget_bytes": 100, "limits": {False: 100, True: 100}}
    over = Attempt(code_peaks={False: 90, True: 120}, allocated_peaks={False: 70, True: 85}, **facts)
    fits = Attempt(20, code_peaks={False: 80, True: 96}, allocated_peaks={False: 60, True: 75}, **facts)
    assert (code_peak_bytes([over, fits]), allocated_peak_bytes([over, fits])) == (96, 75)
    looser = Attempt(-5, Purpose.LOOSEN, code_peaks={False: 90, True: 130}, allocated_peaks={False: 70, True: 99}, **facts)
    back = Attempt(20, Purpose.RETURN, **facts)
    assert (code_peak_bytes([fits, looser, back]), allocated_peak_bytes([fits, looser, back])) == (96, 75)


@pytest.mark.parametrize(("pooled", "settings", "rest"), [
    (frozenset(), AllocatorSettings(), 1.5),  # segments of 14 and 16 MiB; small blocks share one
    (frozenset({0}), AllocatorSettings(), 1.5),
    (frozenset(), AllocatorSettings(expandable_segments=True), 0),
    (frozenset(), AllocatorSettings(roundup_divisions=(4,) * CLASSES), 1.5),  # to 14 and 16 MiB
])  # fmt: skip
def test_the_rest_of_a_block_that_is_not_split_off_counts(pooled, settings, rest):
    events = ((0, int(13.25 * MIB)), (1, int(15.25 * MIB)), (2, 512 * 1024), (1, FREED), (0, FREED), (2, FREED))
    assert unsplit_bytes(Allocations(events, pooled), settings) == int(rest * MIB)


def test_rests_are_those_at_the_peak_of_the_backward():
    """The forward needs more without rests than the backward, whose blocks are larger in all."""
    forward = ((0, 16 * MIB), (1, 40 * MIB), (1, FREED))
    events = (*forward, (2, int(13.25 * MIB)), (3, 26 * MIB), (2, FREED), (3, FREED), (0, FREED))
    assert unsplit_bytes(Allocations(forward), AllocatorSettings()) == 0
    assert unsplit_bytes(Allocations(events, border=len(forward)), AllocatorSettings()) == int(0.75 * MIB)


@pytest.mark.parametrize("pooled", [frozenset({0}), frozenset({1})])
def test_a_pool_without_allocations_in_the_backward_has_no_rest_there(pooled):
    events = ((0, 40 * MIB), (1, 16 * MIB), (0, FREED), (1, FREED), (2, 16 * MIB), (2, FREED))
    assert unsplit_bytes(Allocations(events, pooled, border=4), AllocatorSettings()) == 0
