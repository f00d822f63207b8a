"""``autoremat.best_batch``: the search on made-up steps, and small models."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoremat
from autoremat import cli
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.report.report import Report
from autoremat.tools.best_batch import FINENESS, Descent
from autoremat.tools.size_search import SizeSearch, seconds_of

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}

model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 32)


@pytest.fixture(scope="module")
def report() -> Report:
    return autoremat.explain(loss, rows(64), options=EAGER)


# -- the search --------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    fixed=st.floats(0.0, 50.0),
    spare=st.integers(1, 400),
    more=st.integers(0, 400),
    price=st.floats(0.0, 3.0),
    overhead=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_the_search_finds_nearly_the_best_count_with_few_plans(fixed, spare, more, price, overhead):
    """A count takes a second and its share of the fixed ones. Those above ``spare`` also recompute."""
    planned: list[int] = []

    def outcome_of(count: int):
        planned.append(count)
        if count > spare + more:
            return BudgetInfeasible(budget_bytes=spare + more, minimum_bytes=count, lower_bound_bytes=0)
        recomputed = price * max(0, count - spare)
        predicted = fixed + count + recomputed
        changes = {"predicted_seconds": predicted, "recompute_seconds": recomputed, "budget_bytes": spare + more}
        return dataclasses.replace(MADE_UP, plan=None, minimum_peak_bytes=count, **changes)

    def speed(count: int) -> float:
        return count / (fixed + overhead + count + price * max(0, count - spare))

    search = SizeSearch(outcome_of, 1 << 20)
    search.run()
    descent = Descent(outcome_of, search.outcomes, overhead)
    descent.run()
    best = max(map(speed, range(1, spare + more + 1)))
    assert speed(descent.best()) >= (1 - 1.5 / FINENESS) * best
    assert len(planned) == len(set(planned)) <= 34


MADE_UP = Report(
    budget_bytes=1, predicted_peak_bytes=1, baseline_peak_bytes=1, minimum_peak_bytes=1, lower_bound_bytes=0, saved_bytes=0,
    recomputed_ops=0, recompute_seconds=0.0, forward_seconds=1.0, planning_seconds=0.0, ops=1, compiler="aot_eager",
    device="cpu", strategy="", saved=(),
)  # fmt: skip


# -- small models ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_of_given_sizes_has_the_most_samples_per_second():
    found = autoremat.best_batch(rows, loss, "400KiB", candidates=(256, 32, 64, 1024, 64), options=EAGER)
    assert [one.size for one in found.tried] == [32, 64, 256, 1024]
    assert [one.fits for one in found.tried] == [True, True, True, False]
    speeds = {one.size: one.samples_per_second for one in found.tried if one.fits}
    assert found.samples_per_second == speeds[found.size] == max(speeds.values())
    assert found.largest == 256
    assert found.report.fits
    for one in found.tried[:3]:
        again = autoremat.explain(loss, rows(one.size), options=EAGER | {"memory_budget": "400KiB"})
        assert one.samples_per_second == pytest.approx(one.size / seconds_of(again))
        assert one.peak_bytes == again.predicted_peak_bytes
        assert one.recomputed_share == pytest.approx(again.recompute_seconds / again.step_seconds)
    assert found.tried[2].recomputed_share > 0
    text = str(found)
    assert "does not fit" in text
    assert f"{found.size} is best within 400.00 KiB" in text


def test_sizes_with_code_are_compared_by_its_kernels():
    found = autoremat.best_batch(rows, loss, "1MiB", candidates=[64], lower=True, options={"cost_model": "roofline"})
    assert found.tried[0].seconds == found.report.seconds != found.report.predicted_seconds
    assert seconds_of(found.report) == found.report.predicted_seconds, "some sizes would have code, and others none"


@pytest.mark.slow
def test_the_best_is_among_the_sizes_up_to_the_largest_that_fits():
    found = autoremat.best_batch(rows, loss, "400KiB", step=64, limit=512, options=EAGER)
    largest = autoremat.max_batch(rows, loss, "400KiB", step=64, limit=512, options=EAGER)
    assert found.largest == largest.size
    assert all(one.size % 64 == 0 for one in found.tried)
    assert found.size <= largest.size
    every = autoremat.best_batch(rows, loss, "400KiB", candidates=range(64, largest.size + 1, 64), options=EAGER)
    assert found.samples_per_second >= 0.97 * every.samples_per_second


@pytest.mark.slow
def test_fixed_seconds_favour_larger_batches():
    sizes = (64, 128, 256)
    without = autoremat.best_batch(rows, loss, "400KiB", candidates=sizes, options=EAGER)
    slow = autoremat.best_batch(rows, loss, "400KiB", candidates=sizes, seconds_per_step=1.0, options=EAGER)
    assert without.size < slow.size == 256
    assert slow.samples_per_second == pytest.approx(256 / (1.0 + slow.tried[-1].seconds))
    spread = autoremat.best_batch(rows, loss, "400KiB", candidates=sizes, seconds_per_step=1.0, accumulate=4, options=EAGER)
    assert spread.report.resident_bytes > 0
    last = next(one for one in spread.tried if one.size == spread.size)
    assert spread.samples_per_second == pytest.approx(spread.size / (0.25 + last.seconds))


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(BudgetInfeasible):
        autoremat.best_batch(rows, loss, "1KiB", options=EAGER)
    with pytest.raises(BudgetInfeasible):
        autoremat.best_batch(rows, loss, "1KiB", candidates=[8, 16], options=EAGER)
    with pytest.raises(OptionsError, match="best_batch needs bytes"):
        autoremat.best_batch(rows, loss, 0.5)
    for sizes in ([], [0], [1.5]):
        with pytest.raises(OptionsError, match="candidates=.*at least one"):
            autoremat.best_batch(rows, loss, "1MiB", candidates=sizes)
    for seconds in (-1, math.inf, True, "1s"):
        with pytest.raises(OptionsError, match="seconds_per_step="):
            autoremat.best_batch(rows, loss, "1MiB", seconds_per_step=seconds)
    for count in (0, 2.5):
        with pytest.raises(OptionsError, match="accumulate="):
            autoremat.best_batch(rows, loss, "1MiB", accumulate=count)


def test_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "sized.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))\n"
        "def step(size):\n    return lambda x: net(x).square().mean(), torch.randn(size, 32)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    eager = ["-o", "compiler=aot_eager", "-o", "cost_model=roofline"]
    command = ["best-batch", "sized:step", "--budget", "1MiB", "--size", "64", "--size", "128", "--max-slowdown", "0.5", *eager]
    text = CliRunner().invoke(cli.main, command, catch_exceptions=False)
    assert "is best within 1.00 MiB" in text.output
    found = json.loads(CliRunner().invoke(cli.main, [*command, "--json"], catch_exceptions=False).output)
    assert [one["size"] for one in found["tried"]] == [64, 128]
    assert found["report"]["max_slowdown"] == 0.5
