"""Runs a function in several processes that form a gloo group, and returns the result or the error of each."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Environment of a process that shares the cores with others. Inductor starts no processes that compile."""


@dataclass(frozen=True)
class RankResult:
    """The end of one rank's process."""

    value: Any = None
    """The result of the function."""
    error: str | None = None
    """The traceback if the function raised, or a line if the process was ended; None after success."""
    output: str = ""
    """The process's standard output and standard error."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    timeout: float = 120.0,
    args: Sequence[Any] = (),
    environment: Mapping[str, str] | None = None,
    group: bool = True,
) -> list[RankResult]:
    """Returns the results of ``function(rank, *args)``, called in ``world_size`` new processes, by rank.

    ``function`` is defined at the top of a module under ``tests`` or of an installed package. Its result can be pickled. With
    ``group``, each process first joins a gloo group over a file. Processes that run longer than ``timeout`` seconds are killed,
    and their error says so.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = (function.__module__, function.__qualname__, tuple(args), world_size, timeout, group)
        (folder / "call").write_bytes(pickle.dumps(call))
        started = [_start(folder, rank, environment or {}) for rank in range(world_size)]
        deadline, in_time = time.monotonic() + timeout, []
        for process in started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
                in_time.append(True)
            except subprocess.TimeoutExpired:
                in_time.append(False)
        for process in started:
            process.kill()
            process.wait()
        ended = zip(started, in_time, strict=True)
        return [_result(folder, rank, process.returncode, on_time, timeout) for rank, (process, on_time) in enumerate(ended)]


def values(results: Sequence[RankResult]) -> list[Any]:
    """Returns the values of all ranks. Raises ``AssertionError`` with the errors of the ranks that failed."""
    failed = [f"rank {rank}: {one.error}\n{one.output}" for rank, one in enumerate(results) if one.error is not None]
    assert not failed, "\n".join(failed)
    return [one.value for one in results]


def _start(folder: Path, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"{rank}.output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            cwd=TESTS.parent,
        )


def _result(folder: Path, rank: int, code: int, on_time: bool, timeout: float) -> RankResult:
    output = (folder / f"{rank}.output").read_text(errors="replace")
    file = folder / f"{rank}.result"
    if file.exists():
        value, error = pickle.loads(file.read_bytes())
        return RankResult(value, error, output)
    error = f"the process ended with code {code}" if on_time else f"the process was killed after {timeout:g} s"
    return RankResult(None, error, output)


def _main(folder: Path, rank: int) -> None:
    """Calls the function in this process as ``rank`` and writes its result."""
    import importlib

    from torch import distributed

    from autoremat.agreement import rendezvous

    rendezvous.ALONE = 60.0  # on busy cores, ranks that compile the same place again can be seconds apart
    module, name, args, world_size, timeout, group = pickle.loads((folder / "call").read_bytes())
    value = error = None
    try:
        function = getattr(importlib.import_module(module), name)
        if group:
            store = f"file://{folder / 'store'}"
            distributed.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        value = function(rank, *args)
    except Exception:
        error = traceback.format_exc()
    written = folder / f"{rank}.writing"
    written.write_bytes(pickle.dumps((value, error)))
    written.rename(folder / f"{rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer that failed may never answer a shutdown of the group


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
