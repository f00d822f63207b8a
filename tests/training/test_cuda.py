"""Training steps under budgets on a CUDA device (`make gpu`) or on the emulated card (`make gpu-rehearsal`)."""

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import stays
import torch
from block_models import MeanSquare
from emulated_cuda import named
from emulated_cuda.steps import on_card, planned_step, relative_error, run_step
from torch import Tensor, nn

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.planner.memory.allocations import Block, CachingAllocator

pytestmark = pytest.mark.gpu

EMULATED = os.environ.get("TRITON_INTERPRET") == "1"

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Largest relative error of a gradient against another order of the same arithmetic, by data type."""

CONVOLUTIONS = 3e-2
"""The same for networks with convolutions, which cuDNN rounds to TF32, and with ReLU, which rounding can switch."""

SHARES = (None, 0.7, 1)
"""No budget, a share, and the smallest plan there is: one byte, as well as it goes."""

CASES = (
    ("llama", torch.float32),
    ("llama", torch.bfloat16),
    ("gpt2", torch.float32),
    ("resnet", torch.float32),
    ("unet", torch.float32),
)

RANDOM = ("gpt2",)
"""Models with dropout. Their plans are compared with one another."""

LAPTOP = """
import sys, models, torch, autoremat
name, dtype, device, path = sys.argv[1:]
assert not torch.cuda.is_available()
module, inputs = models.build(name, layers=2)
options = {"memory_budget": 0.6, "cost_model": "roofline"}
report = autoremat.explain(module.to(getattr(torch, dtype)), *inputs, device=device, lower=True, options=options)
report.plan.save(path)
"""
"""Plans a step for a card by its name, in a process that has no card."""

LAPTOP_OF_SMALL_STEPS = """
import sys, pathlib, torch
from emulated_cuda import named
assert not torch.cuda.is_available()
named.write_graphs(pathlib.Path(sys.argv[2]), sys.argv[1])
"""
"""Plans all small steps in the same way."""


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Matrix products of 32 bits are not rounded to TF32, and Inductor's advice to do so is no error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")
        yield
    torch.set_float32_matmul_precision(before)


def built(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, inputs = models.build(name, **({"layers": 2} if name in ("llama", "gpt2") else {}))
    few = tuple(tensor[:2] for tensor in inputs) if EMULATED else inputs  # the interpreter takes its time
    return on_card((module, few), dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda case: str(case).removeprefix("torch."))
def test_gradients_and_peaks_under_budgets(name, dtype, record_property):
    module, inputs = built(name, dtype)
    reference = None if name in RANDOM else run_step(module, module, inputs).gradients
    allowed = CONVOLUTIONS if name in ("resnet", "unet") else ROUNDING[dtype]
    recomputed = []
    for share in SHARES[:1] + SHARES[2:] if EMULATED else SHARES:
        chosen = {} if share is None else {"memory_budget": share, "on_infeasible": "best_effort"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step = planned_step(module, inputs, **chosen)
        measured, report = step.result.peak_bytes, step.report
        record_property(f"budget {share}", peaks_of(measured, step.replayed_bytes, report))
        recomputed.append(report.recomputed_ops)
        if report.within_budget and report.budget_bytes is not None:
            assert measured <= report.budget_bytes
        reference = reference or step.result.gradients
        assert relative_error(step.result.gradients, reference) <= allowed, share
    assert recomputed[-1] > 0


def peaks_of(measured: int, replayed: int, report: autoremat.Report) -> str:
    """Returns the peaks of a step side by side."""
    return (
        f"measured {measured}, replayed {replayed} without workspaces ({measured / replayed - 1:+.2%}), "
        f"{report.compiled_peak_bytes} with them, budget {report.budget_bytes}"
    )


def test_saved_tensors_wait_on_the_host(record_property):
    layers = (nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.0)) for _ in range(6))
    rows = 1024 if EMULATED else 8192
    module, inputs = on_card((MeanSquare(*layers), (torch.randn(rows, 512),)), torch.float32)
    expected = run_step(module, module, inputs).gradients
    step = planned_step(module, inputs, memory_budget=0.5, host_memory="1GiB", cost_model="roofline")
    planned, moved = step.report.moved_bytes, stays.statistics("cuda")
    record_property("on the host", f"{peaks_of(step.result.peak_bytes, step.replayed_bytes, step.report)}, moved {moved}")
    assert moved.to_host_bytes == moved.from_host_bytes == 2 * planned > 0  # two steps ran
    assert step.result.peak_bytes <= step.report.budget_bytes
    assert relative_error(step.result.gradients, expected) <= ROUNDING[torch.float32]


@pytest.mark.parametrize("way", ["side stream", "CUDA graphs"])
def test_other_ways_to_run_a_step_give_the_same_gradients(way, record_property):
    if EMULATED and way == "CUDA graphs":
        pytest.skip("the emulated card records CUDA graphs and cannot replay them")
    module, inputs = built("llama", torch.float32)
    reference = run_step(module, module, inputs).gradients
    torch._dynamo.reset()
    options = {"memory_budget": 0.7, "triton.cudagraphs": way == "CUDA graphs"}
    compiled = torch.compile(module, backend="autoremat", options=options)

    def step(*arguments: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    found = [on_stream(lambda: run_step(step, module, inputs), way == "side stream") for _ in range(4)]
    record_property(way, f"measured {[result.peak_bytes for result in found]}, budget {autoremat.reports()[-1].budget_bytes}")
    for result in found:  # the first steps compile and record, the last replays
        assert relative_error(result.gradients, reference) <= ROUNDING[torch.float32]


def on_stream(run: Callable[[], Any], own: bool) -> Any:
    """Returns the result of ``run()``, on a stream of its own if ``own``."""
    if not own:
        return run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run()
    torch.cuda.current_stream().wait_stream(stream)
    return result


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32"), ("gpt2", "bfloat16")]
)
def test_a_plan_made_without_the_card_is_taken_from_its_file(name, dtype, tmp_path, record_property):
    path = tmp_path / "plan.json"
    run_without_card(LAPTOP, name, dtype, torch.cuda.get_device_name(), str(path))
    stored = autoremat.Plan.load(path)
    module, inputs = on_card(models.build(name, layers=2), getattr(torch, dtype))
    step = planned_step(module, inputs, plan=path)
    assert step.report.strategy.startswith("stored plan")
    assert step.report.plan.schedule == stored.schedule
    peaks = peaks_of(step.result.peak_bytes, step.replayed_bytes, step.report)
    record_property("plan", f"predicted {stored.peak_bytes}, {peaks}")
    assert step.report.recomputed_ops > 0


def run_without_card(code: str, *arguments: str) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(Path(models.__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code, *arguments], env=os.environ | hidden, check=True)


def test_graphs_that_are_planned_without_the_card_are_those_of_the_card(tmp_path):
    run_without_card(LAPTOP_OF_SMALL_STEPS, torch.cuda.get_device_name(), str(tmp_path))
    differences = {name: named.difference_on_card(tmp_path, name) for name in named.steps()}
    assert {name: text for name, text in differences.items() if text} == {}


@pytest.mark.parametrize("largest", [4096, 3 * 2**20, 40 * 2**20])
def test_the_blocks_of_the_replay_are_those_of_the_card(largest):
    draw, replayed = random.Random(largest), CachingAllocator()
    live: list[tuple[Tensor, Block]] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            if live and draw.random() < 0.45:
                tensor, block = live.pop(draw.randrange(len(live)))
                del tensor
                replayed.free(block)
            else:
                size = draw.randint(1, largest)
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                live.append((tensor, replayed.allocate(size)))
                del tensor
            assert torch.cuda.memory_allocated() - before == replayed.allocated_bytes
