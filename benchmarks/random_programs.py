"""Random programs under a budget: peak, gradients and the state of the random generator, against eager and plain compilation.

    python benchmarks/random_programs.py                                    # 300 programs
    python benchmarks/random_programs.py --count 60 --inductor-count 10
    python benchmarks/random_programs.py --resume                           # goes on from the rows that are there
    python benchmarks/random_programs.py --only 17 --compiler inductor      # one program, by its seed

A program chains some statements of ``random_statements``. Its budget is its own step without recomputation in bytes, its
smallest possible peak, or the middle of both. One in six programs accumulates the gradients of two batches of unequal length.
A program fails if its measured peak exceeds the budget although the report says that it fits and nothing warns, if gradients
differ from those of eager code, or if the generator's state after the step differs from plain compilation's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from random_statements import EAGER_ONLY, STATEMENTS, VOCABULARY, WIDTH, Data
from sweeping import Late, first_line, limited
from torch import Tensor

import autoremat
from autoremat import BudgetWarning

ROOT = Path(__file__).resolve().parent.parent
EAGER, INDUCTOR = "aot_eager", "inductor"
BUDGETS = ("baseline", "middle", "minimum")
SECONDS = 300
TOLERANCE = {EAGER: 1e-4, INDUCTOR: 2e-3}
"""Largest relative difference of a gradient that counts as rounding."""

KEPT, WARNED, INFEASIBLE, SKIPPED = "kept", "warned", "infeasible", "skipped"
OVER, GRADIENTS, GENERATOR, FAILED = "over budget", "other gradients", "other generator state", "failed"


@dataclass(frozen=True)
class Row:
    """The result of one program. Bytes are 0 where nothing was measured."""

    seed: int
    compiler: str
    budget: str
    statements: tuple[str, ...]
    lengths: tuple[int, ...]
    result: str = SKIPPED
    reason: str = ""
    budget_bytes: int = 0
    measured_bytes: int = 0
    recomputed: int = 0
    exact: bool = False
    """True if the gradients have the bits of eager code or of plain compilation."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Program:
    """A loss with its data, and the operand of each statement among the latest three results."""

    statements: tuple[str, ...]
    operands: tuple[int, ...]
    lengths: tuple[int, ...]
    seed: int

    def loss(self, x: Tensor, data: Data) -> Tensor:
        held = [x]
        for name, operand in zip(self.statements, self.operands, strict=True):
            held.append(STATEMENTS[name](held[-1 - operand % min(3, len(held))], data))
        return torch.stack([one.square().mean() for one in held[-3:]]).sum()

    def data(self) -> Data:
        generator = torch.Generator().manual_seed(self.seed)
        rows = max(self.lengths)
        return Data(
            (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).requires_grad_(),
            torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_(),
            torch.randint(0, VOCABULARY, (rows,), generator=generator),
            torch.randint(0, VOCABULARY, (rows, 6), generator=generator),
        )

    def batches(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(rows, WIDTH, generator=generator).requires_grad_() for rows in self.lengths]


def made(seed: int, compiler: str) -> Program:
    """Returns the program of a seed."""
    chosen = random.Random(seed)
    names = [name for name in STATEMENTS if compiler == EAGER or name not in EAGER_ONLY]
    statements = tuple(chosen.choice(names) for _ in range(chosen.randint(3, 10)))
    rows = chosen.choice((128, 256, 512))
    lengths = (rows, rows - 32) if chosen.random() < 1 / 6 else (rows,)
    lengths = lengths[::-1] if chosen.random() < 0.5 else lengths
    return Program(statements, tuple(chosen.randrange(3) for _ in statements), lengths, seed)


@dataclass(frozen=True)
class Step:
    """What a second step of a program left: gradients, the generator's state, the peak and budget warnings."""

    gradients: list[Tensor]
    state: Tensor
    peak_bytes: int
    warned: str


def run(program: Program, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Step:
    """Runs two steps of the program; the first one compiles."""
    torch._dynamo.reset()
    data, batches = program.data(), program.batches()
    function = compile(program.loss)
    leaves = [*batches, data.weight, data.table]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for leaf in leaves:
                leaf.grad = None
            torch.manual_seed(program.seed)
            gc.collect()
            with autoremat.track_peak("cpu") as peak:
                for batch in batches:
                    function(batch, data).backward()
    warned = [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, BudgetWarning)]
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Step(gradients, torch.get_rng_state(), peak.bytes, "; ".join(warned)[:200])


def planned(program: Program, compiler: str, **options: object) -> tuple[Step, list[autoremat.Report]]:
    """Returns a step under autoremat, and the reports of its graphs."""
    before = len(autoremat.reports())
    given = {"compiler": compiler, "cost_model": "roofline", **options}
    step = run(program, lambda function: torch.compile(function, backend="autoremat", options=given))
    return step, autoremat.reports()[before:]


