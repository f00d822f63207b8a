"""Timings with clocks of our own: how often something runs, and what counts. No test asserts on real seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from clocks import Clock

from autoremat.measure.timer import MAX_RUNS, Stopwatch, longest_delay, run_delays, undisturbed

CPU = torch.device("cpu")


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


class Processor(Clock):
    """Runs that take ``cost`` seconds. In runs for which ``is_busy`` holds, one thread waits for nine times as long."""

    def __init__(self, cost: float, is_busy: Callable[[int], bool]) -> None:
        super().__init__()
        self.cost, self.is_busy, self.delay, self.runs = cost, is_busy, 0.0, 0

    def run(self) -> None:
        self.runs += 1
        waits = 9 * self.cost if self.is_busy(self.runs) else 0.0
        self.time += self.cost + waits
        self.delay += waits

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(lambda: None, self.now, lambda: {"worker": self.delay, "idle": 0.0})


def test_a_stopwatch_waits_for_samples_without_a_run_delay():
    processor = Processor(1e-3, lambda run: run % 3 != 0)
    watch = processor.stopwatch()
    assert watch.seconds(processor.run) == pytest.approx(1e-3)
    assert processor.runs >= 3 * watch.samples
    assert watch.disturbed_share == 0.0


def test_a_stopwatch_that_is_always_disturbed_subtracts_the_delays_and_says_so():
    processor = Processor(1e-2, lambda run: True)
    watch = processor.stopwatch()
    assert watch.seconds(processor.run) == pytest.approx(1e-2)
    assert processor.runs < 2 + 2 * watch.patience / 1e-1 + watch.samples
    assert watch.disturbed_share == 1.0
    processor.is_busy = lambda run: False
    watch.seconds(processor.run)
    assert watch.disturbed_share == 0.5


def test_a_thread_that_waits_for_a_processor_has_a_run_delay():
    if not run_delays():
        pytest.skip("this system counts no run delays")
    before, threads = run_delays(), 2 * len(os.sched_getaffinity(0)) + 1
    program = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(threads)]
    while any(other.poll() is None for other in others):
        pass
    assert longest_delay(before, run_delays()) > 0.0
    assert longest_delay({"1": 1.0, "2": 5.0}, {"1": 1.5, "2": 5.25, "3": 0.125}) == 0.5
    assert longest_delay({}, {}) == 0.0


def test_work_is_measured_outside_of_the_modes_of_a_compilation_and_keeps_the_random_state():
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = torch.get_rng_state()
    with FakeTensorMode():
        kind, threads, graded = undisturbed(
            CPU, lambda: (type(torch.rand(2)), torch.get_num_threads(), torch.is_grad_enabled())
        )
    assert (kind, threads, graded) == (torch.Tensor, torch.get_num_threads(), False)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_goes_wrong_while_measuring_is_raised_where_one_waits():
    def fail() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        undisturbed(CPU, fail)
