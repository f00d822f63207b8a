"""Times of single ops, each run by itself on tensors like its own; every distinct signature once, then read from disk.

Only kernels that run by themselves in the compiled code too are worth it: what is fused there takes longer alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autoremat.basics import disk_cache
from autoremat.basics.progress import now
from autoremat.measure.calibration import device_key
from autoremat.measure.timer import Timer, stopwatch_for, undisturbed
from autoremat.ops import op_traits
from autoremat.planner.graph.graph import Kind, Op, Trait
from autoremat.torch_private.compat import size_hint

log = logging.getLogger("autoremat")

TIME_LIMIT = 10.0
"""Seconds of timing for one graph."""

LONGEST_WAIT = 10.0
"""Seconds to wait for another process that writes its times."""

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
"""What ops raise on arguments that they do not take; running out of memory is a ``RuntimeError`` too."""

Times = dict[str, float | None]
"""Seconds by signature; None for what cannot be run by itself."""


def worth_timing(node: fx.Node, op: Op) -> bool:
    """Whether the op is a kernel of its own that may be run on made-up tensors: one without effects, of torch's own."""
    traits = op.traits & ~Trait.READS_MUTATED_INPUT
    known = isinstance(node.target, torch._ops.OpOverload)
    return known and op.kind is Kind.EXTERN and traits == Trait.NONE and not op_traits.adds_to_product(node)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
        bits = f"{'~' * value.is_conj()}{'-' * value.is_neg()}"  # views whose numbers an op conjugates or negates as it reads
        return f"{bits}{str(value.dtype).removeprefix('torch.')}{shape}{strides}@{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return str(size_hint(value)) if isinstance(value, torch.SymInt) else str(value)


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments, with (fake) values for nodes."""
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x, (node.args, node.kwargs)
    )
    return tuple(args), dict(kwargs)


def signature(node: fx.Node) -> str:
    """Text that is equal for calls that take the same time: op, shapes, strides, types, other arguments."""
    args, kwargs = _arguments(node)
    named = (f"{name}={_described(value)}" for name, value in sorted(kwargs.items()))
    return f"{node.target}({', '.join([*map(_described, args), *named])})"


def real(value: Any) -> Any:
    """A real value for a fake one: tensors of random floats, of zeros where they could be indices, in the same layout.

    Raises ``ValueError`` for what nothing can be made of.
    """
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise ValueError(f"{value} has no known value")
        return value
    shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
    # The storage is filled, not the tensor: two of its elements may lie in one place.
    length = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if value.dtype.is_floating_point or value.dtype.is_complex:
        # From 0 to 1, as probabilities are: CUDA kernels that refuse others leave the process without its device.
        storage = torch.rand(length, device=value.device).to(value.dtype)
    else:
        storage = torch.zeros(length, dtype=value.dtype, device=value.device)
    made = storage.as_strided(shape, strides)
    made = made.conj() if value.is_conj() else made
    return torch.ops.aten._neg_view(made) if value.is_neg() else made


def seconds_of(node: fx.Node, timer: Timer) -> float | None:
    """Seconds of the node by itself; None if it cannot be run."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    try:
        args, kwargs = torch.utils._pytree.tree_map(real, _arguments(node))
        return timer.seconds(lambda: target(*args, **kwargs))
    except REFUSALS as error:
        log.info("%s cannot be timed by itself: %s", node.target, error)
        return None


def time_nodes(nodes: Iterable[tuple[str, fx.Node]], timer: Timer, limit: float = TIME_LIMIT) -> Times:
    """Seconds of (signature, node) in order, until ``limit`` seconds have passed."""
    end = timer.now() + limit
    found: Times = {}
    for name, node in nodes:
        if timer.now() >= end:
            break
        found[name] = seconds_of(node, timer)
    return found


_known: dict[str, Times] = {}
_passed_over: set[tuple[str, str]] = set()
"""(device, signature) that did not get their turn: planning a graph again must find the same costs as before."""


def profile(nodes: Iterable[tuple[fx.Node, float]], device: torch.device) -> Times:
    """Seconds by signature of (node, estimated seconds), as far as they are known or now timed, the longest first."""
    key = device_key(device)
    known = _known.setdefault(key, _stored(key))
    wanted: dict[str, tuple[fx.Node, float]] = {}
    for node, estimate in nodes:
        name = signature(node)
        wanted[name] = (node, estimate + (wanted[name][1] if name in wanted else 0.0))
    missing = [name for name in wanted if name not in known and (key, name) not in _passed_over]
    missing.sort(key=lambda name: -wanted[name][1])
    if missing:
        log.info("timing %d ops", len(missing))
        now(f"timing {len(missing)} kernels, at most {TIME_LIMIT:g} s")
        queue = [(name, wanted[name][0]) for name in missing]
        found = undisturbed(device, lambda: time_nodes(queue, stopwatch_for(device)))
        _passed_over.update((key, name) for name in missing if name not in found)
        known.update(found)
        with disk_cache.locked("times", key, LONGEST_WAIT):  # another process may have written since, or be about to
            disk_cache.write_text("times", key, json.dumps(_stored(key) | known, indent=1, sort_keys=True))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {name: known[name] for name in wanted if name in known}


def _stored(key: str) -> Times:
    try:
        record = json.loads(disk_cache.read_text("times", key) or "")
        return {str(name): None if seconds is None else float(seconds) for name, seconds in record.items()}
    except disk_cache.UNUSABLE:
        return {}
