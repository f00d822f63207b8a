"""Every differentiable op of torch's own op database, trained at the smallest feasible budget, against plain `aot_eager`.

    pip install expecttest                # torch.testing's op database needs it
    python benchmarks/sweep_ops.py        # some minutes
    python benchmarks/sweep_ops.py --only fft. linalg.
    python benchmarks/sweep_ops.py --compiler inductor

Around each op stand a product with one before it and a nonlinear chain behind it, so that there are activations on both
sides. Outputs and gradients must have the bits that `torch.compile(backend="aot_eager")` gives with the same seed.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sweeping import SKIPPED, SMALLEST, Late, Numbers, Row, Step, first_line, judge, limited, write
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
SECONDS = 60

RECOMPUTED = SMALLEST | {"recompute": ("*",)}
"""Beside a few small tensors the kernels' own memory decides, and the smallest plan may recompute nothing."""

SKIP = {
    "empty": "the result is uninitialised memory",
    "empty_like": "the result is uninitialised memory",
    "empty_permuted": "the result is uninitialised memory",
    "empty_strided": "the result is uninitialised memory",
    "new_empty": "the result is uninitialised memory",
    "new_empty_strided": "the result is uninitialised memory",
}
"""Ops whose results mean nothing, with the reason."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="ops whose names begin so")
    parser.add_argument("--compiler", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rows = []
    for op in ops(tuple(arguments.only)):
        row = examine(op, arguments.compiler)
        print(f"{row.name}: {row.result} {row.reason} {row.note}", flush=True)
        rows.append(row)
    setup = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "minutes": round((time.perf_counter() - begin) / 60, 1),
    }
    title = f"Differentiable ops at the smallest feasible budget, inner {arguments.compiler}"
    stem = "sweep_ops" if arguments.compiler == "aot_eager" else f"sweep_ops_{arguments.compiler}"
    write(title, stem, rows, setup, arguments.output)


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
        return Row(name, SKIPPED, SKIP[op.name])
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
