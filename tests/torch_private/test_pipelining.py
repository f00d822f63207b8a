"""The stage that runs now and its calls in flight, read from torch's schedules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoremat
from autoremat.basics.errors import OptionsError, find_cause
from autoremat.basics.units import format_bytes
from autoremat.torch_private.pipelining import Stage, calls_in_flight, running_stage

STAGES, MICROBATCHES = 4, 8


@pytest.fixture
def pipeline_group() -> Iterator[None]:
    """A group of four ranks whose communication does nothing; this process is rank 1."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=STAGES)
    yield
    distributed.destroy_process_group()


class Asking(nn.Module):
    """Keeps the stage that runs while its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.found: list[Stage | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(running_stage())
        return self.linear(x)


class Waved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


def stage(index: int, num_stages: int = STAGES, module: nn.Module | None = None) -> pipelining.PipelineStage:
    return pipelining.PipelineStage(module or Asking(), index, num_stages, torch.device("cpu"))


def test_no_pipeline_runs_outside_of_one(pipeline_group: None) -> None:
    assert running_stage() is None


def test_formulas_of_schedules_of_one_stage(pipeline_group: None) -> None:
    one_f_one_b = [schedules.Schedule1F1B(stage(i), MICROBATCHES, nn.MSELoss()) for i in range(STAGES)]
    assert [calls_in_flight(one, i) for i, one in enumerate(one_f_one_b)] == [4, 3, 2, 1]
    gpipe = schedules.ScheduleGPipe(stage(2), MICROBATCHES, nn.MSELoss())
    assert calls_in_flight(gpipe, 2) == MICROBATCHES


@pytest.mark.parametrize("kind", [schedules.ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS])
def test_schedules_of_several_stages_are_counted(pipeline_group: None, kind: type) -> None:
    own = [stage(1, 2 * STAGES), stage(1 + STAGES, 2 * STAGES)]
    schedule = kind(own, MICROBATCHES, nn.MSELoss())
    found = [calls_in_flight(schedule, one.stage_index) for one in own]
    if kind is schedules.ScheduleLoopedBFS:
        assert found == [MICROBATCHES, MICROBATCHES]
    else:
        assert MICROBATCHES >= found[0] > found[1] >= 1
    analyze = getattr(pipelining, "analyze_pipeline_activation_liveness", None)
    if analyze is not None:  # torch 2.15
        grain = "stage_microbatch"
        torchs = [analyze(schedule, pp_rank=1, stage_indices=(one.stage_index,), granularity=grain).num_slots for one in own]
        assert found == torchs


def test_a_schedule_that_splits_the_backward_is_refused_by_name(pipeline_group: None) -> None:
    schedule = schedules.ScheduleInterleavedZeroBubble([stage(1, 8), stage(5, 8)], MICROBATCHES, nn.MSELoss())
    with pytest.raises(OptionsError, match=r"ScheduleInterleavedZeroBubble.*Schedule1F1B"):
        calls_in_flight(schedule, 1)


def test_what_is_no_schedule_or_no_stage_is_refused(pipeline_group: None) -> None:
    with pytest.raises(OptionsError, match="Linear is no schedule"):
        calls_in_flight(nn.Linear(1, 1), 0)
    with pytest.raises(OptionsError, match="0 to 3"):
        calls_in_flight(schedules.ScheduleGPipe(stage(1), 8), 4)


def test_the_running_stage_is_found_on_the_call_stack(pipeline_group: None) -> None:
    module = Asking()
    first = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"), group=distributed.new_group([1]))
    schedule = schedules.ScheduleGPipe(first, 3, lambda y, target: (y - target).square().mean())
    schedule.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    assert set(module.found) == {Stage(0, (1,), 3, "ScheduleGPipe", microbatches=3, keeps_outputs=True)}
    module.found.clear()
    schedule.step(torch.ones(6, 4), target=torch.zeros(6, 4), return_outputs=False)
    assert {found.keeps_outputs for found in module.found if found} == {False}


def test_a_stage_without_a_schedule_has_no_number_of_calls(pipeline_group: None) -> None:
    module = Asking()
    alone = pipelining.PipelineStage(module, 0, STAGES, torch.device("cpu"))
    alone.forward_maybe_with_nosync(torch.ones(2, 4))
    assert module.found == [Stage(0, (0, 1, 2, 3), None)]


def test_a_budget_under_a_schedule_that_splits_the_backward_is_refused(pipeline_group: None) -> None:
    module = Waved()
    # Torch refuses modules of torch.compile here, but not methods that are compiled.
    module.compile(backend="autoremat", options={"compiler": "aot_eager", "memory_budget": 0.9})
    alone = distributed.new_group([1])
    stages = [pipelining.PipelineStage(module, i, 2, torch.device("cpu"), group=alone) for i in range(2)]
    schedule = schedules.ScheduleInterleavedZeroBubble(stages, 2, lambda y, target: (y - target).square().mean())
    with pytest.raises(Exception) as raised:  # noqa: PT011 - torch 2.11 wraps the error
        schedule.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    refusal = find_cause(raised.value, OptionsError)
    assert "ScheduleInterleavedZeroBubble computes the gradients of inputs and of weights in two" in str(refusal)


def compiled_in_a_pipeline(microbatches: int = 3, **options: object) -> autoremat.Report:
    """The report of a stage that is alone in its pipeline."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    run = torch.compile(module, backend="autoremat", options={"compiler": "aot_eager", "memory_budget": 0.9, **options})
    alone = pipelining.PipelineStage(run, 0, 1, torch.device("cpu"), group=distributed.new_group([1]))
    schedule = schedules.ScheduleGPipe(alone, microbatches, lambda y, target: (y - target).square().mean())
    schedule.step(torch.ones(64 * microbatches, 16), target=torch.zeros(64 * microbatches, 16))
    return autoremat.reports()[-1]


def test_options_come_before_the_schedule(pipeline_group: None) -> None:
    read = compiled_in_a_pipeline()
    assert read.in_flight == 3
    assert read.resident_bytes == read.accumulated_bytes == sum(16 * 16 * 4 + 16 * 4 for _ in range(4))
    torch._dynamo.reset()
    told = compiled_in_a_pipeline(in_flight=5, accumulate=False)
    assert told.in_flight == 5
    assert told.resident_bytes == 0
    assert "calls in flight" in str(told)
    assert f"5: 4 x {format_bytes(told.held_bytes)} saved + " in str(told)
    torch._dynamo.reset()
    single = compiled_in_a_pipeline(microbatches=1)
    assert (single.in_flight, single.resident_bytes) == (1, 0)


def test_in_flight_is_public() -> None:
    with pytest.raises(OptionsError, match="no schedule"):
        autoremat.in_flight(object(), 0)
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(OptionsError, match="in_flight=.*an int from 1 to"):
            autoremat.Options(in_flight=wrong)  # type: ignore[arg-type]


def test_a_process_without_pipelines_does_not_import_them() -> None:
    code = (
        "import autoremat.torch_private.pipelining as found, sys; assert found.running_stage() is None; "
        "assert found.STAGES not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
