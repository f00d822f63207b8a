"""What all benchmarks share: arguments, rows that stay, steps in turn, peaks, tables and result files.

A script has its cases, what it measures of each, and the columns of its tables. `run` does the rest: `--only` measures some
cases and keeps the rows of the others, `--resume` leaves out the cases that have rows, `--output` is the folder of the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoremat

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 160


def parser(text: str | None, cases: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Returns a parser with the common arguments; those of cases, if there are any."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    if names := list(cases):
        made.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
        made.add_argument("--resume", action="store_true", help="leave out the cases that have rows")
        made.set_defaults(cases=names)
    return made


def run(
    name: str,
    arguments: argparse.Namespace,
    row: Callable[..., Any],
    measure: Callable[[str], Iterable[Any]],
    shown: Callable[[list[Any]], Sequence[Table | str]],
    **setup: Any,
) -> list[Any]:
    """Returns all rows and writes them after each case. The first field of a ``row`` is its case."""
    rows = stored(name, arguments.output, row, setup)
    for case in arguments.only:
        if arguments.resume and any(case_of(one) == case for one in rows):
            continue
        found = []
        for one in measure(case):
            print(one, flush=True)
            found.append(one)
        rows = [one for one in rows if case_of(one) != case] + found
        rows.sort(key=lambda one: arguments.cases.index(case_of(one)) if case_of(one) in arguments.cases else -1)
        write(name, arguments.output, shown(rows), rows, **setup)
    return rows


def case_of(row: Any) -> Any:
    return next(iter(as_dict(row).values()))


def as_dict(row: Any) -> dict[str, Any]:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)


def stored(name: str, folder: Path, row: Callable[..., Any], setup: Mapping[str, Any] = {}) -> list[Any]:  # noqa: B006
    """Returns the rows that an earlier run with the same torch and setup has written, if they have all fields of today."""
    path = folder / f"{name}.json"
    record = json.loads(path.read_text()) if path.exists() else []
    record = {"rows": record} if isinstance(record, list) else record
    wanted = json.loads(json.dumps({"torch": torch.__version__, **setup}))
    if any(record.get(key, value) != value for key, value in wanted.items()):
        return []
    if not is_dataclass(row):
        return [row(**one) for one in record["rows"]]
    known = {field.name: field.default is MISSING for field in fields(row)}
    complete = [one for one in record["rows"] if all(name in one for name, is_needed in known.items() if is_needed)]
    return [row(**{name: one[name] for name in known if name in one}) for one in complete]


def write(name: str, folder: Path, shown: Iterable[Table | str], rows: Iterable[Any], **setup: Any) -> None:
    """Prints ``shown`` and writes it to ``name``.txt, and the rows to ``name``.json."""
    machine = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    setup = machine | {"load": round(os.getloadavg()[0], 1)} | setup
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.txt").open("w") as file:
        for console in (Console(width=WIDTH), Console(width=WIDTH, file=file)):
            for part in (", ".join(f"{key}: {value}" for key, value in setup.items()), *shown):
                console.print(part, highlight=False, markup=False)
    (folder / f"{name}.json").write_text(json.dumps(setup | {"rows": [as_dict(row) for row in rows]}, indent=1) + "\n")


def table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Returns a table with a column for each key. Columns of long texts stand on the left, as the first one does."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(rows[0] if rows else ()):
        is_text = number == 0 or any(len(str(row[column])) > 24 for row in rows)
        made.add_column(column, justify="left" if is_text else "right", no_wrap=number == 0)
    for row in rows:
        made.add_row(*map(str, row.values()))
    return made


def training_step(model: nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> Callable[[], None]:
    """Returns a step, forward and backward, of the model compiled with ``options`` of `torch.compile`."""
    compiled = torch.compile(model, **options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*inputs).backward()

    return step


def measured_peak(step: Callable[[], object], *models: nn.Module, device: str | torch.device = "cpu") -> int:
    """Returns the peak of a step that starts without gradients, in bytes above those live when it begins."""
    for model in models:
        model.zero_grad(set_to_none=True)
    gc.collect()
    with autoremat.track_peak(device) as peak:
        step()
    return peak.bytes


def in_turn(steps: Mapping[str, Callable[[], object]], rounds: int, warm: int = 2) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round. In a round, all take one step; the first ``warm`` rounds do not count."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warm + rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn >= warm:
                samples[name].append(time.perf_counter() - begin)
    return samples


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"
