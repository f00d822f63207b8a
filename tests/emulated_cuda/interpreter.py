"""Triton's interpreter, fit for Inductor's kernels: operands in place, NumPy's functions, whole arrays, large blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from triton.language.extra import libdevice
from triton.runtime import interpreter

LARGEST_BLOCK = 1 << 20
"""Elements of a block, of all dimensions together."""


def _erf(x: Any) -> Any:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


MATHEMATICS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("abs", "ceil", "cos", "exp", "exp2", "expm1", "floor", "fmod", "log", "log1p")},
    **{name: getattr(np, name) for name in ("log2", "rint", "sin", "sqrt", "tan", "tanh", "trunc")},
    "erf": _erf, "nearbyint": np.rint, "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
PREDICATES: dict[str, Callable[..., Any]] = {"isnan": np.isnan, "isinf": np.isinf, "signbit": np.signbit}


def _by_numpy(function: Callable[..., Any], result: Any = None) -> Callable[..., Any]:
    """Returns a function of CUDA's mathematics library, computed by NumPy. ``result`` is its type, by default its operand's."""

    def call(*arguments: Any, _semantic: Any = None) -> Any:
        first = next(argument for argument in arguments if isinstance(argument, tl.core.tensor))
        data = function(*(x.handle.data if isinstance(x, tl.core.tensor) else x for x in arguments))
        dtype = result or first.dtype
        data = np.asarray(data).astype(interpreter._get_np_dtype(dtype))
        kind = tl.core.block_type(dtype, list(data.shape)) if first.type.is_block() else dtype
        return tl.core.tensor(interpreter.TensorHandle(data, dtype), kind)

    return call


def _with_dense_operands(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the atomic update with dense operands. It would read a mask that was broadcast by a stride of zero as dense."""

    def call(self: Any, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        for handle in (pointer, value, mask):
            handle.data = np.ascontiguousarray(handle.data)
        return function(self, op, pointer, value, mask, sem, scope)

    return call


def _with_large_blocks(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the tuner's constructor with one configuration, of the largest block that masks rely on, and constants."""

    def call(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        room, hints = LARGEST_BLOCK, dict(self.size_hints or {})
        of_user = self.triton_meta["signature"] if "extra_launcher_args" in self.inductor_meta else ()
        for config in self.configs[:1]:
            constants = self.triton_meta.get("constants", {})
            config.kwargs.update({name: value for name, value in constants.items() if name in of_user})
            for prefix in ("r0_", "x", "y", "z"):
                block, size = f"{prefix.upper()}BLOCK", 1 << (max(1, int(hints.get(prefix, 1))) - 1).bit_length()
                if prefix == "r0_":
                    room //= max(1, size)
                elif block in config.kwargs:
                    rows = config.kwargs.get("RSPLIT_SIZE", size)  # of a program that reduces rows and columns (mixed order)
                    config.kwargs[block] = max(1, min(size, rows, room, TRITON_MAX_BLOCK[prefix.upper()]))
                    room //= config.kwargs[block]

    return call


def _combined(ops: Any, dtypes: Any, left: Any, right: Any) -> list[Any]:
    """Returns the data that the combining function of a reduction or scan makes of two arrays per operand."""
    operands = (*zip(dtypes, left, strict=True), *zip(dtypes, right, strict=True))
    made = ops.combine_fn.fn(*(ops.to_tensor(data, dtype) for dtype, data in operands))
    return [tensor.handle.data for tensor in (made if isinstance(made, tuple) else (made,))]


def _reduce_by_halves(self: Any, operands: Any) -> list[Any]:
    whole, rank = self.axis is None, len(operands[0].handle.data.shape)
    operands, axis = self.unravel(operands, self.axis)
    dtypes, data = [t.dtype for t in operands], [t.handle.data for t in operands]
    while data[0].shape[axis] > 1:  # a power of two
        even, odd = ((slice(None),) * axis + (slice(start, None, 2),) for start in (0, 1))
        data = _combined(self, dtypes, [d[even] for d in data], [d[odd] for d in data])
    if whole:
        data = [d.reshape((1,) * rank) if self.keep_dims else d.reshape(()).item() for d in data]
    elif not self.keep_dims:
        data = [d.squeeze(axis) for d in data]
    return [self.to_tensor(d, dtype) for d, dtype in zip(data, dtypes, strict=True)]


def _scan_by_doubling(self: Any, operands: Any) -> list[Any]:
    dtypes, data, axis, step = [t.dtype for t in operands], [t.handle.data for t in operands], self.axis, 1
    place = np.arange(data[0].shape[axis]).reshape([-1 if k == axis else 1 for k in range(data[0].ndim)])
    while step < data[0].shape[axis]:
        made = _combined(self, dtypes, [np.roll(d, step, axis) for d in data], data)
        data = [np.where(place >= step, m.astype(d.dtype), d) for d, m in zip(data, made, strict=True)]
        step *= 2
    return [self.to_tensor(d, dtype) for d, dtype in zip(data, dtypes, strict=True)]


def install() -> None:
    """Changes the interpreter and Inductor's tuner for the rest of the process."""
    np.seterr(all="ignore")  # as on a card
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (list(arguments), dict(options))
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None
    for name, function in MATHEMATICS.items():
        setattr(libdevice, name, _by_numpy(function))
    for name, function in PREDICATES.items():
        setattr(libdevice, name, _by_numpy(function, tl.int1))
    builder = interpreter.InterpreterBuilder
    builder.create_atomic_rmw = _with_dense_operands(builder.create_atomic_rmw)
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    interpreter.ScanOps.generic_scan = _scan_by_doubling
    tuner = triton_heuristics.CachingAutotuner
    tuner.__init__ = _with_large_blocks(tuner.__init__)  # type: ignore[method-assign]
