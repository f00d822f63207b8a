"""The forms that the values of captured graphs have, the link to the host, and what is said where nothing can be kept there."""

from collections.abc import Iterator

import pytest
import torch
from captured import priced
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat import OptionWarning, host_memory
from autoremat.capture import forms
from autoremat.compiler import joint_graph
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.measure import calibration
from autoremat.measure.calibration import host_link_of, least_link, measure_link
from autoremat.planner.cost.links import HostLink
from autoremat.planner.graph.op import Engine
from autoremat.planner.settings import Settings

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
FIRST, SECOND = nn.Linear(64, 128), nn.Linear(128, 64)
X = torch.zeros(32, 64, requires_grad=True)
CPU = torch.device("cpu")


@pytest.fixture
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets values of 1 KiB have forms."""
    lower = Settings(least_form_bytes=1024)
    monkeypatch.setattr(forms, "settings", lower)


@pytest.fixture
def device(small_values: None) -> Iterator[None]:
    """Lets the CPU stand for a device with a link to the host."""
    with host_memory.stand_in():
        yield


def step(x: torch.Tensor) -> torch.Tensor:
    hidden = F.dropout(FIRST(x).tanh(), 0.5)
    return SECOND(hidden.t().contiguous().t()).sin().sum()


def with_forms(graph: PricedGraph) -> dict[str, tuple[str, ...]]:
    """The names of the forms of each op's only result, without those that have none."""
    return {
        graph.graph.ops[v.producer].target: tuple(form.name for form in v.forms)
        for v in graph.graph.values
        if v.forms and v.producer is not None
    }


def test_large_results_of_the_forward_have_a_form_on_the_host(device):
    asked = priced(step, X, host_memory="1GiB")
    graph, found = asked.graph, {v for v, value in enumerate(asked.graph.values) if value.forms}
    assert found <= set(graph.forward_values)
    assert found.isdisjoint({*graph.forward_outputs, *graph.backward_outputs})
    large = {v for v in graph.forward_values if graph.values[v].bytes >= 1024}
    assert found == large - set(graph.forward_outputs)
    for value in (graph.values[v] for v in found):
        form = value.form("host")
        assert (form.device_bytes, form.host_bytes) == (0, value.bytes)
        assert (form.store.engine, form.load.engine) == (Engine.TO_HOST, Engine.FROM_HOST)
        assert form.store.seconds > value.bytes / calibration.STAND_IN.to_host


def test_what_the_caller_holds_or_an_op_writes_has_no_form(device):
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = FIRST(x).tanh()
        return hidden, hidden[:, :8].sin().sum()

    found = with_forms(priced(lambda x: (lambda pair: pair[0].sum() + pair[1])(two(x)), X, host_memory="1GiB"))
    assert "aten.tanh.default" in found
    held = with_forms(priced(lambda x: two(x)[0], X, host_memory="1GiB"))
    assert "aten.tanh.default" not in held


def test_a_part_of_a_storage_and_gaps_have_no_form():
    whole = torch.empty(8, 16)
    assert forms._is_whole(whole)
    assert forms._is_whole(whole.t())
    assert forms._is_whole(torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last))
    for part in (whole[:4], whole[:, ::2], whole.as_strided((8, 16), (0, 1)), whole.to_sparse(), None, 3):
        assert not forms._is_whole(part)


def test_masks_have_a_form_as_bits_with_or_without_a_host(small_values):
    (names,) = set(with_forms(priced(step, X, store=("device", "bits"))).values())
    assert names == ("bits",)
    graph = priced(step, X, store=("device", "bits")).graph
    (mask,) = (value for value in graph.values if value.forms)
    form = mask.form("bits")
    assert form.device_bytes == mask.bytes // 8
    assert form.store.engine is form.load.engine is Engine.COMPUTE
    read, written = graph.machine.traffic_seconds(1, 0), graph.machine.traffic_seconds(0, 1)
    assert form.store.seconds == pytest.approx(mask.bytes * (read + written / 8))
    assert form.load.seconds == pytest.approx(mask.bytes * (read / 8 + written))


def test_a_cpu_has_no_link_and_says_so(small_values):
    with pytest.warns(OptionWarning, match="host_memory has no effect on a graph: cpu has no memory apart from the host's"):
        report = autoremat.explain(step, X, options={**EAGER, "host_memory": "1GiB"})
    assert report.host_memory_bytes == 2**30
    assert autoremat.Report.from_json(report.to_json()).unused_forms == report.unused_forms


def test_unified_memory_has_no_link(small_values, monkeypatch):
    assert with_forms(priced(step, X, device="H100-80GB", host_memory="1GiB"))
    monkeypatch.setattr(joint_graph, "assumed_host_link", lambda name: None)
    shared = priced(step, X, device="H100-80GB", host_memory="1GiB")
    assert set(with_forms(shared).values()) == {("bits",)}
    assert "no memory apart from the host's" in shared.unused_forms[0]


@pytest.mark.parametrize(("setting", "said"), [("triton.cudagraphs", "CUDA graphs"), ("cpp_wrapper", "a wrapper in C")])
def test_settings_under_which_nothing_is_copied(small_values, setting, said):
    options = {"host_memory": "1GiB", "compiler": "inductor", "inductor": ((setting, True),)}
    found = priced(step, X, device="H100-80GB", **options)
    assert found.unused_forms[0].startswith(f"host_memory has no effect on a graph: the code cannot carry out under {said}")
    assert not with_forms(found)


def test_the_link_is_measured_in_both_directions(monkeypatch):
    assert 0 < measure_link(CPU).to_host < 1e13
    seconds = iter([1e-5, 2e-5, 1e-3, 2e-3])
    monkeypatch.setattr(calibration, "least_seconds", lambda device, run: (run(), next(seconds))[1])
    link = measure_link(CPU)
    moved = calibration.LARGE_BYTES - calibration.SMALL_BYTES
    assert link.to_host == pytest.approx(moved / (1e-3 - 1e-5))
    assert link.from_host == pytest.approx(moved / (2e-3 - 2e-5))
    assert link.latency_seconds == 2e-5


def test_a_link_is_measured_once_and_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    measured = HostLink(25e9, 20e9, 1e-5)
    calls: list[torch.device] = []
    monkeypatch.setattr(calibration, "measure_link", lambda device: (calls.append(device), measured)[1])
    monkeypatch.setattr(calibration, "outside_of_modes", lambda device, measure: measure())
    monkeypatch.setattr(calibration, "device_key", lambda device: "card")
    monkeypatch.setattr(calibration, "device_name", lambda device: "H100-80GB")
    for _ in range(2):
        monkeypatch.setattr(calibration, "_links", {})
        assert host_link_of(torch.device("cuda")) == measured
        assert host_link_of(torch.device("cuda")) == measured
    assert len(calls) == 1
    (stored,) = (tmp_path / "host_links").iterdir()
    stored.write_text("[1]")
    monkeypatch.setattr(calibration, "_links", {})
    assert host_link_of(torch.device("cuda")) == measured
    assert len(calls) == 2
    assert host_link_of(torch.device("cuda"), measures=False) != measured


def test_ranks_take_the_least_bytes_and_the_slowest_link():
    one, other = HostLink(25e9, 20e9, 1e-5), HostLink(20e9, 25e9, 2e-5)
    slowest = HostLink(20e9, 20e9, 2e-5)
    assert least_link([one, other]) == slowest
