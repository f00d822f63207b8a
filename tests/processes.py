"""Runs a function in processes of a gloo group, each forked from one that has imported torch and the package."""

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Environment of a process that shares the cores with others. Inductor starts no processes that compile."""


class _Origin:
    """A process that has imported torch and the package, and forks one rank at a time."""

    def __init__(self) -> None:
        pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], bufsize=0, env=_here(), cwd=TESTS.parent, **pipes)

    def start(self, folder: Path, rank: int, environment: Mapping[str, str]) -> None:
        """Forks the process of ``rank``."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), rank, {**_here(), **environment}]).encode() + b"\n")
        self.rank_process = self._read()

    def wait(self, seconds: float) -> tuple[int, bool]:
        """Returns the exit code of the rank's process, and True if it came in time. If not, the process is killed."""
        in_time = bool(select.select([self.process.stdout], [], [], seconds)[0])
        if not in_time:
            os.kill(self.rank_process, signal.SIGKILL)
        return self._read(), in_time

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


_idle: list[_Origin] = []
"""Origins that have no rank now."""


def _here() -> dict[str, str]:
    """Returns the environment of a rank, before further variables."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    timeout: float = 120.0,
    args: Sequence[Any] = (),
    environment: Mapping[str, str] | None = None,
    group: bool = True,
) -> list[Any]:
    """Returns the results of ``function(rank, *args)``, called in ``world_size`` new processes, by rank.

    ``function`` is defined at the top of a module under ``tests`` or of an installed package. Its result can be pickled. With
    ``group``, each process first joins a gloo group over a file. Processes that run longer than ``timeout`` seconds are killed.
    Variables of the ``environment`` that torch reads while it is imported have no effect. Raises ``AssertionError`` with the
    errors of the ranks that failed and what they printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = (function.__module__, function.__qualname__, tuple(args), world_size, timeout, group)
        (folder / "call").write_bytes(pickle.dumps(call))
        origins = []
        for _ in range(world_size):
            try:
                origins.append(_idle.pop())
            except IndexError:  # another thread may have taken the last one
                origins.append(_Origin())
        for rank, origin in enumerate(origins):
            origin.start(folder, rank, environment or {})
        deadline = time.monotonic() + timeout
        ended = [origin.wait(max(0.0, deadline - time.monotonic())) for origin in origins]
        _idle.extend(origins)
        found = [_result(folder, rank, *end) for rank, end in enumerate(ended)]
    failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error]
    assert not failed, "\n".join(failed)
    return [value for value, _ in found]


@contextlib.contextmanager
def group_of(ranks: int = 1, rank: int = 0) -> Iterator[None]:
    """A group of this process: alone by gloo, or with ``ranks`` of which the others do not exist and nothing is sent."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backend, store = ("gloo", distributed.HashStore()) if ranks == 1 else ("fake", FakeStore())
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _result(folder: Path, rank: int, code: int, in_time: bool) -> tuple[Any, str]:
    """The result of the function on a rank, and the error with the output of the process."""
    value, error, file = None, f"ended with code {code}" if in_time else "killed", folder / f"{rank}.result"
    if file.exists():
        value, error = pickle.loads(file.read_bytes())
    return value, error and error + "\n" + (folder / f"{rank}.output").read_text(errors="replace")


def _main(folder: Path, rank: int) -> None:
    """Calls the function in this process as ``rank``, writes its result and ends the process."""
    import importlib

    from torch import distributed

    module, name, args, world_size, timeout, group = pickle.loads((folder / "call").read_bytes())
    value, error = None, ""
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


def _fork() -> None:
    """Forks a process for each line of standard input, and prints its number and, once it has ended, its exit code."""
    import torch._inductor.compile_fx  # noqa: F401  # what ranks import while they compile
    import torch.distributed.fsdp  # noqa: F401

    import autoremat.compiler.dynamo_backend  # noqa: F401

    for line in sys.stdin:
        folder, rank, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = [*dict.fromkeys([*environment["PYTHONPATH"].split(os.pathsep), *sys.path])]
            with (Path(folder) / f"{rank}.output").open("wb") as output, open(os.devnull) as nothing:
                for source, stream in ((nothing, 0), (output, 1), (output, 2)):
                    os.dup2(source.fileno(), stream)
            _main(Path(folder), rank)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _fork()
