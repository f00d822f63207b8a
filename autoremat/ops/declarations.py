"""Users' declarations about ops that are not torch's own: the op is pure, and its cost.

Ops of other libraries that are known to be pure are declared from the start: products of groups of rows with a matrix per
group, which are multiplied one after another, into slices of the result. Sizes of groups depend on the data, so one group may
hold all rows.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from autoremat.basics.errors import OptionsError
from autoremat.ops import op_traits
from autoremat.planner.graph.op import Trait
from autoremat.torch_private import higher_order
from autoremat.torch_private.compilers import packs_operands
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import tensor_bytes

LARGEST_BLOCK = 2**17 + 2**10
"""Bytes of the largest block of packed operands and sums that oneDNN allocates for a thread, with what belongs to it."""


def is_plain_matrix(tensor: torch.Tensor) -> bool:
    """Returns True if BLAS can read the last two dimensions in place.

    One of them must have stride 1, and the other a stride of at least the first one's length.
    """
    rows, columns = (size_hint(s) for s in tensor.shape[-2:])
    row_stride, column_stride = (size_hint(s) for s in tensor.stride()[-2:])
    return (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)


def grouped_workspace(*operands: Any, **_: Any) -> int:
    """Returns the bytes of copied operands, of a single matrix for a stack of them.

    Where oneDNN multiplies, it packs the operands and accumulates in 32 bits. Each further thread has a block of its own.
    """
    found, packed = 0, 0
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.dim() >= 2:
            matrices = size_hint(operand.shape[0]) if operand.dim() == 3 else 1
            size = tensor_bytes(operand) // max(1, matrices)
            if packs_operands(operand.dtype):
                packed += 2 * size * max(1, 4 // operand.element_size())
            elif not is_plain_matrix(operand):
                found += size
    return found + packed + (torch.get_num_threads() - 1) * min(2 * packed, LARGEST_BLOCK)


def grouped_flops(rows: torch.Tensor, matrices: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the product of each row with the matrix of its group."""
    return 2 * size_hint(rows.shape[0]) * size_hint(matrices.shape[1]) * size_hint(matrices.shape[2])


Amount = int | float | Callable[..., Any]
"""A number, or a function of the op's arguments that returns one. Tensor arguments have sizes and types, but no data."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declared cost of an op: FLOPs of one call, and bytes of its workspace."""

    flops: Amount = 0
    workspace_bytes: Amount = 0


_declared: dict[str, Declaration] = {
    "transformers::grouped_mm_fallback": Declaration(grouped_flops, grouped_workspace),
    "transformers::grouped_mm_fallback_backward": Declaration(
        lambda rows, matrices, *_, **__: 2 * grouped_flops(rows, matrices), grouped_workspace
    ),
}
"""Declarations by "namespace::op", "namespace::op.overload" or, for Triton kernels, "triton::module.function"."""


def declare_pure(op: object, *, flops: Amount = 0, workspace_bytes: Amount = 0) -> None:
    """Declares that ``op`` is pure, so that the planner may recompute its results.

    A pure op returns the same results for the same arguments and has no other effect. Writes to arguments that the op's schema
    declares are allowed: torch makes them explicit.

    ``op`` is a custom op or a Triton kernel. A custom op is given by name, "namespace::op" (all overloads) or
    "namespace::op.overload", or as the op itself: ``torch.ops.namespace.op``, or the result of ``torch.library.custom_op``.

    ``flops`` are the FLOPs of one call; with 0, the bytes that it moves determine its time. ``workspace_bytes`` are the bytes
    that it allocates beside its results and frees before it returns. Each is a number, or a function of the op's arguments,
    whose tensors have sizes and types but no data.

    A second declaration of an op replaces the first. Graphs that are already compiled do not change.

    Raises ``OptionsError`` in three cases: no such op is registered; the op is known to be impure (random numbers, collectives,
    effects); an amount is neither a number >= 0 nor a function.
    """
    name = kernel_name(op) or _checked_name(op)
    _declared[name] = Declaration(_checked(flops, "flops", name), _checked(workspace_bytes, "workspace_bytes", name))


def find(node: torch.fx.Node) -> Declaration | None:
    """Returns the declaration of the op or Triton kernel that ``node`` calls, also inside torch's wrapper of mutating ops."""
    target = higher_order.written_op(node) or node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return _declared.get(f"{name}.{target._overloadname}", _declared.get(name))
    kernel = higher_order.triton_kernel(node)
    return None if kernel is None else _declared.get(kernel_name(kernel) or "")


def identity() -> str:
    """Returns text that changes with any declaration.

    For a function, it covers the code, the defaults and the closure. It does not cover globals that the function reads.
    """
    lines = [f"{name} {_text(d.flops)} {_text(d.workspace_bytes)}" for name, d in sorted(_declared.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def amount(value: Amount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns ``value`` for a call with these (fake) arguments.

    Raises ``OptionsError`` if a function returns no number >= 0.
    """
    found = value(*op_traits.without_data(args), **op_traits.without_data(kwargs)) if callable(value) else value
    if not _is_amount(found):
        raise OptionsError(f"a declared function gave {found!r}, which is no number >= 0")
    return int(found)


def kernel_name(kernel: object) -> str | None:
    """Returns the name of a Triton kernel among the declarations; None for other objects.

    Autotuners and heuristics hold the kernel as ``fn``.
    """
    function = kernel
    while (inner := getattr(function, "fn", None)) is not None and hasattr(function, "run"):
        function = inner
    if function is kernel:
        return None
    return f"triton::{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _checked_name(op: object) -> str:
    name = _name_of(op)
    found = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?", name)
    if found is None:
        raise OptionsError(f'{name!r} names no op. Accepted: "namespace::op", "namespace::op.overload", an op, a Triton kernel')
    namespace, short, overload = found.groups()
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None or (overload is not None and overload not in packet.overloads()):
        raise OptionsError(
            f"no op {name!r} is registered with torch. Import what defines it before declaring it, and check the spelling."
        )
    for each in [overload] if overload is not None else packet.overloads():
        traits = op_traits.traits_of_op(getattr(packet, each))
        for trait, why in _REFUSED.items():
            if trait in traits:
                raise OptionsError(f"{name!r} cannot be declared pure: {why}")
    return name


_REFUSED = {
    Trait.RANDOM: "its tag says that it draws random numbers, and a second run would draw others",
    Trait.COLLECTIVE: "it is a collective, which all ranks would have to run again together",
    Trait.EFFECTFUL: "it has an effect beside its results",
}


def _name_of(op: object) -> str:
    if isinstance(op, str):
        return op.removesuffix(".default")
    op = getattr(op, "_opoverload", op)  # the result of torch.library.custom_op
    if isinstance(op, torch._ops.OpOverload):
        return f"{op._schema.name}.{op._overloadname}".removesuffix(".default")
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    return repr(op)


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _checked(value: Amount, argument: str, name: str) -> Amount:
    if not callable(value) and not _is_amount(value):
        raise OptionsError(
            f"{argument}={value!r} of {name!r} is not accepted. Accepted: a number >= 0, or a function that gives one"
        )
    return value


def _text(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is None:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    return f"{value.__qualname__} {_code_text(code)} {value.__defaults__} {value.__kwdefaults__} {[_text(h) for h in held]}"


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
