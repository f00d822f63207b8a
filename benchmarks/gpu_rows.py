"""Units of work whose results a file keeps, so that several short calls do what one long call would do.

The file has one JSON object per line: the units of a stage, the begin of a unit, or its end. An end is a row, an error or a
reason why the unit was skipped. A unit that has ended is not begun again.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIES = 2
"""Number of times that a unit is begun. The process may end while it runs: by its own fault, or because the time is over."""

ENDS = ("row", "error", "skipped")

Line = dict[str, Any]


class Skipped(Exception):
    """A unit cannot run here. The text says why."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a script that runs the units of a stage."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="the file of rows, which is read first")
    parser.add_argument("--until", type=float, required=True, help="seconds since the epoch after which no unit is begun")
    parser.add_argument("--units", type=int, default=None, help="the most units to run")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    return parser


@dataclass(frozen=True)
class Unit:
    """One piece of work. Its result is a row."""

    name: str
    work: Callable[[], Line]


@dataclass(frozen=True)
class Rows:
    """The lines of the file ``path``."""

    path: Path

    def lines(self) -> Iterator[Line]:
        """Yields the lines of all calls. A line that was cut off is left out."""
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue

    def append(self, **line: Any) -> None:
        """Writes a line at once. An empty line before it ends one that was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("\n" * self._is_cut_off() + json.dumps(line) + "\n")

    def _is_cut_off(self) -> bool:
        return self.path.exists() and bool(text := self.path.read_bytes()) and not text.endswith(b"\n")

    def ends(self, stage: str) -> dict[str, Line]:
        """Returns the last line of each unit that has ended."""
        return {line["unit"]: line for line in self.lines() if line.get("stage") == stage and any(end in line for end in ENDS)}

    def rows(self, stage: str) -> list[Line]:
        """Returns the rows of a stage."""
        return [line["row"] for line in self.ends(stage).values() if "row" in line]

    def remaining(self, stage: str) -> list[str] | None:
        """Returns the names of the units that have not ended; None if the stage has not begun."""
        units = None
        for line in self.lines():
            if line.get("stage") == stage and "units" in line:
                units = line["units"]
        return None if units is None else [name for name in units if name not in self.ends(stage)]

    def tries(self, stage: str, unit: str) -> int:
        return sum(line.get("stage") == stage and line.get("unit") == unit and "begun" in line for line in self.lines())

    def longest(self, stage: str) -> float:
        """Returns the seconds of the longest unit of a stage so far."""
        return max((line["seconds"] for line in self.ends(stage).values() if "row" in line), default=0.0)

    def forget_errors(self) -> None:
        """Removes the ends of units that failed, and their begins, so that they run again."""
        failed = {(line["stage"], line["unit"]) for line in self.lines() if "error" in line}
        kept = [line for line in self.lines() if (line.get("stage"), line.get("unit")) not in failed]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def run(self, stage: str, units: Sequence[Unit], until: float, most: int | None = None) -> None:
        """Runs the units that have not ended, until there may be no time for one more before ``until``, or until ``most`` ran.

        Raises ``SystemExit`` after an error that leaves the device unusable for this process.
        """
        self.append(stage=stage, units=[unit.name for unit in units])
        for unit in [unit for unit in units if unit.name not in self.ends(stage)][:most]:
            if self.tries(stage, unit.name) >= TRIES:
                self.append(stage=stage, unit=unit.name, error=f"the process ended {TRIES} times while this unit ran")
                continue
            if time.time() + self.longest(stage) > until:
                return
            self._run(stage, unit)

    def _run(self, stage: str, unit: Unit) -> None:
        begin = time.time()
        self.append(stage=stage, unit=unit.name, begun=round(begin))
        try:
            end = {"row": unit.work()}
        except Skipped as reason:
            end = {"skipped": str(reason)}
        except Exception as error:
            traceback.print_exc()
            end = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.append(stage=stage, unit=unit.name, seconds=round(time.time() - begin, 2), **end)
        shown = end.get("skipped") or end.get("error", "").partition("\n")[0] or "done"
        print(f"{stage}, {unit.name}: {shown} after {time.time() - begin:.1f} s", flush=True)
        if "CUDA error" in str(end.get("error")):
            raise SystemExit("this process has lost its device; the next one goes on")