def budget_of(kind: str, reports: list[autoremat.Report]) -> int:
    """Returns the bytes of a kind of budget, from the reports of the smallest plans."""
    least = max(report.peak_bytes for report in reports)
    most = max(max(report.baseline_peak_bytes, report.peak_bytes) for report in reports)
    return {"baseline": most, "minimum": least, "middle": (least + most) // 2}[kind]


def worst_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Returns the largest relative difference of a gradient; 0 for equal bits."""
    pairs = zip(found, wanted, strict=True)
    ratios = [
        0.0 if torch.equal(a, b) else float((a - b).norm() / (b.norm() + 1e-6)) for a, b in pairs if not both_undefined(a, b)
    ]
    return max((1e9 if ratio != ratio else ratio for ratio in ratios), default=0.0)


def both_undefined(a: Tensor, b: Tensor) -> bool:
    """Returns True if neither gradient is finite."""
    return not bool(a.isfinite().all()) and not bool(b.isfinite().all())


def examine(seed: int, compiler: str) -> Row:
    """Returns the row of a program. An error of one program is its result."""
    program, kind, begin = made(seed, compiler), BUDGETS[seed % 3], time.perf_counter()
    fields = (seed, compiler, kind, program.statements, program.lengths)

    def row(result: str, reason: str = "", **found: Any) -> Row:
        return Row(*fields, result, reason, **found, seconds=round(time.perf_counter() - begin, 1))

    try:
        # Generated code then draws the numbers that eager code draws.
        with limited(SECONDS), torch._inductor.config.patch(fallback_random=compiler == INDUCTOR):
            try:
                eager = run(program, lambda function: function)
                plain = run(program, lambda function: torch.compile(function, backend=compiler))
            except Exception as error:
                return row(SKIPPED, f"without us: {first_line(error)}")
            return judged(program, compiler, kind, eager, plain, row)
    except Late as late:
        return row(SKIPPED, str(late))
    except Exception as error:
        return row(FAILED, first_line(error))


def judged(
    program: Program, compiler: str, kind: str, eager: Step, plain: Step, row: Callable[..., Row]
) -> Row:  # fmt: skip
    """Returns the row of a program that runs without us."""
    _, reports = planned(program, compiler, memory_budget=1, on_infeasible="best_effort")
    if not reports:
        return row(SKIPPED, "no graph with a backward")
    budget = budget_of(kind, reports)
    try:
        step, reports = planned(program, compiler, memory_budget=budget)
    except Exception as error:
        if "BudgetInfeasible" in first_line(error):
            return row(INFEASIBLE, first_line(error), budget_bytes=budget)
        raise
    recomputed = sum(report.recomputed_ops for report in reports)
    to_plain, to_eager = (worst_difference(step.gradients, other.gradients) for other in (plain, eager))
    exact = min(to_plain, to_eager) == 0
    found = {"budget_bytes": budget, "measured_bytes": step.peak_bytes, "recomputed": recomputed, "exact": exact}
    if min(to_plain, to_eager) > TOLERANCE[compiler]:
        return row(GRADIENTS, f"by {to_plain:.1e} of plain, {to_eager:.1e} of eager", **found)
    if not torch.equal(step.state, plain.state):
        return row(GENERATOR, **found)
    if step.warned or not all(report.fits for report in reports):
        unknown = {name for report in reports for name in report.unknown_workspaces}
        return row(WARNED, step.warned or f"the report does not say that it fits; unknown: {sorted(unknown)}", **found)
    if step.peak_bytes > budget:
        return row(OVER, f"by {step.peak_bytes / budget - 1:.1%}", **found)
    return row(KEPT, **found)


def write(rows: list[Row], folder: Path) -> None:
    """Writes the counts and the table."""
    lines = [f"Random programs under a budget; torch {torch.__version__}, {torch.get_num_threads()} threads"]
    summary: dict[str, dict[str, int]] = {}
    for compiler in (EAGER, INDUCTOR):
        of_it = [row for row in rows if row.compiler == compiler]
        counts = Counter(row.result for row in of_it)
        summary[compiler] = {
            "programs": len(of_it), **counts, "equal bits": sum(row.exact for row in of_it),
            "recomputing": sum(row.recomputed > 0 for row in of_it),
            "in two lengths": sum(len(row.lengths) > 1 for row in of_it),
        }  # fmt: skip
        lines.append(f"{compiler}: " + ", ".join(f"{name}: {count}" for name, count in summary[compiler].items()))
    used = Counter(name for row in rows for name in row.statements)
    lines += ["statements: " + ", ".join(f"{name} {used[name]}" for name in STATEMENTS), ""]
    lines.append(f"{'seed':>5}  {'compiler':<10}{'budget':<10}{'lengths':<11}{'bytes':>9}{'measured':>10}{'again':>6}  result")
    for r in rows:
        about = "; ".join(filter(None, (r.reason, ", ".join(r.statements))))
        lengths = "+".join(map(str, r.lengths))
        cells = f"{r.budget_bytes:>9}{r.measured_bytes:>10}{r.recomputed:>6}"
        lines.append(f"{r.seed:>5}  {r.compiler:<10}{r.budget:<10}{lengths:<11}{cells}  {r.result}: {about}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "random_programs.txt").write_text("\n".join(lines) + "\n")
    setup = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    record = setup | {"summary": summary, "rows": [asdict(row) for row in rows]}
    (folder / "random_programs.json").write_text(json.dumps(record, indent=1) + "\n")


def stored(folder: Path) -> list[Row]:
    """Returns the rows of an earlier call."""
    record = json.loads((folder / "random_programs.json").read_text())
    tuples = [row | {name: tuple(row[name]) for name in ("statements", "lengths")} for row in record["rows"]]
    return [Row(**row) for row in tuples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=240, help="programs under aot_eager")
    parser.add_argument("--inductor-count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, nargs="+", help="seeds to run; nothing is written")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--compiler", choices=(EAGER, INDUCTOR), default=EAGER, help="for --only")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    seeds = {EAGER: range(arguments.count), INDUCTOR: range(arguments.inductor_count)}
    if arguments.only:
        seeds = {arguments.compiler: arguments.only}
    rows = stored(arguments.output) if arguments.resume else []
    there = {(row.compiler, row.seed) for row in rows}
    for compiler, numbers in seeds.items():
        for seed in (number + (0 if arguments.only else arguments.first) for number in numbers):
            if (compiler, seed) in there:
                continue
            rows.append(examine(seed, compiler))
            if rows[-1].result != KEPT or arguments.only:
                print(rows[-1], flush=True)
            if not arguments.only:
                write(rows, arguments.output)


if __name__ == "__main__":
    main()
