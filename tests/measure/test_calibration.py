"""Calibration with a timer of our own: what is run, and what is kept. No test asserts on real seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from autoremat.basics import disk_cache
from autoremat.cli import main
from autoremat.measure import calibration
from autoremat.measure.microbenchmarks import FUSED, ROW, Place, Recipe, recipes
from autoremat.planner.cost import Curve, Rate, Rates, cpu_device, curve_name

CPU = torch.device("cpu")


def always(seconds):
    """A timer that runs nothing, and says that everything takes so long."""
    return lambda run: seconds


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})


def uncompiled(function, tensor):
    return lambda: function(tensor)


def test_a_calibration_has_a_curve_for_every_rate_and_subtracts_the_call(monkeypatch):
    monkeypatch.setattr(calibration, "LONGEST_RUN", 1e-4)  # only small sizes are prepared
    rates = calibration.calibrate(CPU, always(1e-3), uncompiled)
    assert set(rates.curves) >= {curve_name(rate) for rate in Rate}
    assert curve_name(Rate.MATMUL, "bfloat16") in rates.curves
    assert rates.launch_seconds == 1e-3
    seconds = [seconds for curve in rates.curves.values() for _, seconds in curve.points]
    assert seconds == pytest.approx([calibration.LEAST_SHARE * 1e-3] * len(seconds))


def test_every_recipe_runs_at_its_smallest_size():
    for recipe in recipes(CPU, uncompiled):
        size = recipe.sizes[0] if recipe.rate not in (Rate.CHEAP, Rate.RANDOM) else 2
        with torch.no_grad():
            amount, run = recipe.prepare(Place(CPU, recipe.dtype), size)
            run()
        assert amount > 0


@pytest.mark.parametrize("rate", FUSED)
def test_compiled_arithmetic_does_as_many_of_its_ops_as_its_amount_states(rate):
    (recipe,) = (recipe for recipe in recipes(CPU, uncompiled) if recipe.rate is rate)
    amount, run = recipe.prepare(Place(CPU), 4)
    names = {Rate.CHEAP: ("mul", "add"), Rate.EXPONENTIAL: ("exp",), Rate.TANH: ("tanh",), Rate.SPECIAL: ("erf",)}
    names |= {
        Rate.DIVISION: ("div", "reciprocal"),
        Rate.RANDOM: ("rand_like",),
        Rate.REDUCTION: ("sum",),
        Rate.NORMALISATION: ("_softmax",),
        Rate.LAYOUT: ("clone",),
    }
    with torch.profiler.profile() as ran:
        run()
    assert amount == 4 * ROW * sum(event.name.removeprefix("aten::") in names[rate] for event in ran.events())


def prepared(place: Place, size: int) -> tuple[float, Callable[[], object]]:
    return float(size), lambda: None


def test_times_that_no_kernel_has_give_way_to_the_data_sheet(monkeypatch, caplog):
    monkeypatch.setattr(calibration, "recipes", lambda *_: [Recipe(rate, (64,), prepared) for rate in Rate])
    rates = calibration.calibrate(CPU, always(1.0), uncompiled)
    assert len(caplog.records) == 1
    sheet = cpu_device(torch.get_num_threads())
    assert rates.curves["matmul.float32"].seconds(64.0) == 64.0 / sheet.flops_per_second
    assert rates.curves["stream"].seconds(64.0) == 64.0 / sheet.bytes_per_second
    assert rates.curves["exponential"].seconds(64.0) == 50 * 64.0 / sheet.flops_per_second
    assert rates.curves["window"].seconds(64.0) == 8 * 64.0 / sheet.bytes_per_second
    assert rates.curves["sort"].seconds(64.0) == calibration.LEAST_SHARE


def some_rates() -> Rates:
    return Rates("cpu", 1e-6, {curve_name(r): Curve(((1.0, 1e-9),)) for r in Rate})


def test_a_device_is_calibrated_once_and_again_on_request(monkeypatch):
    calls = []
    monkeypatch.setattr(calibration, "calibrate", lambda *_: calls.append(1) or some_rates())
    first = calibration.rates_of(CPU)
    assert calibration.rates_of(CPU) is first
    calibration._known.clear()  # as in another process
    assert calibration.rates_of(CPU) == first
    assert len(calls) == 1
    assert "rates of cpu are stored" in CliRunner().invoke(main, ["calibrate"]).output
    assert len(calls) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibration.rates_of(CPU)
    assert len(calls) == 3


def test_ranks_that_start_together_calibrate_once(monkeypatch):
    """Threads stand for processes: a lock on a file keeps both apart."""
    calls = []

    def slow(device):
        calls.append(1)
        time.sleep(0.3)
        disk_cache.write_text("rates", calibration.device_key(device), some_rates().to_json())
        return some_rates()

    monkeypatch.setattr(calibration, "measure", slow)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: calibration.rates_of(CPU), range(4))) == [some_rates()] * 4
    assert len(calls) == 1


def test_broken_rates_on_disk_are_measured_again(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: some_rates())
    key = calibration.device_key(CPU)
    for text in ("[" * 200_000, '{"device": "cpu", "launch_seconds": 0, "curves": {}}'):
        disk_cache.write_text("rates", key, text)
        calibration._known.clear()
        assert calibration.rates_of(CPU) == some_rates()
        assert Rates.from_json(disk_cache.read_text("rates", key) or "") == some_rates()


@pytest.mark.parametrize(("name", "measures"), [("NVIDIA H100 80GB HBM3", False), ("Abacus 3000", True)])
def test_a_card_is_measured_only_if_it_has_no_data_sheet(name, measures, monkeypatch):
    monkeypatch.setattr(calibration, "measurable", lambda device: True)
    monkeypatch.setattr(calibration, "device_name", lambda device: name)
    monkeypatch.setattr(calibration, "measure", lambda device: some_rates())
    assert calibration.rates_of(torch.device("cuda")) == (some_rates() if measures else None)


def test_the_arithmetic_of_a_card_has_no_memory_traffic_in_it():
    card, names = torch.device("cuda"), {rate: curve_name(rate) for rate in (Rate.STREAM, Rate.RANDOM, Rate.CHEAP)}
    recipes_of = {name: Recipe(rate, (1,), lambda *_: (1.0, lambda: None)) for rate, name in names.items()}
    found = {names[Rate.CHEAP]: {1e6: 9e-6}, names[Rate.RANDOM]: {1e6: 5e-5}, names[Rate.STREAM]: {8e6: 8e-6}}
    with mock.patch.object(calibration, "_plausible", lambda recipe, points, device: points):
        curves = calibration._curves(recipes_of, found, 0.0, 2e-6, card)
        on_cpu = calibration._curves(recipes_of, found, 0.0, 2e-6, CPU)
    assert curves[names[Rate.RANDOM]].seconds(1e6) == pytest.approx(5e-5 - 2e-6 - 8e-6)
    assert curves[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(9e-6 - 2e-6 - 8e-6 / FUSED[Rate.CHEAP].times)
    assert on_cpu[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(7e-6)
