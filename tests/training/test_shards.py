"""Saved tensors of a tensor-parallel model as shards that are gathered again, in one process and in examples of several."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from captured import priced
from folders import ROOT
from oracles import same_bits
from processes import ONE_THREAD, group_of, run_ranks
from sharded_models import TOKENS, Decoder, tensor_parallel_decoder
from torch import Tensor
from torch.profiler import profile

import autoremat
from autoremat import OptionWarning
from autoremat.capture import forms
from autoremat.capture.communication import GLOO_THREADS
from autoremat.compiler.planned_graph import code_headroom_bytes, replay_context
from autoremat.planner.graph.op import SHARDS, Engine
from autoremat.planner.settings import Settings
from autoremat.torch_private import process_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

RANKS, LAYERS, WIDTH = 4, 2, 32
BATCH = (4, 64)
EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline", "on_planning_error": "raise"}
SHARES = {"store": ("device", "shards")}
SAVED = {"save": ["aten.add*"]}
"""Saves the residual stream: its recomputation may reach a lower peak than its shards."""
BY_NAME = {"save": {"aten.add*": "shards"}}
LEAST = SAVED | {"memory_budget": 1, "on_infeasible": "best_effort"}
FAST = {"interconnect_bandwidth": 1e12, "interconnect_latency": 1e-9}
SMALL = Settings(least_form_bytes=1024)
"""Lets values of 1 KiB have forms."""


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """The share of one of four ranks, the others of which do not exist."""
    monkeypatch.setattr(forms, "settings", SMALL)
    with group_of(RANKS, rank=1):
        yield tensor_parallel_decoder(LAYERS, WIDTH)


def tokens() -> Tensor:
    return torch.randint(TOKENS, BATCH, generator=torch.Generator().manual_seed(0))


def test_the_residual_stream_has_a_form_as_shards_where_the_option_allows_it(decoder):
    assert not [value for value in priced(decoder, tokens(), store=("device", "bits")).graph.values if value.forms]
    found = priced(decoder, tokens(), **SHARES, interconnect_bandwidth=1e6, interconnect_latency=0.5)
    graph = found.graph
    made = {graph.ops[v.producer].target for v in graph.values if v.forms and v.producer is not None}
    assert made == {"_c10d_functional.all_reduce.default", "aten.add.Tensor"} | {"aten.mul.Tensor"} & made
    stream = [value for value in graph.values if value.forms]
    whole = BATCH[0] * BATCH[1] * WIDTH * 4
    for form in (value.form(SHARDS) for value in stream):
        assert (form.device_bytes, form.host_bytes, form.ranks) == (whole // RANKS, 0, tuple(range(RANKS)))
        assert form.load.seconds == pytest.approx(0.5 + whole * (RANKS - 1) / RANKS / 1e6)
        assert form.store.seconds < form.load.seconds
        assert form.store.engine is form.load.engine is Engine.COMPUTE
        assert form.load.temporary_bytes == 0  # a group without other ranks copies nothing
    assert found.gathering_ranks == set(range(RANKS))
    once = found.with_gathers_once("they differ")
    assert not once.gathering_ranks
    assert not [value for value in once.graph.values if value.forms]
    assert once.unused_forms == ("store='shards' has no effect on a graph: they differ",)


def test_what_gloo_copies_for_a_gather_counts_in_plans_and_in_the_replay_of_code(decoder, monkeypatch):
    monkeypatch.setattr(process_groups, "is_fake", lambda group: False)
    found, whole = priced(decoder, tokens(), **SHARES), BATCH[0] * BATCH[1] * WIDTH * 4
    assert {form.load.temporary_bytes for value in found.graph.values for form in value.forms} == {whole}
    context = replay_context(found)
    assert context.workspaces["all_gather_into_tensor"] == {whole: whole}
    held = GLOO_THREADS * (2 * whole + whole // RANKS)  # more than an all-reduce holds
    assert context.code_headroom_bytes == held + code_headroom_bytes(found.graph)


@pytest.mark.parametrize("batch", [(1, 33), (3, 5)])
def test_what_does_not_divide_among_the_ranks_has_no_shards(decoder, batch):
    class Odd(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            group = dist.group.WORLD
            return torch.distributed._functional_collectives.all_reduce(x.tanh(), "sum", group).exp().sin().sum()

    x = torch.ones(*batch, 17 if batch == (1, 33) else 32, requires_grad=True)
    found = priced(Odd(), x, **SHARES)
    assert bool(found.gathering_ranks) == (batch == (3, 5))
    assert ("divides among them" in "".join(found.unused_forms)) == (batch == (1, 33))


@dataclass(frozen=True)
class Step:
    """What one rank reports of a step."""

    gradients: list[Tensor]
    peaks: list[int]
    collectives: list[str]
    simulated: int = 0
    of_code: int = 0
    stored: int = 0
    unused: str = ""
    warned: bool = False


def train(model: Decoder, steps: int = 16, **arguments: Any) -> Step:
    torch._dynamo.reset()
    compiled, batch, peaks = torch.compile(model, **arguments), tokens(), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            with autoremat.track_peak() as peak:
                compiled(batch).backward()
            peaks.append(peak.bytes)
        model.zero_grad(set_to_none=True)
        with profile() as ran:
            compiled(batch).backward()
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    names = [event.name for event in ran.events() if event.name.startswith("_c10d_functional")]
    if arguments["backend"] != "autoremat":
        return Step(gradients, peaks, names)
    report = autoremat.reports()[-1]
    warned = any(issubclass(one.category, OptionWarning) and "shards" in str(one.message) for one in said)
    of_code = report.peak_bytes - report.code_headroom_bytes
    kept = report.plan.schedule.stays
    return Step(gradients, peaks, names, report.predicted_peak_bytes, of_code, len(kept), "".join(report.unused_forms), warned)


def two_ranks(rank: int, compiler: str) -> list[Step]:
    """Steps by torch alone, without shards and with them; then those of ranks that must not gather."""
    options = EAGER | LEAST | FAST | {"compiler": compiler}
    with mock.patch.object(forms, "settings", SMALL):
        model = tensor_parallel_decoder(LAYERS, WIDTH)
        steps = [train(model, backend="aot_eager")]
        steps += [train(model, backend="autoremat", options=options | more) for more in ({}, SHARES | BY_NAME)]
        if compiler == "aot_eager":
            apart = options | SHARES | {"agreement": "off"}
            steps += [train(model, backend="autoremat", options=apart)]
            model = tensor_parallel_decoder(LAYERS, WIDTH, scale=1.0 + rank)
            steps += [train(model, backend="aot_eager"), train(model, backend="autoremat", options=options | SHARES)]
    return steps


GATHER = "_c10d_functional::all_gather_into_tensor"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_two_ranks_gather_their_shards_and_nothing_where_they_may_differ(compiler):
    first, second = run_ranks(two_ranks, 2, args=(compiler,), timeout=500)
    for expected, plain, sharded, *others in (first, second):
        for ours in (plain, sharded):
            assert all(map(same_bits, ours.gradients, expected.gradients)) or compiler == "inductor"
            torch.testing.assert_close(ours.gradients, expected.gradients)
            assert min(ours.peaks) <= ours.simulated  # gloo's threads may hold a tensor for a moment longer
        assert (plain.stored, plain.collectives.count(GATHER)) == (0, 0)
        assert sharded.collectives.count(GATHER) == sharded.stored > 0
        assert min(sharded.peaks) < min(plain.peaks) + (compiler == "inductor")  # its peak is at the logits
        assert compiler == "aot_eager" or min(sharded.peaks) == sharded.simulated == sharded.of_code
        if others:
            apart, differing, scaled = others
            assert all(map(same_bits, apart.gradients, expected.gradients))
            assert all(map(same_bits, scaled.gradients, differing.gradients))
            assert (apart.stored, scaled.stored) == (0, 0)
            assert apart.warned
            assert scaled.warned
            assert "plan apart" in apart.unused
            assert "compute differently" in scaled.unused
    assert [step.collectives for step in first] == [step.collectives for step in second]


FOLDER = ROOT / "examples" / "distributed"
UNCOMPILED = ROOT / "tests" / "uncompiled.py"
INTEGRATIONS = {"accelerate_loop": "accelerate", "huggingface_trainer": "accelerate"}


def by_torchrun(*command: Path) -> str:
    """The output of a script in two processes."""
    environment = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, *map(str, command)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_the_example_trains_on_two_ranks(name):
    output = by_torchrun(UNCOMPILED, FOLDER / f"{name}.py")
    assert re.search(r"^loss \d+\.\d+$", output, re.MULTILINE)
    rows = re.findall(r"^ +(\d) .* (its own|of \d ranks)$", output, re.MULTILINE)
    by = "of 2 ranks" if name == "tensor_parallel" else "its own"
    assert set(rows) == {("0", by), ("1", by)}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_example_of_another_library_trains_on_two_ranks(name):
    pytest.importorskip("transformers", reason="needs transformers, of the extra `integrations`")
    pytest.importorskip(INTEGRATIONS[name], reason="needs accelerate, of the extra `integrations`")
    output = by_torchrun(UNCOMPILED, ROOT / "examples" / "integrations" / f"{name}.py")
    assert output.count("; time +") == 2, "each rank reports"


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"ddp", "fsdp2", "tensor_parallel", "pipeline", "tiny_model"}
