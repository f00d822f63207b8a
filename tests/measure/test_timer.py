"""Timings with clocks of our own: how often something runs, and what counts. No test asserts on real seconds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from autoremat.measure.timer import MAX_RUNS, Stopwatch, outside_of_modes

CPU = torch.device("cpu")


@dataclass
class Clock:
    """Time that passes only when told to."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


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


def test_work_is_measured_outside_of_the_modes_of_a_compilation_and_keeps_the_random_state():
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = torch.get_rng_state()
    with FakeTensorMode():
        kind, threads, graded = outside_of_modes(
            CPU, lambda: (type(torch.rand(2)), torch.get_num_threads(), torch.is_grad_enabled())
        )
    assert (kind, threads, graded) == (torch.Tensor, torch.get_num_threads(), False)
    assert torch.equal(torch.get_rng_state(), state)
