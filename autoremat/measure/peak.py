"""Measures the peak memory of a piece of code. Memory budgets are checked against this figure.

    with track_peak() as peak:
        model(x).sum().backward()
    print(peak.bytes)

On a CPU, the figure comes from torch's allocator events, which `torch.profiler` records. On CUDA, it comes from the allocator's
own counters. These count whole blocks of the device: a multiple of 512 bytes, and for a tensor of more than 1 MiB at most 1 MiB
above that. Neither figure includes memory from other sources, such as oneDNN's scratch memory or thread stacks.

Torch warns once in a process, "Memory block of unknown size", of tensors that are older than the block. They do not count.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

Timeline = tuple[tuple[float, int], ...]
"""(seconds since the start, bytes above the start) after each allocation and release, in order of time."""

KINETO_SILENT = "6"
"""The value of `KINETO_LOG_LEVEL` above the level of all of kineto's messages, including its "profiler_start" lines."""

MARK = "autoremat::mark"
"""The name of events that divide a CPU timeline."""

CUDA_HISTORY_ENTRIES = 1_000_000
"""The most allocator events in a CUDA timeline. Torch drops the oldest events beyond that."""


def track_peak(device: torch.device | str | None = None, *, timeline: bool = False) -> PeakTracker:
    """Returns a context manager that measures the peak memory of its block, in bytes above the memory live at its start.

    `device` is "cpu" or a CUDA device. None selects the current CUDA device if this process uses CUDA, else the CPU. `timeline`
    records every allocation on CUDA; on a CPU the timeline is always recorded.

    On a CPU, the tracker sees the thread that enters it, and the threads that run this thread's backward passes. It raises
    ``RuntimeError`` inside another profiler. A tensor that was live at the start and is freed inside the block lowers the CUDA
    figure. It does not lower the CPU figure, because the CPU allocator does not report its size. For such a block, the CPU
    figure can be too high, never too low.

    Raises ``ValueError`` for other device types.
    """
    if device is None:
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = "cuda" if in_use else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return _CpuTracker()
    if chosen.type == "cuda":
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        return _CudaTracker(index, record_timeline=timeline)
    raise ValueError(f"`track_peak` measures the CPU and CUDA devices, not {chosen.type!r}.")


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes above those that were live at the start."""

    live_bytes: int
    """Bytes live at the mark."""
    peak_bytes: int
    """Peak in bytes since the previous mark, or since the start."""


class PeakTracker(ABC):
    """The context manager that `track_peak` returns. Its attributes are available after the end of its block."""

    readings: tuple[Reading, ...] = ()
    """One reading for each mark, and one for the end."""

    def __init__(self) -> None:
        self._found: tuple[int, Timeline | None] | None = None

    @property
    def bytes(self) -> int:
        """The peak in bytes above the memory live at the start; never negative.

        Raises ``RuntimeError`` while the block runs.
        """
        return self._after_block[0]

    @property
    def timeline(self) -> Timeline | None:
        """The memory over time; on CUDA, None unless requested.

        Raises ``RuntimeError`` while the block runs.
        """
        return self._after_block[1]

    @property
    def _after_block(self) -> tuple[int, Timeline | None]:
        if self._found is None:
            raise RuntimeError("All figures are known only after the block of `with track_peak() as peak:` has ended.")
        return self._found

    def __enter__(self) -> PeakTracker:
        self._found = None
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._found = self._stop()
        except Exception:
            if error is None:  # the block's own error takes precedence
                raise

    @abstractmethod
    def mark(self) -> None:
        """Sets a mark at the present time."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self) -> tuple[int, Timeline | None]: ...


class _CpuTracker(PeakTracker):
    """Measures a CPU peak by replaying the allocator events of a profile."""

    def mark(self) -> None:
        with torch.profiler.record_function(MARK):
            pass

    def _start(self) -> None:
        if _profiler_enabled():
            raise RuntimeError(
                "`track_peak` on a CPU cannot start inside another profiler or another `track_peak`, which would lose "
                "its events. End that one first, or track them one after the other."
            )
        self._profile = profile(use_kineto=True, profile_memory=True)
        with _kineto_silenced():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self) -> tuple[int, Timeline]:
        interrupted = not _profiler_enabled()
        # Torch 2.11 raises an error when it stops a profiler that is no longer running.
        with contextlib.suppress(RuntimeError) if interrupted else contextlib.nullcontext():
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results: Any = self._profile.kineto_results
        if interrupted:
            raise RuntimeError(
                "A profiler inside the block of `track_peak` took over its events, so the peak is unknown. Profile "
                "and track in two separate runs."
            )
        found = list(_events(results.experimental_event_tree()))
        start = results.trace_start_ns()
        marks = sorted((e.start_time_ns - start) / 1e9 for e in found if e.name == MARK)
        on_cpu = [e for e in found if hasattr(e.extra_fields, "alloc_size") and e.extra_fields.device.type == "cpu"]
        timeline = _replay(sorted(on_cpu, key=lambda event: event.start_time_ns), start)
        self.readings = tuple(_readings(timeline, marks))
        return max(held for _, held in timeline), timeline


