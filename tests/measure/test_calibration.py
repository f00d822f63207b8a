"""Calibration, timers and calls by themselves, with clocks of our own. No test asserts on real seconds."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import CliRunner
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.basics import disk_cache
from autoremat.cli import main
from autoremat.measure import calibration
from autoremat.measure.calibration import least_seconds, outside_of_modes
from autoremat.planner.cost.device import Rates
from autoremat.workspaces import measurement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})


def test_a_calibration_measures_products_of_every_type_a_stream_and_a_launch(monkeypatch):
    monkeypatch.setattr(calibration, "least_seconds", lambda device, run: (run(), 1e-3)[1])
    monkeypatch.setattr(calibration, "SIDES", {"cpu": 10})
    monkeypatch.setattr(calibration, "STREAMED", 1000)
    found = calibration.measure(CPU)
    assert found.launch_seconds == pytest.approx(1e-3 / calibration.LAUNCHES)
    assert found.bytes_per_second == pytest.approx(12_000 / 1e-3)
    assert dict(found.flops_by_type) == pytest.approx(dict.fromkeys(("float32", "float64", "bfloat16", "float16"), 2000 / 1e-3))


def some_rates() -> Rates:
    return Rates(1e-6, 1e9, (("float32", 1e9),))


def test_a_device_is_calibrated_once_and_again_on_request(monkeypatch):
    calls = []
    monkeypatch.setattr(calibration, "_measured", lambda _: calls.append(1) or some_rates())
    first = calibration.rates_of(CPU)
    assert calibration.rates_of(CPU) is first
    calibration._known.clear()  # as in another process
    assert calibration.rates_of(CPU) == first
    assert len(calls) == 1
    assert "are stored in" in CliRunner().invoke(main, ["calibrate"]).output
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
    monkeypatch.setattr(calibration, "_measured", lambda _: some_rates())
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


def nodes_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[fx.Node]:
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


def test_the_least_of_a_few_runs_counts(monkeypatch):
    clock, costs = [0.0], iter([9.0, 3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += next(costs)

    assert least_seconds(CPU, run) == 1.0


def test_work_is_measured_outside_of_the_modes_of_a_compilation_and_keeps_the_random_state():
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = torch.get_rng_state()
    with FakeTensorMode():
        kind, threads, graded = outside_of_modes(
            CPU, lambda: (type(torch.rand(2)), torch.get_num_threads(), torch.is_grad_enabled())
        )
    assert (kind, threads, graded) == (torch.Tensor, torch.get_num_threads(), False)
    assert torch.equal(torch.get_rng_state(), state)
