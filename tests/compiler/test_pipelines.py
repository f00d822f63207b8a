"""Calls in flight, read from torch's schedules, and stages of real pipelines that keep their budgets with all of them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from block_models import FeedForward
from processes import group_of, run_ranks
from torch import distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import autoremat
from autoremat.basics.errors import BudgetWarning, OptionsError
from autoremat.measure.peak import track_peak
from autoremat.torch_private.process_groups import in_flight

WIDTH, ROWS, MICROBATCHES = 64, 1024, 8
"""Rows of a micro-batch."""


class Part(nn.Module):  # Dynamo compiles no nn.Sequential in place
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(FeedForward(WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that saves no tensor of its own: the loss is not compiled, so no budget counts what it saves."""
    return (output * target).sum()


def pipeline_of(rank: int, kind: str, options: dict[str, Any] | None) -> tuple[Any, nn.Module]:
    """The schedule of this rank and its stage's module, compiled with ``options`` or not at all."""
    stages = distributed.get_world_size()
    torch.manual_seed(rank)
    module = Part()
    stage = pipelining.PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, MICROBATCHES, product)
    if options is not None:
        counted = {"in_flight": autoremat.in_flight(schedule, rank)}
        module.compile(backend="autoremat", options={"progress": False, **counted, **options})
    return schedule, module


def steps_of(schedule: Any, rank: int) -> Callable[[], Any]:
    """A function that runs a step on inputs that exist already."""
    torch.manual_seed(0)
    whole, target = torch.randn(2, schedule._n_microbatches * ROWS, WIDTH)
    positional, named = [whole] if rank == 0 else [], {"target": target} if rank == distributed.get_world_size() - 1 else {}
    return lambda: schedule.step(*positional, **named, return_outputs=False)


def measured(rank: int, kind: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of the second step of a rank, and the gradients."""
    schedule, module = pipeline_of(rank, kind, options)
    step = steps_of(schedule, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        module.zero_grad(set_to_none=True)
        with track_peak("cpu") as peak:
            step()
    found: dict[str, Any] = {"peak": peak.bytes, "gradients": [p.grad.numpy() for p in module.parameters()]}
    found["warnings"] = [str(one.message) for one in caught if issubclass(one.category, BudgetWarning)]
    if options is not None:
        report = autoremat.reports()[-1]
        found |= {name: getattr(report, name) for name in ("budget_bytes", "peak_bytes", "in_flight", "recomputed_ops")}
        found["reports"] = len(autoremat.reports())
    return found


def plain_and_planned(rank: int, kind: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return measured(rank, kind, None), measured(rank, kind, {"compiler": "aot_eager", **options})


def judge(results: list[tuple[dict[str, Any], dict[str, Any]]], used: float) -> None:
    """All stages are within their budgets, which plain training is not, use most of their plans' peaks, and train alike."""
    for plain, planned in results:
        assert planned["reports"] == 1
        assert planned["warnings"] == []
        assert used * planned["peak_bytes"] <= planned["peak"] <= planned["budget_bytes"] < plain["peak"]
        assert planned["recomputed_ops"] > 0
        assert all((a == b).all() for a, b in zip(planned["gradients"], plain["gradients"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "calls"), [("Schedule1F1B", [4, 3, 2, 1]), ("ScheduleGPipe", [8, 8, 8, 8])])
def test_four_stages_keep_their_budgets(kind, calls):
    found = run_ranks(plain_and_planned, 4, args=(kind, {"memory_budget": 0.8}))
    assert [planned["in_flight"] for _, planned in found] == calls
    judge(found, used=0.9)


STAGES = 4


@pytest.fixture
def pipeline_group() -> Iterator[None]:
    """A group of four ranks whose communication does nothing; this process is rank 1."""
    with group_of(STAGES, rank=1):
        yield


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
