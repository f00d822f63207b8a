"""`track_peak` against allocations whose sizes are known."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from autoremat.measure.peak import _replay, track_peak

MIB = 1 << 20


def block(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def allocation(address: int, size: int, at: int) -> SimpleNamespace:
    return SimpleNamespace(start_time_ns=at, extra_fields=SimpleNamespace(ptr=address, alloc_size=size))


class Doubled(torch.autograd.Function):
    """The identity; its backward allocates 4 MiB of scratch memory and one gradient."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        scratch = block(4)
        return gradient + scratch[0].float() * 0


def test_peak_and_timeline_of_three_tensors_one_freed_between():
    with track_peak("cpu") as peak:
        first = block(1)
        second = block(1)
        del first
        third = block(1)
    assert peak.bytes == 2 * MIB
    assert [held // MIB for _, held in peak.timeline] == [0, 1, 2, 1, 2]
    assert list(peak.timeline) == sorted(peak.timeline, key=lambda point: point[0])
    assert all(0 <= seconds < 60 for seconds, _ in peak.timeline)
    assert len(second) == len(third) == MIB


def test_temporaries_of_an_operator_count():
    x = torch.ones(MIB // 4)
    with track_peak("cpu") as peak:
        y = ((x + 1) * 2).sum()
    assert 2 * MIB <= peak.bytes < 2 * MIB + 64  # 1 and 2 are tensors of some bytes each
    assert y.item() == MIB


def test_allocations_of_the_backward_pass_count():
    x = torch.ones(MIB // 4, requires_grad=True)
    loss = Doubled.apply(x)
    gradient = torch.ones_like(loss)
    with track_peak("cpu") as peak:
        loss.backward(gradient)
    assert 5 * MIB <= peak.bytes < 5 * MIB + 1024
    assert peak.timeline[-1][1] == MIB  # x.grad


def test_freeing_older_tensors_never_makes_it_negative():
    with track_peak("cpu"):
        known = block(8)  # its size stays in the profiler's table after this block
    old = block(8)
    with track_peak("cpu") as peak:
        del known, old
        new = block(1)
    assert peak.bytes == MIB
    assert min(held for _, held in peak.timeline) == 0
    assert len(new) == MIB


def test_many_events_none_lost():
    older = [torch.empty(64, dtype=torch.uint8) for _ in range(10)]
    with track_peak("cpu") as peak:
        del older  # releases of memory from before the block are no events of the block
        held = [torch.empty(64, dtype=torch.uint8) for _ in range(20_000)]
        del held
    assert peak.bytes == 64 * 20_000
    assert len(peak.timeline) == 40_001
    assert peak.timeline[-1][1] == 0


def test_replay_tells_blocks_apart_by_address():
    events = [
        allocation(1, 100, at=10),
        allocation(9, -500, at=20),  # not allocated here
        allocation(1, -100, at=30),
        allocation(1, 40, at=30),  # the same address again, at the same time
        allocation(1, 70, at=40),  # its release was not seen
    ]
    assert _replay(events, 10) == ((0.0, 0), (0.0, 100), (2e-8, 0), (2e-8, 40), (3e-8, 70))


def test_reading_too_early_is_an_error_and_a_tracker_can_be_entered_again():
    tracker = track_peak("cpu")
    for size in (2, 1):
        with tracker:
            block(size)
            with pytest.raises(RuntimeError, match="only after the block"):
                tracker.bytes  # noqa: B018
        assert tracker.bytes == size * MIB


def test_nested_trackers_are_an_error_and_the_outer_one_goes_on():
    with track_peak("cpu") as outer:
        first = block(1)
        with pytest.raises(RuntimeError, match="inside another profiler"), track_peak("cpu"):
            pass
        second = block(1)
    assert outer.bytes == 2 * MIB
    assert len(first) + len(second) == 2 * MIB


def test_a_profiler_inside_the_block_is_an_error():
    tracker = track_peak("cpu")
    with pytest.raises(RuntimeError, match="took over its events"), tracker:
        with torch.autograd.profiler.profile():
            pass
    with pytest.raises(RuntimeError, match="only after"):
        tracker.bytes  # noqa: B018


def test_trackers_of_two_threads_do_not_disturb_each_other():
    def track(mebibytes):
        with track_peak("cpu") as peak:
            block(mebibytes)
        return peak.bytes

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert [one.submit(track, 1).result(), other.submit(track, 3).result()] == [MIB, 3 * MIB]


def test_nothing_is_printed_but_a_warning_of_torch():
    code = (
        "import os, torch; from autoremat.measure.peak import track_peak\nolder = torch.empty(9)\n"
        "for _ in range(2):\n    with track_peak('cpu'): torch.empty(10); older = None"
    )
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert all("Memory block of unknown size" in line for line in done.stderr.splitlines() if line.startswith("[W"))
    assert "profiler_start" not in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_counters_and_timeline():
    torch.cuda.init()
    with track_peak(timeline=True) as peak:
        first = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del first
        third = torch.empty(1 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match="already runs"), track_peak("cuda"):
            pass
    assert peak.bytes == 6 * MIB
    assert [held // MIB for _, held in peak.timeline] == [0, 2, 6, 4, 5]
    assert len(second) + len(third) == 5 * MIB
