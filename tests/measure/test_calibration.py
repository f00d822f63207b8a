"""Calibration, timers and calls by themselves, with clocks of our own. No test asserts on real seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from click.testing import CliRunner
from torch import fx

from autoremat.basics import disk_cache
from autoremat.cli import main
from autoremat.measure import calibration
from autoremat.measure.calibration import MAX_RUNS, Stopwatch, outside_of_modes
from autoremat.measure.microbenchmarks import FUSED, ROW, Place, Recipe, recipes
from autoremat.planner.cost.rates import Curve, Rate, Rates, curve_name
from autoremat.workspaces import measurement

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
    names = {rate: curve_name(rate) for rate in (Rate.STREAM, Rate.RANDOM, Rate.CHEAP)}
    recipes_of = {name: Recipe(rate, (1,), lambda *_: (1.0, lambda: None)) for rate, name in names.items()}
    found = {names[Rate.CHEAP]: {1e6: 9e-6}, names[Rate.RANDOM]: {1e6: 5e-5}, names[Rate.STREAM]: {8e6: 8e-6}}
    curves, on_cpu = (calibration._curves(recipes_of, found, 0.0, 2e-6, is_card) for is_card in (True, False))
    assert curves[names[Rate.RANDOM]].seconds(1e6) == pytest.approx(5e-5 - 2e-6 - 8e-6)
    assert curves[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(9e-6 - 2e-6 - 8e-6 / FUSED[Rate.CHEAP].times)
    assert on_cpu[names[Rate.CHEAP]].seconds(1e6) == pytest.approx(7e-6)


def nodes_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[fx.Node]:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def test_equal_calls_have_equal_signatures_and_others_do_not():
    x, y = torch.randn(4, 4), torch.randn(4, 8)

    def function(x, y):
        return torch.mm(x, x), torch.mm(x, x), torch.mm(x.t(), x), torch.mm(x, y), torch.cumsum(x, 0), torch.cumsum(x, 1)

    names = [measurement.signature(n) for n in nodes_of(function, x, y) if "aten.t." not in str(n.target)]
    assert names[0] == names[1]
    assert len(set(names)) == 5


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.mm(x.expand(4, 4), x.expand(4, 4)), (torch.randn(1, 4),)),
        (lambda x, i: torch.ops.aten.index_put(x, [i], x[:2], True), (torch.randn(5, 3), torch.tensor([4, 1]))),
        (lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 9, -1, False), (torch.randn(2, 3), torch.tensor([8, 1]))),
        (lambda x: torch.sort(x)[0], (torch.randn(4, 4, dtype=torch.bfloat16),)),
        (lambda x: torch.empty(0, 3) @ x, (torch.randn(3, 2),)),
    ],
)
def test_ops_run_by_themselves_on_tensors_of_their_own_shapes(function, inputs):
    node = nodes_of(function, *inputs)[-1]
    node = node.args[0] if "getitem" in str(node.target) else node
    args, kwargs = torch.utils._pytree.tree_map(measurement.real, measurement.arguments(node))
    result, traced = node.target(*args, **kwargs), node.meta["val"]
    pairs = zip(result, traced, strict=True) if isinstance(result, tuple) else [(result, traced)]
    assert all((made.shape, made.stride(), made.dtype) == (fake.shape, fake.stride(), fake.dtype) for made, fake in pairs)


@dataclass
class Clock:
    """Time that passes only when told to."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize("cost", [1e-5, 1e-3, 1.0])
def test_a_stopwatch_takes_the_least_of_samples_long_enough_to_read(cost):
    clock, runs = Clock(), []

    def run() -> None:
        runs.append(clock.time)
        in_first_sample = len(runs) <= 2 + max(1, round(1e-3 / cost))
        clock.time += cost if in_first_sample else 1.5 * cost  # most samples are slower than the first

    watch = Stopwatch(lambda: None, clock.now)
    assert watch.seconds(run) == pytest.approx(cost)
    per_sample = (len(runs) - 2) / watch.samples
    assert 1 <= per_sample <= MAX_RUNS
    assert per_sample * cost >= min(watch.sample_seconds, MAX_RUNS * cost) * (1 - 1e-9)


def test_a_stopwatch_waits_for_the_device():
    clock, waits = Clock(), []

    def wait() -> None:
        waits.append(clock.time)
        clock.time += 2.0

    assert Stopwatch(wait, clock.now, samples=3).seconds(lambda: None) == pytest.approx(2.0)
    assert len(waits) == 2 * (1 + 3)


def test_work_is_measured_outside_of_the_modes_of_a_compilation_and_keeps_the_random_state():
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = torch.get_rng_state()
    with FakeTensorMode():
        kind, threads, graded = outside_of_modes(
            CPU, lambda: (type(torch.rand(2)), torch.get_num_threads(), torch.is_grad_enabled())
        )
    assert (kind, threads, graded) == (torch.Tensor, torch.get_num_threads(), False)
    assert torch.equal(torch.get_rng_state(), state)
