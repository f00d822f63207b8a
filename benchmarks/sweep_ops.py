"""Every differentiable op of torch's own op database, trained at the smallest feasible budget, against plain `aot_eager`.

    pip install expecttest                # torch.testing's op database needs it
    python benchmarks/sweep_ops.py        # some minutes
    python benchmarks/sweep_ops.py --only fft. linalg.
    python benchmarks/sweep_ops.py --compiler inductor

Around each op stand a product with one before it and a nonlinear chain behind it, so that there are activations on both
sides. Outputs and gradients must have the bits that `torch.compile(backend="aot_eager")` gives with the same seed. The sweep
over models (`sweep_transformers.py`) judges its cases by the same function.
"""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness import parser, table, write
from rich.table import Table
from torch.utils import _pytree as pytree

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


def cells(row: Row) -> dict[str, object]:
    reasons = "; ".join(text for text in (row.reason, row.note) if text)
    counts = {"graphs": row.graphs, "recomputed": row.recomputed, "seconds": f"{row.seconds:.2f}"}
    return {"case": row.name, "result": row.result, **counts, "reason": reasons}


def shown(rows: list[Row]) -> list[Table | str]:
    counts = Counter(row.result for row in rows)
    summary = {
        "cases": len(rows),
        **{result: counts[result] for result in (OK, FAILED, SKIPPED)},
        "ok of what plain aot_eager handles": f"{counts[OK] / max(counts[OK] + counts[FAILED], 1):.2%}",
        "really recomputed": sum(row.result == OK and row.recomputed > 0 for row in rows),
        "not planned": sum(row.note.startswith("not planned") for row in rows),
    }
    text = ", ".join(f"{key}: {value}" for key, value in summary.items())
    return [text, table("Cases at the smallest feasible budget", list(map(cells, rows)))]


# -- ops ---------------------------------------------------------------------------------------------------------------

SEED = 0
SECONDS = 60

RECOMPUTED = SMALLEST | {"recompute": ("*",)}
"""Beside a few small tensors the kernels' own memory decides, and the smallest plan may recompute nothing."""

SKIP = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops whose results are uninitialised memory."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=[], help="ops whose names begin so")
    made.add_argument("--compiler", choices=("aot_eager", "inductor"), default="aot_eager")
    arguments = made.parse_args()
    rows = []
    for op in ops(tuple(arguments.only)):
        row = examine(op, arguments.compiler)
        print(f"{row.name}: {row.result} {row.reason} {row.note}", flush=True)
        rows.append(row)
    name = "sweep_ops" if arguments.compiler == "aot_eager" else f"sweep_ops_{arguments.compiler}"
    write(name, arguments.output, shown(rows), rows, compiler=arguments.compiler)


def ops(prefixes: tuple[str, ...]) -> Iterator[Any]:
    """Yields the op database's entries that have a float32 gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    for op in op_db:
        if op.supports_autograd and op.supports_dtype(torch.float32, "cpu") and (not prefixes or op.name.startswith(prefixes)):
            yield op


def examine(op: Any, compiler: str) -> Row:
    """Returns one op's row."""
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    if op.name in SKIP:
        return Row(name, SKIPPED, "the result is uninitialised memory")
    try:
        with limited(SECONDS):
            sample = usable_sample(op)
            if sample is None:
                return Row(name, SKIPPED, "no sample has a differentiable output")
            return judge(name, training_step(op, sample), RECOMPUTED | {"compiler": compiler})
    except Late as late:
        return Row(name, SKIPPED, str(late))
    except Exception as error:  # of the op database's own sampling; what the cases do, `judge` records
        return Row(name, SKIPPED, f"no sample: {first_line(error)}")


def usable_sample(op: Any) -> Any:
    """Returns the first sample with an input that requires a gradient and an output that has one."""
    torch.manual_seed(SEED)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        inputs = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if not any(isinstance(t, torch.Tensor) and t.requires_grad and t.numel() for t in inputs):
            continue
        result = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
        if any(t.numel() for t in differentiable(result)):
            return sample
    return None


def differentiable(result: Any) -> list[torch.Tensor]:
    """Returns the tensors of ``result`` that have a gradient."""
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]


def training_step(op: Any, sample: Any) -> Step:
    """Returns a step of `loss(op(inputs * 1))` in which the product and the loss keep activations too."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss, and copies of the results, because the caller would hold these themselves."""
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor * 1.0 if tensor.requires_grad else tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        results = differentiable(sample.output_process_fn_grad(op(first, *args, **kwargs)))
        waves = [t.sin().sin().sin() for t in results]
        return sum((w.abs() if w.is_complex() else w).sum() for w in waves), [t.detach().clone() for t in results]

    def step(compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Numbers:
        inputs = [leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in places]
        torch.manual_seed(SEED)
        loss, results = compile(function)(inputs)
        loss.backward()
        numbers: Numbers = {"loss": loss.detach()}
        numbers |= {f"result {i}": t for i, t in enumerate(results)}
        numbers |= {f"input {i}": t.detach() for i, t in enumerate(inputs)}
        return numbers | {f"gradient {i}": t.grad for i, t in enumerate(inputs)}

    return step


if __name__ == "__main__":
    main()
