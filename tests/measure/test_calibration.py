"""Calibration with a timer of our own: what is run, and what is kept. No test asserts on real seconds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from clocks import Clock

from autoremat.basics import disk_cache
from autoremat.measure import calibration
from autoremat.measure.microbenchmarks import FUSED, ROW, Place, Recipe, recipes
from autoremat.measure.timer import Stopwatch, measurable
from autoremat.planner.cost import (
    ELEMENT_BYTES,
    Curve,
    Rate,
    Rates,
    Task,
    Work,
    cpu_device,
    cuda_device,
    curve_name,
    datasheet_seconds,
)

CPU = torch.device("cpu")


@dataclass
class FakeTimer(Clock):
    """Runs nothing, or once, and says that everything takes so long."""

    each: float = 1e-3
    runs_it: bool = False
    disturbed_share: float = 0.0
    timed: list[Callable[[], object]] = field(default_factory=list)

    def seconds(self, run: Callable[[], object]) -> float:
        self.timed.append(run)
        self.time += self.each
        if self.runs_it:
            run()
        return self.each


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})


def uncompiled(function, tensor):
    return lambda: function(tensor)


def test_a_calibration_has_a_curve_for_every_rate_and_subtracts_the_call(monkeypatch):
    monkeypatch.setattr(calibration, "LONGEST_RUN", 1e-4)  # only small sizes are prepared
    rates = calibration.calibrate(CPU, FakeTimer(each=1e-3), uncompiled)
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


@pytest.mark.parametrize("rate", [Rate.CHEAP, Rate.REDUCTION])
def test_a_kernel_of_cheap_arithmetic_moves_at_most_a_byte_for_each_op(rate):
    assert ELEMENT_BYTES / FUSED[rate].times <= 1.0


def prepared(place: Place, size: int) -> tuple[float, Callable[[], object]]:
    return float(size), lambda: None


def test_sizes_that_would_take_too_long_are_left_out():
    recipe = Recipe(Rate.MATMUL, (10**9, 10**10, 10**12, 10**13), prepared)
    assert list(calibration._points(recipe, Place(CPU), FakeTimer(each=0.01))) == [1e9]
    assert list(calibration._points(recipe, Place(CPU), FakeTimer(each=1e-6))) == [1e9, 1e10, 1e12, 1e13]


def test_a_small_size_that_was_disturbed_says_nothing_of_larger_ones():
    recipe = Recipe(Rate.MATMUL, (1000, 10**6, 10**12), prepared)
    assert list(calibration._points(recipe, Place(CPU), FakeTimer(each=0.01))) == [1e3, 1e6]


@dataclass
class OftenDisturbed(FakeTimer):
    """Of so many first measurements every third takes longer, and ever longer."""

    until: int = 0

    def seconds(self, run: Callable[[], object]) -> float:
        number = len(self.timed)
        return super().seconds(run) + (0.01 * number if number < self.until and number % 3 == 2 else 0.0)


@pytest.fixture
def one_size_of_each(monkeypatch):
    monkeypatch.setattr(calibration, "recipes", lambda *_: [Recipe(rate, (64,), prepared) for rate in Rate])
    monkeypatch.setattr(calibration, "LONGEST_CALIBRATION", 1e6)


def test_what_was_disturbed_is_measured_again(one_size_of_each, caplog):
    expected = calibration.calibrate(CPU, FakeTimer(each=1e-5), uncompiled)
    assert calibration.calibrate(CPU, OftenDisturbed(each=1e-5, until=2 * len(Rate)), uncompiled).curves == expected.curves
    assert not caplog.records


def test_what_stays_disturbed_is_said_and_what_cannot_be_comes_from_the_data_sheet(one_size_of_each, caplog, tmp_path):
    rates = calibration.calibrate(CPU, FakeTimer(each=1.0), uncompiled)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].message.startswith("autoremat: calibrated cpu: the machine was busy, so ")
    assert f" of {len(Rate)} rates may be wrong; delete {tmp_path}" in caplog.text
    sheet = cpu_device(torch.get_num_threads())
    assert rates.curves["matmul.float32"].seconds(64.0) == 64.0 / sheet.flops_per_second
    assert rates.curves["stream"].seconds(64.0) == 64.0 / sheet.bytes_per_second
    assert rates.curves["exponential"].seconds(64.0) == 50 * 64.0 / sheet.flops_per_second
    assert rates.curves["window"].seconds(64.0) == 8 * 64.0 / sheet.bytes_per_second
    assert rates.curves["sort"].seconds(64.0) == calibration.LEAST_SHARE


def test_rates_of_a_busy_machine_need_no_folder_to_be_deleted(one_size_of_each, caplog, tmp_path):
    rates = calibration.calibrate(CPU, FakeTimer(each=1.0, disturbed_share=0.5), uncompiled)
    assert rates.is_disturbed
    assert caplog.text.rstrip().endswith("may be wrong; an idle machine measures again")


def test_a_calibration_ends_in_time_and_the_next_ones_complete_it(one_size_of_each, monkeypatch, caplog):
    monkeypatch.setattr(calibration, "LONGEST_CALIBRATION", 12e-5)  # twelve timings
    rates = calibration.calibrate(CPU, FakeTimer(each=1e-5), uncompiled)
    assert 0 < len(rates.unmeasured) < len(Rate)
    assert f"{len(rates.unmeasured)} of {len(Rate)} rates come from data sheets" in caplog.text
    assert set(rates.curves) >= {curve_name(rate) for rate in Rate}
    assert Rates.from_json(rates.to_json()) == rates
    assert rates.measures(Work((Task(Rate.MATMUL, 1.0),)))
    assert not rates.measures(Work((Task(Rate(rates.unmeasured[0].partition(".")[0]), 1.0),)))
    for _ in range(len(Rate)):
        timer = FakeTimer(each=1e-5)
        further = calibration.calibrate(CPU, timer, uncompiled, rates)
        assert len(timer.timed) <= 12 + 4  # and the calls that are timed in any case
        assert further.curves["matmul.float32"] is rates.curves["matmul.float32"]
        assert set(further.unmeasured) < set(rates.unmeasured)
        rates = further
        if not rates.unmeasured:
            break
    assert rates.unmeasured == ()


def test_a_machine_that_stays_busy_is_measured_to_the_end_before_anything_is_measured_again(one_size_of_each, monkeypatch):
    monkeypatch.setattr(calibration, "LONGEST_CALIBRATION", 12e-5)  # twelve timings
    rates, turns = None, 0
    while rates is None or rates.unmeasured:
        before = rates
        rates = calibration.calibrate(CPU, FakeTimer(each=1e-5, disturbed_share=0.5), uncompiled, rates)
        assert before is None or set(rates.unmeasured) < set(before.unmeasured)
        turns += 1
    assert turns > 1
    assert rates.is_disturbed
    again = calibration.calibrate(CPU, FakeTimer(each=1e-5), uncompiled, rates)
    assert not again.is_disturbed
    assert again.curves["matmul.float32"] is not rates.curves["matmul.float32"]


def test_a_process_completes_the_rates_that_an_earlier_one_left_out(monkeypatch):
    unfinished = dataclasses.replace(some_rates(), unmeasured=("sort",))
    disk_cache.write_text("rates", calibration.device_key(CPU), unfinished.to_json())
    given = []
    monkeypatch.setattr(calibration, "calibrate", lambda *arguments: given.append(arguments[-1]) or some_rates())
    assert calibration.rates_of(CPU) == some_rates()
    assert given == [unfinished]


def test_a_type_that_the_device_does_not_know_has_no_curve():
    def refuse(place: Place, size: int) -> tuple[float, Callable[[], object]]:
        raise RuntimeError("not implemented for 'BFloat16'")

    assert calibration._points(Recipe(Rate.MATMUL, (1,), refuse, torch.bfloat16), Place(CPU), FakeTimer()) == {}
    with pytest.raises(RuntimeError, match="not implemented"):
        calibration._points(Recipe(Rate.MATMUL, (1,), refuse), Place(CPU), FakeTimer())


def some_rates() -> Rates:
    return Rates("cpu", 1e-6, {curve_name(r): Curve(((1.0, 1e-9),)) for r in Rate})


def test_a_device_is_calibrated_once(monkeypatch):
    calls = []
    monkeypatch.setattr(calibration, "calibrate", lambda *_: calls.append(1) or some_rates())
    first = calibration.rates_of(CPU)
    assert calibration.rates_of(CPU) is first
    calibration._known.clear()  # as in another process
    assert calibration.rates_of(CPU) == first
    assert len(calls) == 1

    def slower_than_another_process(*_):
        disk_cache.write_text("rates", calibration.device_key(CPU), first.to_json())
        return dataclasses.replace(first, launch_seconds=2.0)

    (disk_cache.folder("rates") / f"{calibration.device_key(CPU)}.json").unlink()
    monkeypatch.setattr(calibration, "calibrate", slower_than_another_process)
    calibration._known.clear()
    assert calibration.rates_of(CPU) == first
    monkeypatch.setattr(calibration, "calibrate", lambda *_: calls.append(1) or some_rates())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibration.rates_of(CPU)
    assert len(calls) == 2


def test_rates_of_a_busy_machine_serve_until_the_machine_is_idle(monkeypatch):
    disturbed = dataclasses.replace(some_rates(), disturbed_share=0.5)
    disk_cache.write_text("rates", calibration.device_key(CPU), disturbed.to_json())
    monkeypatch.setattr(calibration, "calibrate", lambda *_: some_rates())
    idle, expected = [False, False, True], [disturbed, disturbed, some_rates(), some_rates()]
    monkeypatch.setattr(calibration, "_is_idle", lambda device: idle.pop(0))
    for rates in expected:
        calibration._known.clear()  # as in another process
        assert calibration.rates_of(CPU) == rates


def test_a_machine_is_idle_if_the_probe_has_undisturbed_samples(monkeypatch):
    for disturbed, seen in ((0, True), (1, False)):
        watch = Stopwatch(lambda: None, disturbed_timings=disturbed)
        monkeypatch.setattr(calibration, "stopwatch_for", lambda device, watch=watch: watch)
        assert calibration._is_idle(CPU) is seen


def test_ranks_that_start_together_calibrate_once(monkeypatch, tmp_path):
    """Threads stand for processes: a lock on a file keeps both apart."""
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    calls, key = [], calibration.device_key(CPU)

    def slow(*_: object) -> Rates:
        calls.append(1)
        time.sleep(0.3)
        return dataclasses.replace(some_rates(), launch_seconds=float(len(calls)))

    monkeypatch.setattr(calibration, "calibrate", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: calibration._measured(CPU, key), range(4)))
    assert len(calls) == 1
    assert len({rates.digest for rates in found}) == 1


def test_a_rank_measures_itself_if_it_has_waited_long_enough(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: some_rates())
    with disk_cache.locked("rates", calibration.device_key(CPU), 0):
        assert calibration._measured(CPU, calibration.device_key(CPU)) == some_rates()


def test_broken_rates_on_disk_are_measured_again(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: some_rates())
    key = calibration.device_key(CPU)
    for text in ("", "{", "[" * 200_000, '{"device": "cpu", "launch_seconds": 0, "curves": {}}'):
        disk_cache.write_text("rates", key, text)
        calibration._known.clear()
        assert calibration.rates_of(CPU) == some_rates()
        assert Rates.from_json(disk_cache.read_text("rates", key) or "") == some_rates()


def test_a_device_that_is_not_there_has_no_rates_and_says_so_once(caplog):
    calibration._say_unmeasurable.cache_clear()
    for _ in range(2):
        assert calibration.rates_of(torch.device("xpu")) is None
    assert not measurable(torch.device("meta"))
    assert [record.message for record in caplog.records] == [
        "a xpu device cannot be calibrated here: costs are taken from data sheets"
    ]


@pytest.mark.parametrize(("name", "measures"), [("NVIDIA H100 80GB HBM3", False), ("Abacus 3000", True)])
def test_a_card_is_measured_only_if_it_has_no_data_sheet(name, measures, monkeypatch):
    measured = mock.Mock(return_value=some_rates())
    monkeypatch.setattr(calibration, "measurable", lambda device: True)
    monkeypatch.setattr(calibration, "device_name", lambda device: name)
    monkeypatch.setattr(calibration, "_measured", measured)
    monkeypatch.setattr(calibration, "_stored", lambda key: None)
    monkeypatch.setattr(calibration, "_known", {})
    assert calibration.rates_of(torch.device("cuda")) == (some_rates() if measures else None)
    assert measured.called is measures


def test_the_arithmetic_of_a_card_has_no_memory_traffic_in_it():
    card, names = torch.device("cuda"), {rate: curve_name(rate) for rate in (Rate.STREAM, Rate.RANDOM, Rate.CHEAP)}
    recipes_of = {name: Recipe(rate, (1,), lambda *_: (1.0, lambda: None)) for rate, name in names.items()}
    found = {names[Rate.CHEAP]: {1e6: 9e-6}, names[Rate.RANDOM]: {1e6: 5e-5}, names[Rate.STREAM]: {8e6: 8e-6}}
    with mock.patch.object(calibration, "_plausible", lambda recipe, points, device: points):
        curves, _ = calibration._curves(recipes_of, found, {"launch": 0.0, "call": 2e-6}, card, {})
        on_cpu, _ = calibration._curves(recipes_of, found, {"launch": 0.0, "call": 2e-6}, CPU, {})
    assert curves[names[Rate.RANDOM]].seconds(1e6) == pytest.approx(5e-5 - 2e-6 - 8e-6)
    assert curves[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(9e-6 - 2e-6 - 8e-6 / FUSED[Rate.CHEAP].times)
    assert on_cpu[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(7e-6)


def test_arithmetic_that_is_measured_later_takes_the_traffic_of_the_streams_before():
    card, cheap, stream = torch.device("cuda"), curve_name(Rate.CHEAP), curve_name(Rate.STREAM)
    recipes_of = {cheap: Recipe(Rate.CHEAP, (1,), lambda *_: (1.0, lambda: None))}
    found, overheads = {cheap: {1e6: 9e-6}}, {"launch": 0.0, "call": 2e-6}
    known, moved = Curve(((8e6, 8e-6),)), ELEMENT_BYTES * 1e6 / FUSED[Rate.CHEAP].times
    unknown = cuda_device("Abacus 3000")
    with (
        mock.patch.object(calibration, "_plausible", lambda recipe, points, device: points),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Abacus 3000"),
    ):
        measured, _ = calibration._curves(recipes_of, found, overheads, card, {stream: known})
        assumed, _ = calibration._curves(recipes_of, found, overheads, card, {})
    assert measured.keys() == {cheap, stream}
    assert measured[cheap].seconds(1e6) == pytest.approx(7e-6 - known.seconds(moved))
    assert assumed[cheap].seconds(1e6) == pytest.approx(7e-6 - datasheet_seconds(Rate.STREAM, moved, unknown))
