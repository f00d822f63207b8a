"""Workspaces of all kernels that torch's op database runs, forward and backward, against those in the planner's graph.

    pip install expecttest                            # torch.testing's op database needs it
    python benchmarks/sweep_workspaces.py             # goes on where an earlier run ended
    python benchmarks/sweep_workspaces.py --only linalg. fft.

Every differentiable op runs with its samples of several types, its tensors contiguous and transposed. A sample with integers
also runs with zeros in their place, and with its integers in ascending order. Each ATen call of its
forward and backward is measured on the numbers that it really gets, and held against its planned workspace. The planned one was
measured before on made-up numbers, or is bounded by a formula. The call is also held against the bound that stands for kernels
that are not measured, if it has one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sweep_ops import SECONDS, SEED, differentiable, ops
from sweeping import Late, first_line, limited
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoremat.measure.signatures import node_of_call
from autoremat.ops import op_traits
from autoremat.planner.graph.op import Trait
from autoremat.torch_private import allocator
from autoremat.torch_private.tensor_identity import storage_key
from autoremat.workspaces import measurement
from autoremat.workspaces.formulas import SCALARS, bound_bytes, workspace_bytes

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SAMPLES = 4
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() >= 2 else tensor,
}
INTEGERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda tensor: tensor,
    "zeros": torch.zeros_like,
    "ascending": lambda tensor: tensor.flatten().sort().values.view(tensor.shape),
}
"""Kinds of integer data. All are valid where the sample's own is."""

UNKNOWN = -1


@dataclass(frozen=True)
class Row:
    """The calls that one entry of the database makes for one type and layout."""

    name: str
    dtype: str
    layout: str
    calls: int = 0
    under: int = 0
    """Calls that need more than is planned."""
    worst: float = 0.0
    """Largest measured over planned workspace."""
    worst_call: str = ""
    worst_bound: float = 0.0
    """As ``worst``, of the bounds for what is not measured."""
    worst_bound_call: str = ""
    unknown: tuple[str, ...] = ()
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.dtype, self.layout


class Meter(TorchDispatchMode):
    """Measures every ATen call in the block, and what is planned for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int, int]] = {}
        """(measured, planned, bound) bytes by signature, the largest measured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_key(t) for t in tensors((args, kwargs))}
        peak, result = allocator.peak_on_cpu(lambda: func(*args, **kwargs))
        node = node_of(func, args, kwargs, result)
        if node is not None:
            made = {storage_key(t): t.untyped_storage().nbytes() for t in tensors(result)}
            measured = max(0, peak - sum(size for key, size in made.items() if key not in given))
            planned = workspace_bytes(node, args, kwargs, result)
            bound = bound_bytes(node, args, kwargs, result, "cpu")
            name = measurement.signature(node)
            if measured > self.found.get(name, (UNKNOWN,))[0]:
                at_most = UNKNOWN if bound is None else bound + SCALARS
                self.found[name] = measured, UNKNOWN if planned is None else planned, at_most
        return result


def tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def node_of(func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node | None:
    """Returns a node that stands for the call; None for views, effects and tensors that are not dense."""
    if not tensors(result) or any(t.layout is not torch.strided for t in pytree.tree_leaves((args, kwargs)) if
                                  isinstance(t, torch.Tensor)):  # fmt: skip
        return None
    node = node_of_call(func, args, kwargs)
    node.meta["val"] = result
    traits = op_traits.traits_of(node)
    return None if op_traits.is_view(node) or traits & (Trait.EFFECTFUL | Trait.OPAQUE) else node


def examine(op: Any, dtype: torch.dtype, layout: str) -> Row:
    """Returns the row of the op's first samples."""
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    place = (name, str(dtype).removeprefix("torch."), layout)
    meter = Meter()
    reason = ""
    try:
        with limited(SECONDS), measurement.one_graph():
            torch.manual_seed(SEED)
            for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
                if number == SAMPLES:
                    break
                step(op, sample, LAYOUTS[layout], INTEGERS["own"], meter)
                if any(map(holds_integers, pytree.tree_leaves((sample.input, sample.args, sample.kwargs)))):
                    for kind in ("zeros", "ascending"):
                        with contextlib.suppress(RuntimeError, IndexError, ValueError):  # data that the op refuses
                            step(op, sample, LAYOUTS[layout], INTEGERS[kind], meter)
    except Late as late:
        reason = str(late)
    except Exception as error:  # of the op's own: its samples, or arguments that a layout makes it refuse
        reason = first_line(error)
    worst, worst_call = largest({call: (measured, planned) for call, (measured, planned, _) in meter.found.items()})
    bound, bound_call = largest({call: (measured, bound) for call, (measured, _, bound) in meter.found.items()})
    under = sum(measured > planned != UNKNOWN for measured, planned, _ in meter.found.values())
    unknown = sorted(call.partition("(")[0] for call, (_, planned, _) in meter.found.items() if planned == UNKNOWN)
    return Row(
        *place, len(meter.found), under, worst, worst_call, bound, bound_call, tuple(dict.fromkeys(unknown)), reason
    )  # fmt: skip


def largest(found: dict[str, tuple[int, int]]) -> tuple[float, str]:
    """Returns the largest of the known quotients, and the call that has it if it is over one."""
    ratios = {call: round(part / max(whole, 1), 4) for call, (part, whole) in found.items() if whole != UNKNOWN}
    worst = max(ratios, key=lambda call: ratios[call], default="")
    ratio = ratios.get(worst, 0.0)
    return ratio, worst[:200] if ratio > 1 else ""


def holds_integers(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)


def step(
    op: Any,
    sample: Any,
    lay_out: Callable[[torch.Tensor], torch.Tensor],
    integers: Callable[[torch.Tensor], torch.Tensor],
    meter: Meter,
) -> None:
    """Runs forward and backward of one sample, with its integers of one kind."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        leaf = integers(leaf) if holds_integers(leaf) else leaf
        return lay_out(leaf.detach().clone()).requires_grad_(leaf.requires_grad)

    first, args, kwargs = pytree.tree_map(own, (sample.input, sample.args, sample.kwargs))
    with meter:
        results = [t for t in differentiable(op(first, *args, **kwargs)) if t.numel()]
        if results:
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def cases(prefixes: tuple[str, ...]) -> Iterator[tuple[Any, torch.dtype, str]]:
    for op in ops(prefixes):
        for dtype in DTYPES:
            if op.supports_dtype(dtype, "cpu"):
                for layout in LAYOUTS:
                    yield op, dtype, layout


def write(rows: list[Row], path: Path) -> None:
    calls, under = sum(row.calls for row in rows), sum(row.under for row in rows)
    unknown = sorted({name for row in rows for name in row.unknown})
    lines = [
        f"Workspaces measured against planned; torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{os.cpu_count()} cores",
        f"cases: {len(rows)}, distinct calls: {calls}, calls that need more than planned: {under}, "
        f"largest measured over planned: {max((row.worst for row in rows), default=0.0):.4f}, kernels unknown: {len(unknown)}, "
        f"largest measured over the bound where nothing is measured: {max((r.worst_bound for r in rows), default=0.0):.4f}",
        f"unknown: {', '.join(unknown) or 'none'}",
        "",
        f"{'case':<44}{'type':<10}{'layout':<12}{'calls':>6}{'under':>6}{'worst':>10}{'bound':>10}  note",
    ]
    for r in rows:
        note = "; ".join(filter(None, (r.worst_call, r.worst_bound_call, r.reason)))
        counts = f"{r.calls:>6}{r.under:>6}{r.worst:>10.4f}{r.worst_bound:>10.4f}"
        lines.append(f"{r.name:<44}{r.dtype:<10}{r.layout:<12}{counts}  {note}".rstrip())
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[1:3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="ops whose names begin so")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    record = arguments.output / "sweep_workspaces.jsonl"
    if arguments.fresh:
        record.unlink(missing_ok=True)
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [Row(**(fields | {"unknown": tuple(fields["unknown"])})) for fields in map(json.loads, lines)]
    known = {row.key for row in rows}
    for op, dtype, layout in cases(tuple(arguments.only)):
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if (name, str(dtype).removeprefix("torch."), layout) in known:
            continue
        rows.append(examine(op, dtype, layout))
        with record.open("a") as file:
            file.write(json.dumps(asdict(rows[-1])) + "\n")
        if rows[-1].under or rows[-1].worst_bound > 1:
            print(rows[-1], flush=True)
    write(rows, arguments.output / "sweep_workspaces.txt")


if __name__ == "__main__":
    main()
