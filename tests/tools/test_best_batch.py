"""``autoremat.best_batch`` on small models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.tools.size_search import seconds_of

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}

model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 32)


@pytest.mark.slow
def test_the_best_of_given_sizes_has_the_most_samples_per_second():
    found = autoremat.best_batch(rows, loss, "400KiB", candidates=(256, 32, 64, 1024, 64), options=EAGER)
    assert [size for size, _, _ in found.tried] == [32, 64, 256, 1024]
    speeds = {size: size / seconds for size, seconds, _ in found.tried}
    assert found.samples_per_second == speeds[found.size] == max(speeds.values())
    assert speeds[1024] == 0.0
    assert found.report.fits
    for size, seconds, peak in found.tried[:3]:
        again = autoremat.explain(loss, rows(size), options=EAGER | {"memory_budget": "400KiB"})
        assert (seconds, peak) == (seconds_of(again), again.minimum_peak_bytes)
    assert f"{found.size} is best within 400.00 KiB" in str(found)
    slow = autoremat.best_batch(rows, loss, "400KiB", candidates=(64, 128, 256), seconds_per_step=1.0, options=EAGER)
    assert slow.samples_per_second == pytest.approx(256 / (1.0 + slow.tried[-1][1]))


def test_what_cannot_be_searched_is_refused():
    for sizes in (None, [8, 16]):
        with pytest.raises(BudgetInfeasible):
            autoremat.best_batch(rows, loss, "1KiB", candidates=sizes, options=EAGER)
    with pytest.raises(OptionsError, match="needs bytes"):
        autoremat.best_batch(rows, loss, 0.5)
    for sizes in ([], [0], [1.5]):
        with pytest.raises(OptionsError, match="candidates="):
            autoremat.best_batch(rows, loss, "1MiB", candidates=sizes)
