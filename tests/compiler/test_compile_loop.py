"""The loop of attempts with a stage of lowering that only says what its code needs, and the key of a compilation."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from processes import group_of
from requests_of_options import request_with
from torch import Tensor, fx, nn

import autoremat
from autoremat.basics.errors import OptionsError
from autoremat.compiler import compile_loop, dynamo_backend
from autoremat.compiler import problem as records
from autoremat.compiler.joint_graph import Partitioner
from autoremat.compiler.lowering import Partitioning
from autoremat.compiler.problem import Problem, fingerprint
from autoremat.options.options import Options
from autoremat.request.budgets import request_of
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import compilers
from autoremat.torch_private.inductor_lowering import LoweredPeak

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def fake_lower(monkeypatch: pytest.MonkeyPatch, code_peaks: Sequence[int]) -> list[Partitioning]:
    """From here on, attempts generate code of these peaks, after all stages up to it. Returns the attempts."""
    found: list[Partitioning] = []

    def lower(problem, partitioning, identity, decide):
        compilers.compile_uncompiled(problem.module, problem.inputs, Partitioner(partitioning))
        peak = code_peaks[len(found)]
        found.append(partitioning)
        halves = {half: LoweredPeak(half, peak) for half in (False, True)}
        verdict = decide(halves)
        return (None if verdict else "compiled"), halves, verdict

    monkeypatch.setattr(compile_loop, "lower", lower)
    monkeypatch.setattr(compile_loop, "load_record", lambda key: None)
    return found


def compiled(budget: int | None, **options: object) -> compile_loop.CompiledGraph:
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    found: list[compile_loop.CompiledGraph] = []

    def backend(module, inputs):
        parsed = Options(cost_model="roofline", memory_budget=budget, **options)
        found.append(compile_loop.compile_graph(Problem(request_with(parsed), module, inputs)))
        return module.forward

    torch.compile(torch.nn.Sequential(*layers), backend=backend)(torch.ones(64, 32))
    return found[0]


BASELINE = 192_640
"""Bytes of the model's baseline with code headroom. The minimum peak is about 39,000 bytes lower."""


def test_the_budget_of_the_next_plan_is_lower_by_what_the_code_needs_more(monkeypatch):
    attempts = fake_lower(monkeypatch, [BASELINE + 2000, BASELINE - 1])
    found = compiled(BASELINE)
    first, second = (attempt.planned for attempt in attempts)
    excess = BASELINE + 2000 - first.report.predicted_peak_bytes - first.budget.code_headroom_bytes
    assert second.budget.extra_headroom_bytes == excess
    assert second.plan.peak_bytes + second.budget.code_headroom_bytes <= BASELINE - excess
    assert (found.function, found.report.replans, found.report.compiled_peak_bytes) == ("compiled", 1, BASELINE - 1)
    assert found.record.extra_headroom_bytes == excess


def test_a_share_of_one_is_the_peak_of_the_baselines_code(monkeypatch):
    fake_lower(monkeypatch, [10 * BASELINE])
    assert compiled(1.0).report.budget_bytes == 10 * BASELINE


@pytest.mark.parametrize("planned_around", [False, True])
def test_a_region_that_could_not_be_planned_does_not_hide_the_report_around_it(monkeypatch, planned_around):
    def fails(priced, extra_headroom_bytes):
        raise RuntimeError("as if")

    attempts = fake_lower(monkeypatch, [1000])
    lower = compile_loop.lower

    def region_first(problem, attempt, identity, decide):
        attempt.fell_back = True  # by the region, which is planned first
        return lower(problem, attempt, identity, decide)

    monkeypatch.setattr(compile_loop, "lower", region_first)
    if not planned_around:
        monkeypatch.setattr(compile_loop, "plan_graph", fails)
        with pytest.warns(autoremat.FallbackWarning):
            found = compiled(None, on_planning_error="fallback")
    else:
        found = compiled(None, on_planning_error="fallback")
    assert (found.report is not None, found.record) == (planned_around, None)
    assert len(attempts) == 1


