"""The parts that the two sweeps share: one case under three backends, compared bit for bit, and the table of results."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import autoremat

OK, SKIPPED, FAILED = "ok", "skipped", "failed"

SMALLEST = {"memory_budget": 1, "compiler": "aot_eager", "on_infeasible": "best_effort"}
"""A budget that nothing fits: best effort then takes the plan of least memory that the planner finds."""

Numbers = dict[str, torch.Tensor | None]
"""Outputs, gradients and buffers of one step, by name."""

Step = Callable[[Callable[[Callable[..., Any]], Callable[..., Any]]], Numbers]
"""Runs one training step of a fresh, identically seeded case whose function went through the given ``compile``."""


@dataclass(frozen=True)
class Row:
    """The result of one case. ``graphs`` were planned; ``recomputed`` counts executions of forward ops in their backwards."""

    name: str
    result: str
    reason: str = ""
    graphs: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    note: str = ""


class Late(BaseException):
    """A case took longer than its limit. No ``Exception``, so that nothing on the way mistakes it for one of its own."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises ``Late`` in the body after ``seconds``."""

    def ring(_signal: int, _frame: object) -> None:
        raise Late(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def first_line(error: BaseException) -> str:
    """Returns the error's type and the first line of its text, without the wrapping that Dynamo adds."""
    inner = getattr(error, "inner_exception", None) or error
    text = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {text[0]}"[:200]


def same_values(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Returns True if two tensors agree in type, shape and every value. NaN equals NaN."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    parts = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a.detach(), b.detach()))
    left, right = parts
    return bool(((left == right) | ((left != left) & (right != right))).all())


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Returns True if two tensors agree up to another order of accumulation."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def different(ours: Numbers, reference: Numbers, same: Callable[[Any, Any], bool]) -> list[str]:
    """Returns the names of the numbers that are not the same."""
    return [name for name in ours.keys() | reference.keys() if not same(ours.get(name), reference.get(name))]


def judge(name: str, step: Step, options: dict[str, Any] = SMALLEST) -> Row:
    """Returns the row of a case: ``step`` runs eagerly, under the plain compiler and under the budget, and must agree.

    Under Inductor, other accumulation is accepted, and generated code draws the numbers that eager code draws.

    An error of one case is the case's result. It is recorded, and the sweep goes on.
    """
    begin, compiler = time.perf_counter(), str(options["compiler"])
    same = same_values if compiler == "aot_eager" else close
    if compiler == "inductor":
        torch._inductor.config.fallback_random = True

    def row(result: str, reason: str = "", **counts: Any) -> Row:
        return Row(name, result, reason, seconds=round(time.perf_counter() - begin, 2), **counts)

    warnings.simplefilter("ignore")
    try:
        eager = step(lambda function: function)
    except Exception as error:
        return row(SKIPPED, f"eager cannot: {first_line(error)}")
    try:
        torch._dynamo.reset()
        plain = step(lambda function: torch.compile(function, backend=compiler))
    except Exception as error:
        return row(SKIPPED, f"plain {compiler} cannot: {first_line(error)}")
    before = len(autoremat.reports())
    try:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autoremat.FallbackWarning)
            ours = step(lambda function: torch.compile(function, backend="autoremat", options=options))
    except Exception as error:
        return row(FAILED, first_line(error))
    reports = autoremat.reports()[before:]
    counts = {"graphs": len(reports), "recomputed": sum(report.recomputed_ops for report in reports)}
    unplanned = [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, autoremat.FallbackWarning)]
    if unplanned:
        counts["note"] = f"not planned: {unplanned[0]}"
    if unlike := different(ours, plain, same):
        return row(FAILED, f"other bits than plain {compiler}: {sorted(unlike)[:4]}", **counts)
    if not reports and not unplanned:
        return row(SKIPPED, "no graph with a backward was compiled", **counts)
    if unlike := different(ours, eager, close):
        counts["note"] = f"plain {compiler}, and so ours, is not close to eager: {sorted(unlike)[:4]}"
    return row(OK, **counts)


def write(title: str, stem: str, rows: Sequence[Row], setup: dict[str, Any], folder: Path) -> None:
    """Prints the counts and writes the table to ``stem``.txt and .json in ``folder``."""
    counts = Counter(row.result for row in rows)
    handled = counts[OK] + counts[FAILED]
    summary = {
        "cases": len(rows),
        **{result: counts[result] for result in (OK, FAILED, SKIPPED)},
        "ok of what plain aot_eager handles": f"{counts[OK] / max(handled, 1):.2%}",
        "really recomputed": sum(row.result == OK and row.recomputed > 0 for row in rows),
        "not planned": sum(row.note.startswith("not planned") for row in rows),
    }
    width = max(len(row.name) for row in rows)
    lines = [title, ", ".join(f"{key}: {value}" for key, value in (setup | summary).items()), ""]
    lines.append(f"{'case':<{width}}  result   graphs  recomputed  seconds  reason")
    for row in rows:
        about = "; ".join(text for text in (row.reason, row.note) if text)
        cells = f"{row.name:<{width}}  {row.result:<7}  {row.graphs:>6}  {row.recomputed:>10}  {row.seconds:>7.2f}  {about}"
        lines.append(cells.rstrip())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    record = setup | {"summary": summary, "rows": [asdict(row) for row in rows]}
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(lines[1])
