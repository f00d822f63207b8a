"""Reads single expressions of the code that Inductor generates: the storage that they share, the bytes that they allocate."""

from __future__ import annotations

import ast

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

ALIASING = ("reinterpret_tensor", "copy_if_misaligned")
"""Functions that return the storage of their first argument. The second one copies only slices of a larger tensor."""

VIEWS = frozenset(
    {
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "squeeze", "t", "transpose",
        "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
    }
)  # fmt: skip
"""ATen ops whose result is a view of their first argument. Generated code calls them for complex numbers."""


COPY_TO_HOST, COPY_FROM_HOST = "torch.ops.autoremat.copy_to_host.", "torch.ops.autoremat.copy_from_host."
WAIT_FOR_COPY = "torch.ops.autoremat.wait_for_copy_"
WAIT_FOR_COPY_TO_HOST = f"{WAIT_FOR_COPY}to_host."
"""The begins of calls of ops of :mod:`autoremat.host_memory.ops`."""


def aliased(value: ast.expr) -> str | None:
    """Returns the name whose storage ``value`` shares, or None.

    Such a value is a name, or a reinterpretation or view of one.
    """
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ALIASING:
        return aliased(value.args[0])
    if isinstance(value, ast.Call) and (called := ast.unparse(value.func)).startswith("torch.ops."):
        is_view = called.startswith("torch.ops.aten.") and called.split(".")[3] in VIEWS
        return aliased(value.args[0]) if is_view or called.startswith(WAIT_FOR_COPY) else None
    return None


def strided_bytes(value: ast.expr) -> int | None:
    """Returns the bytes of ``empty_strided_*(size, stride, dtype)``, or None for other calls and non-literal arguments."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and len(value.args) == 3):
        return None
    if not value.func.id.startswith("empty_strided"):
        return None
    try:
        size, stride = ast.literal_eval(value.args[0]), ast.literal_eval(value.args[1])
    except ValueError:
        return None
    dtype = value.args[2].attr if isinstance(value.args[2], ast.Attribute) else ""
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return extent * DTYPE_BYTES.get(dtype, 8)


def is_planar(value: ast.expr) -> bool:
    """Returns True if ``value`` is a CPU buffer of images whose channels are not innermost, new or reinterpreted."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name)):
        return False
    first = {"empty_strided_cpu": 0, "reinterpret_tensor": 1}.get(value.func.id)
    if first is None:
        return False
    try:
        size, stride = (ast.literal_eval(argument) for argument in value.args[first : first + 2])
    except ValueError:
        return False
    return len(size) == 4 and size[1] != 1 and stride[1] != 1


def called_function(value: ast.expr) -> str:
    """Returns the name of the function that ``value`` calls; an empty text for other expressions and for methods."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def calls_op(value: ast.expr, begin: str) -> bool:
    """Returns True if ``value`` is a call of an op whose name in the code begins with ``begin``."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(begin)