def code(*halves: LoweredPeak) -> tuple[object, int | None]:
    """Peaks and pool of an attempt with this code, for a plan beside which nothing is allocated."""
    planned = MagicMock(plan=SimpleNamespace(timeline=SimpleNamespace(beside_bytes=0), peak_bytes=0))
    planned.priced.captured.runs_on = "cpu"
    trials = compile_loop.Trials(Problem(), compile_loop.Peers())
    trial = trials._trial(planned, {half.is_backward: half for half in halves}, is_complete=True)
    return trial.code_peaks, trial.pool_bytes


def test_both_halves_are_held_to_the_pool_of_cuda_graphs_at_its_largest():
    forward, backward = LoweredPeak(False, peak_bytes=700, pool_bytes=600), LoweredPeak(True, peak_bytes=950, pool_bytes=900)
    assert code(forward) == ({False: 700}, 600)
    assert code(forward, backward) == ({False: 1000, True: 950}, 900)
    assert code(LoweredPeak(False, 700), LoweredPeak(True, 950)) == ({False: 700, True: 950}, None)


def test_code_of_an_earlier_attempt_counts_where_a_cache_answers_for_an_equal_half():
    trials = compile_loop.Trials(Problem(), compile_loop.Peers())
    first, second = (SimpleNamespace(facts=SimpleNamespace(hashes=("equal", other))) for other in ("one", "two"))
    forward, backward = LoweredPeak(False, 700), LoweredPeak(True, 950)
    assert trials._known(first, {False: forward}) == {False: forward}
    assert trials._known(second, {True: backward}) == {False: forward, True: backward}
    assert trials._known(first, {}) == {False: forward}


SECOND = torch.device("cuda", 1)
MIB = 2**20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A card whose free memory is less at each look; the devices that were looked at."""
    looks: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        looks.append(device)
        return (1024 - 64 * len(looks)) * MIB, 1024 * MIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return looks


def scale(x: Tensor) -> Tensor:
    return x.exp() * 2


def key(inputs: tuple[Any, ...] = (torch.ones(4),), **fields: Any) -> str:
    return fingerprint(Problem(Request(Options(cost_model="roofline", **fields)), fx.symbolic_trace(scale), inputs))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_shards_depend_on_the_place_of_a_rank_in_its_groups():
    found = {}
    for ranks in ([0, 1], [1, 2]):
        with group_of(4, rank=1):
            assert dist.new_group(ranks).group_name == "1"
            found[ranks[0]] = key(), key(store=("device", "shards"))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_auto_is_looked_up_once_on_the_graphs_own_device(card, monkeypatch):
    monkeypatch.setattr(dynamo_backend, "device_of_inputs", lambda *_: SECOND)
    before = len(autoremat.reports())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    options = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": "auto", "auto_headroom": "128MiB"}
    torch.compile(model, backend="autoremat", options=options)(torch.ones(4, 8)).sum().backward()
    (report,) = autoremat.reports()[before:]
    assert card == [SECOND]
    assert report.budget_bytes == (1024 - 64 - 128) * MIB


def test_the_key_has_the_bytes_that_auto_stands_for(card):
    options = Options(memory_budget="auto")
    first, second = (request_of(options, Surroundings(SECOND)) for _ in range(2))
    assert first.limits.peak_bytes == 448 * MIB
    assert second.limits.peak_bytes == 384 * MIB
    assert first.cache_key() != second.cache_key()
    with pytest.raises(OptionsError, match="needs a CUDA device"):
        request_of(options, Surroundings(torch.device("cpu")))


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (torch.backends, "mkldnn", Mock(enabled=False, matmul=torch.backends.mkldnn.matmul)),
        (torch.backends, "cudnn", Mock(enabled=False, conv=torch.backends.cudnn.conv)),
        (records, "device_name", lambda device: "cpu of another make"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "of another kind"),
        (compilers, "packs_operands", lambda dtype: None),
    ],
)
def test_the_key_changes_with_the_processor_and_its_libraries(owner, name, other, monkeypatch):
    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, other)
        assert key() != before
    assert key() == before


def test_the_key_changes_with_the_kernels_that_attention_may_take():
    before = key()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert key() != before
    assert key() == before


class Placed(torch.Tensor):
    placement = ""

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return [], self.placement


def test_the_key_changes_with_what_a_tensor_subclass_says_of_itself():
    one, other = (torch.ones(4).as_subclass(Placed) for _ in range(2))
    one.placement, other.placement = "shards", "replicas"
    assert key((one,)) == key((one,))
    assert key((one,)) != key((other,))
