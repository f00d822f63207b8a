"""What users declare about ops that are not torch's own: that a second run is harmless, and what a run costs."""

from __future__ import annotations

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
from autoremat.planner.graph.graph import Trait
from autoremat.torch_private import higher_order

Amount = int | float | Callable[..., Any]
"""A number, or a function of the op's own arguments that gives it; tensors among these have sizes and types, no data."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is known of an op: FLOPs of one call, and bytes that it allocates beside its results and frees again."""

    flops: Amount = 0
    workspace_bytes: Amount = 0


_declared: dict[str, Declaration] = {}
"""By "namespace::op", "namespace::op.overload" or, for Triton kernels, "triton::module.function"."""


def declare_pure(op: object, *, flops: Amount = 0, workspace_bytes: Amount = 0) -> None:
    """Declare that running ``op`` again on the same arguments gives the same results and changes nothing else, so that the
    planner may recompute it. What it writes to arguments, as its schema says, is no obstacle: torch makes that explicit.

    ``op``: the name of a custom op, "namespace::op" (all overloads) or "namespace::op.overload"; the op itself
    (``torch.ops.namespace.op``, or what ``torch.library.custom_op`` returned); or a Triton kernel. ``flops`` are those of
    one call (0: its time is that of its bytes), ``workspace_bytes`` what it allocates beside its results and frees before
    it returns; each a number or a function of the op's arguments, whose tensors have sizes and types and no data. A second
    declaration of an op replaces the first; what is compiled already stays as it is.

    Raises ``OptionsError`` if no such op is registered, if it is known to be impure (random numbers, collectives, effects),
    or if an amount is neither a number >= 0 nor a function.
    """
    name = kernel_name(op) or _checked_name(op)
    _declared[name] = Declaration(_checked(flops, "flops", name), _checked(workspace_bytes, "workspace_bytes", name))


def find(node: torch.fx.Node) -> Declaration | None:
    """What is declared of the op or the Triton kernel that ``node`` calls, also through torch's wrapper of ops that write."""
    target = higher_order.written_op(node) or node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return _declared.get(f"{name}.{target._overloadname}", _declared.get(name))
    kernel = higher_order.triton_kernel(node)
    return None if kernel is None else _declared.get(kernel_name(kernel) or "")


def identity() -> str:
    """Text that changes with any declaration. Of a function it has the code, the defaults and the closure, not what the
    function looks up elsewhere."""
    lines = [f"{name} {_text(d.flops)} {_text(d.workspace_bytes)}" for name, d in sorted(_declared.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def amount(value: Amount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """``value`` for a call with these (fake) arguments. Raises ``OptionsError`` if a function gives no number >= 0."""
    found = value(*op_traits.without_data(args), **op_traits.without_data(kwargs)) if callable(value) else value
    if not _is_amount(found):
        raise OptionsError(f"a declared function gave {found!r}, which is no number >= 0")
    return int(found)


def kernel_name(kernel: object) -> str | None:
    """How a Triton kernel is called here; None for anything else. Autotuners and heuristics hold the kernel as ``fn``."""
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
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
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
    """Text for a number or a function that is the same in every process."""
    code = getattr(value, "__code__", None)
    if code is None:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    return f"{value.__qualname__} {_code_text(code)} {value.__defaults__} {value.__kwdefaults__} {[_text(h) for h in held]}"


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