def _readings(timeline: Timeline, marks: Iterable[float]) -> Iterator[Reading]:
    times, levels = [time for time, _ in timeline], [level for _, level in timeline]
    begin = 0
    for mark in (*marks, float("inf")):
        end = max(bisect_left(times, mark), 1)
        yield Reading(levels[end - 1], max(levels[max(begin - 1, 0) : end]))  # the level at the last mark is valid until then
        begin = end


@contextlib.contextmanager
def _kineto_silenced() -> Iterator[None]:
    """Suppresses kineto's messages at each start and stop. Kineto reads the level once: while the first profile starts."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = KINETO_SILENT
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _events(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the events of a profile's event tree, parents first. For one thread, this is the order of time."""
    pending = list(reversed(list(roots)))
    while pending:
        event = pending.pop()
        pending.extend(reversed(event.children))
        yield event


def _replay(events: Iterable[Any], start_ns: int) -> Timeline:
    """Returns the live bytes after each of `events`, which are in order of time.

    Blocks are identified by address. A release of an unknown address frees memory from before the start and is left out. Torch
    reports such a release with a size from an earlier profile, or not at all.
    """
    held: dict[int, int] = {}
    total = 0
    timeline = [(0.0, 0)]
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size <= 0 and address not in held:
            continue
        # The address was released where no profiler looked, such as in a thread of the user's.
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
        timeline.append((max(0.0, (event.start_time_ns - start_ns) / 1e9), total))
    return tuple(timeline)


class _CudaTracker(PeakTracker):
    """Measures a CUDA peak by the counters of the caching allocator."""

    _running: set[int] = set()
    """Devices that are being tracked. A second tracker would reset the peak of the first."""

    def __init__(self, index: int, *, record_timeline: bool) -> None:
        super().__init__()
        self._index, self._record_timeline = index, record_timeline

    def mark(self) -> None:
        self._read()
        torch.cuda.reset_peak_memory_stats(self._index)

    def _read(self) -> None:
        live, peak = torch.cuda.memory_allocated(self._index), torch.cuda.max_memory_allocated(self._index)
        self.readings += (Reading(live - self._live_at_start, peak - self._live_at_start),)

    def _start(self) -> None:
        if self._index in self._running:
            raise RuntimeError(f"`track_peak` already runs on cuda:{self._index}; track one block after the other.")
        if self._record_timeline and torch._C._cuda_isHistoryEnabled():
            raise RuntimeError(
                "the history of CUDA's allocator is being recorded already, and `track_peak(timeline=True)` would replace and "
                "end it. End it first, or track the peak without its timeline."
            )
        if self._record_timeline:
            torch.cuda.memory._record_memory_history(context=None, max_entries=CUDA_HISTORY_ENTRIES)
        try:
            torch.cuda.reset_peak_memory_stats(self._index)
            self.readings = ()
            self._live_at_start = torch.cuda.memory_allocated(self._index)
        except BaseException:
            self._end_history()
            raise
        self._running.add(self._index)

    def _stop(self) -> tuple[int, Timeline | None]:
        self._running.discard(self._index)
        self._read()
        peak = max(0, *(reading.peak_bytes for reading in self.readings))
        if not self._record_timeline:
            return peak, None
        try:
            trace = torch.cuda.memory._snapshot()["device_traces"][self._index]
        finally:
            self._end_history()
        return peak, _replay_cuda(trace)

    def _end_history(self) -> None:
        if self._record_timeline:
            torch.cuda.memory._record_memory_history(enabled=None)


def _replay_cuda(trace: Iterable[dict[str, Any]]) -> Timeline:
    """Returns the bytes above the start after each event of the CUDA allocator's history, whose times are in microseconds."""
    signs = {"alloc": 1, "free_requested": -1}  # a block is no longer allocated once its release is requested
    events = [(entry["time_us"], signs[entry["action"]] * entry["size"]) for entry in trace if entry["action"] in signs]
    totals = accumulate(size for _, size in events)
    return ((0.0, 0), *(((time - events[0][0]) / 1e6, total) for (time, _), total in zip(events, totals, strict=True)))
