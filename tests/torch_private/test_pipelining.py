"""Calls in flight, read from torch's schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoremat
from autoremat.basics.errors import OptionsError
from autoremat.torch_private.pipelining import in_flight

STAGES, MICROBATCHES = 4, 8


@pytest.fixture
def pipeline_group() -> Iterator[None]:
    """A group of four ranks whose communication does nothing; this process is rank 1."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=STAGES)
    yield
    distributed.destroy_process_group()


def stage(index: int, num_stages: int = STAGES) -> pipelining.PipelineStage:
    return pipelining.PipelineStage(nn.Linear(4, 4), index, num_stages, torch.device("cpu"))


def test_formulas_of_schedules_of_one_stage(pipeline_group: None) -> None:
    one_f_one_b = [schedules.Schedule1F1B(stage(i), MICROBATCHES, nn.MSELoss()) for i in range(STAGES)]
    assert [in_flight(one, i) for i, one in enumerate(one_f_one_b)] == [4, 3, 2, 1]
    gpipe = schedules.ScheduleGPipe(stage(2), MICROBATCHES, nn.MSELoss())
    assert in_flight(gpipe, 2) == MICROBATCHES


@pytest.mark.parametrize("kind", [schedules.ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS])
def test_schedules_of_several_stages_are_counted(pipeline_group: None, kind: type) -> None:
    own = [stage(1, 2 * STAGES), stage(1 + STAGES, 2 * STAGES)]
    schedule = kind(own, MICROBATCHES, nn.MSELoss())
    found = [in_flight(schedule, one.stage_index) for one in own]
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
        in_flight(schedule, 1)


def test_what_is_no_schedule_or_no_stage_is_refused(pipeline_group: None) -> None:
    with pytest.raises(OptionsError, match="Linear is no schedule"):
        in_flight(nn.Linear(1, 1), 0)
    with pytest.raises(OptionsError, match="no schedule"):
        autoremat.in_flight(object(), 0)
    with pytest.raises(OptionsError, match="0 to 3"):
        in_flight(schedules.ScheduleGPipe(stage(1), 8), 4)
