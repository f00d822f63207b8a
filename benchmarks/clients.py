"""Trains programs of other libraries for three steps without and with two budgets, and writes one table.

    pip install . torch transformers accelerate trl peft lightning diffusers x-transformers litgpt torchtune torchtitan timm
    python benchmarks/clients.py
    python benchmarks/clients.py --only Wav2Vec2 --limit 600
    python benchmarks/clients.py --compiler aot_eager  # far quicker: without generated code
    python benchmarks/clients.py --page  # the stored rows, as docs/integrations.md shows them

The program without a budget runs under the compiler alone. The first budget is a share, the second the minimum peak that the
report names and 3 % more, in bytes. If that is an error, the third is the minimum peak that the error names. Each program has
a process of its own with a time limit. A library that cannot be imported is a row. Models are tiny and random, and nothing is
downloaded.

The measured peak is that of the third step, from the end of the second update to the end of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from client_programs import CLIENTS, STEPS
from rich.console import Console
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_post_hook

import autoremat

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.7
MARGIN = 1.03
"""The budget in bytes, over the minimum peak found."""


@dataclass(frozen=True)
class Row:
    """A program under one setting. Peaks are in bytes, for the largest graph if there are several."""

    program: str
    versions: str
    needs: str
    budget: str
    """A name of the setting."""
    outcome: str = "trains"
    losses: tuple[float, ...] = ()
    difference: float | None = None
    """Largest relative difference of a loss from that without a budget."""
    graphs: int = 0
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    fits: bool | None = None
    minimum_bytes: int | None = None


class Watch:
    """Records the losses that ``backward`` is called on, and the peak of the last step, without a change of the program."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.updates = 0
        self.tracker = autoremat.track_peak("cpu")

    def run(self, program: Callable[[], None]) -> None:
        """Runs the program under observation."""
        backward = torch.Tensor.backward

        def recording(loss: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            self.losses.append(loss.item())
            backward(loss, *arguments, **keywords)

        handle = register_optimizer_step_post_hook(self.updated)
        torch.Tensor.backward = recording
        try:
            program()
        finally:
            torch.Tensor.backward = backward
            handle.remove()

    def updated(self, *_: Any) -> None:
        """Counts an update of the parameters, and measures between the last two."""
        self.updates += 1
        if self.updates == STEPS - 1:
            self.tracker.__enter__()
        elif self.updates == STEPS:
            self.tracker.__exit__(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of programs; the file keeps all other rows")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a program")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--compiler", choices=["inductor", "aot_eager"], default="inductor")
    parser.add_argument("--page", action="store_true", help="print the stored rows as the table of docs/integrations.md")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        run_program(arguments.program, arguments.compiler)
        return
    path = arguments.output / ("clients.json" if arguments.compiler == "inductor" else f"clients_{arguments.compiler}.json")
    if arguments.page:
        print(page(stored(path)))
        return
    rows = stored(path) if arguments.only and path.exists() else []
    for name in CLIENTS:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        rows = [*(row for row in rows if row.program != name), *in_a_process(name, arguments.compiler, arguments.limit)]
        rows.sort(key=lambda row: list(CLIENTS).index(row.program))
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        with path.with_suffix(".txt").open("w") as file:
            Console(file=file, width=200).print(table(rows))
    Console().print(table(rows))


def stored(path: Path) -> list[Row]:
    """Returns the rows of an earlier call."""
    return [Row(**row) for row in json.loads(path.read_text())]


def in_a_process(name: str, compiler: str, limit: float) -> list[Row]:
    """Returns the rows of one program. What the process printed before its limit counts."""
    command = [sys.executable, str(Path(__file__).resolve()), "--program", name, "--compiler", compiler]
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=limit)
        last = (done.stderr.splitlines() or [""])[-1]
        output, ended = done.stdout, f"ends with code {done.returncode}: {last}"[:120] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, ended = (error.stdout or b"").decode(), f"not done after {limit:.0f} s"
    rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith('{"program"')]
    if ended:
        rows.append(Row(name, "", CLIENTS[name].needs, "-", ended))
    return rows


def run_program(name: str, compiler: str) -> None:
    """Prints a row of JSON for each setting of one program."""
    warnings.simplefilter("ignore")
    client = CLIENTS[name]
    row = Row(name, "", client.needs, "-")
    try:
        for package in client.packages:
            importlib.import_module(package)
    except ImportError as error:
        print_row(replace(row, outcome=f"not installed: {error.name}"))
        return
    distributions = importlib.metadata.packages_distributions()
    packages = ("torch", *client.packages)
    versions = ", ".join(f"{package} {importlib.metadata.version(distributions[package][0])}" for package in packages)
    row = replace(row, versions=versions)
    autoremat.configure(cost_model="roofline", progress=False, compiler=compiler)
    plain = print_row(measured(replace(row, budget="none"), compiler))
    share = print_row(compared(measured(replace(row, budget=f"{SHARE:.0%}"), "autoremat", SHARE), plain))
    if share.minimum_bytes is None:
        return
    budget = int(share.minimum_bytes * MARGIN)
    tight = print_row(compared(measured(replace(row, budget=f"minimum + {MARGIN - 1:.0%}"), "autoremat", budget), plain))
    if tight.minimum_bytes is not None and tight.fits is None:
        print_row(compared(measured(replace(row, budget="as the error says"), "autoremat", tight.minimum_bytes), plain))


def print_row(row: Row) -> Row:
    print(json.dumps(asdict(row)), flush=True)
    return row


def measured(row: Row, backend: str, budget: float | None = None) -> Row:
    """Returns the row after a run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    watch, count = Watch(), len(autoremat.reports())
    autoremat.configure(memory_budget=budget)
    try:
        watch.run(lambda: CLIENTS[row.program].run(backend))
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        return replace(
            row,
            outcome=f"{type(cause).__name__}: {str(cause).splitlines()[0][:90]}",
            minimum_bytes=getattr(cause, "minimum_bytes", None),
        )
    row = replace(row, losses=tuple(watch.losses), measured_bytes=watch.tracker.bytes)
    reports = [report for report in autoremat.reports()[count:] if report.budget_bytes is not None]
    if not reports:
        return row if budget is None else replace(row, outcome="trains without a plan")
    largest = max(reports, key=lambda report: report.baseline_peak_bytes)
    return replace(
        row, graphs=len(reports), budget_bytes=largest.budget_bytes, fits=all(report.fits for report in reports),
        predicted_bytes=largest.compiled_peak_bytes, minimum_bytes=max(report.minimum_peak_bytes for report in reports),
    )  # fmt: skip


def compared(row: Row, plain: Row) -> Row:
    """Returns the row with the difference of its losses from those without a budget."""
    if not row.losses or len(row.losses) != len(plain.losses):
        return row
    differences = (abs(ours - theirs) / abs(theirs) for ours, theirs in zip(row.losses, plain.losses, strict=True))
    return replace(row, difference=max(differences))


def table(rows: list[Row]) -> Table:
    """Returns the table of all rows, with peaks in KiB."""
    columns = (
        "program",
        "needs",
        "budget",
        "outcome",
        "loss differs by",
        "graphs",
        "budget, KiB",
        "code's peak",
        "measured",
        "fits",
    )
    result = Table(*columns)
    for row in rows:
        sizes = (
            "" if size is None else f"{size / 1024:,.0f}"
            for size in (row.budget_bytes, row.predicted_bytes, row.measured_bytes)
        )
        first = f"{row.program}\n{row.versions}" if row.budget in {"-", "none"} else ""
        difference = "" if row.difference is None else f"{row.difference:.0e}"
        result.add_row(
            first, row.needs if first else "", row.budget, row.outcome, difference, str(row.graphs or ""), *sizes,
            "" if row.fits is None else "yes" if row.fits else "no",
        )  # fmt: skip
    return result


def page(rows: list[Row]) -> str:
    """Returns the table of the page, with one line per program."""
    lines = ["| Program | Needs | A share of 70 % | Close to the minimum peak | Loss differs by |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row.program for row in rows):
        own = [row for row in rows if row.program == name]
        plain, *budgets = own
        versions = plain.versions.partition(", ")[2] or plain.versions
        if not budgets:  # its library is not installed
            continue
        differences = [row.difference for row in budgets if row.difference is not None]
        worst = f"{max(differences):.0e}" if differences else ""
        lines.append(f"| {name} ({versions}) | {plain.needs} | {peak(budgets[0])} | {peak(budgets[-1])} | {worst} |")
    return "\n".join(lines)


def peak(row: Row) -> str:
    """Returns the measured peak and the budget of a row in KiB, or how the program ended."""
    if row.measured_bytes is None or row.budget_bytes is None:
        return "infeasible" if row.outcome.startswith("BudgetInfeasible") else row.outcome
    if row.graphs > 1:
        return f"{row.measured_bytes / 1024:,.0f} KiB in {row.graphs} graphs" + ("" if row.fits else ", with a warning")
    return f"{row.measured_bytes / 1024:,.0f} of {row.budget_bytes / 1024:,.0f} KiB" + ("" if row.fits else ", with a warning")


if __name__ == "__main__":
    main()
