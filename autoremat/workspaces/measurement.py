"""Measured workspaces: each kernel runs alone, on synthetic tensors, once per signature.

Later processes read the result from disk. A measurement is exact for tensors of these sizes, strides and types. A kernel whose
memory depends on the data is measured on several kinds of data, and its dearest run counts (:data:`Filling`).
"""

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.basics import disk_cache
from autoremat.basics.codec import Codec
from autoremat.measure.calibration import device_key, measurable, outside_of_modes
from autoremat.ops import op_traits
from autoremat.planner.graph.op import Trait
from autoremat.torch_private import allocator, higher_order
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import storage_key, tensors_in

log = logging.getLogger("autoremat")

LARGEST = 2**30
"""The most bytes of arguments and results together. A kernel with more is not measured."""

TIME_LIMIT = 60.0
"""The most seconds of measuring for one graph. Kernels after that are not measured."""

METHOD = 7
"""The version of the measuring method. Increase it with every change of the method: results of other versions are not used."""

REMEMBERED = 20_000
"""The most signatures in the file of a device. The newest are kept."""

aten = torch.ops.aten

REFUSE_ZEROS = frozenset({aten.multinomial.default})
"""Ops that are not run on zeros: their CUDA kernels would make the device unusable for the process."""


COUNTS = frozenset({aten.repeat_interleave.Tensor})
"""Ops whose integers count copies. Large counts would make their results arbitrarily large."""

LENGTHS = frozenset({aten._segment_reduce_backward.default, aten._ctc_loss_backward.Tensor})
"""Ops that trust the sum of their integers. Only zeros are valid for sure."""

PIVOTS = frozenset({aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default, aten.lu_unpack.default})
"""Ops whose integers are positions that count from one."""


Filling = tuple[int | None, int | None]
"""The floats and the integers of one run. None stands for random floats from 0 to 1, with masks that are True everywhere, and
for integers that ascend from zero over the whole range that is valid for sure."""

ONES: Filling = (None, 1)
PLAIN: tuple[Filling, ...] = ((None, 0), (0, 0))


@dataclass(frozen=True)
class Measured:
    """The memory of one call, in bytes.

    ``workspace`` is the kernel's workspace. ``excess`` is the memory of each of its new results above its size: the mean of a
    loss may keep the whole buffer of the losses.
    """

    workspace: int
    excess: tuple[int, ...]


Workspaces = dict[str, Measured | None]
"""Measurements by signature; None for a kernel that cannot run alone."""

Layout = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns a synthetic argument in the layout of the compiled code."""

_known: dict[str, Workspaces] = {}
_unwritten: set[str] = set()
"""Keys of devices with measurements since the last :func:`remember`."""
_spent = 0.0
"""Seconds of measuring for the present graph."""


def measured(node: fx.Node, args: Any, kwargs: Any, result: Any, layout: Layout | None = None) -> Measured | None:
    """Returns the memory of ``node``'s ATen op; None if it cannot be measured.

    ``args``, ``kwargs`` and ``result`` are the call's, with fake tensors. ``layout`` gives the layout of images when the call
    runs.
    """
    global _spent
    tensors = tensors_in((args, kwargs, result))
    if not tensors or not _can_run(node, tensors):
        return None
    device = tensors[0].device
    key = f"{device_key(device)}-{METHOD}"
    known = _known[key] if key in _known else _known.setdefault(key, _stored(key))
    name = signature(node) + (f" {layout.__name__}" if layout is not None else "")
    if name not in known and _spent < TIME_LIMIT:
        begin = time.perf_counter()
        known[name] = outside_of_modes(device, lambda: _measure(node, args, kwargs, result, device, layout))
        _spent += time.perf_counter() - begin
        _unwritten.add(key)
    return known.get(name)


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Starts the measuring time of one graph, and writes its measurements to disk at the end."""
    global _spent
    _spent = 0.0
    try:
        yield
    finally:
        remember()


def remember() -> None:
    """Writes the measurements since the last call to disk."""
    if any(key.startswith("cuda") for key in _unwritten):
        torch.cuda.empty_cache()
    for key in tuple(_unwritten):
        _unwritten.discard(key)
        with disk_cache.locked("workspaces", key, LONGEST_WAIT):  # another process may write to the same file
            newest = list((_stored(key) | _known[key]).items())[-REMEMBERED:]
            rows = {name: None if found is None else [found.workspace, found.excess] for name, found in newest}
            disk_cache.write_text("workspaces", key, json.dumps(rows, indent=1))


def _stored(key: str) -> Workspaces:
    try:
        record = json.loads(disk_cache.read_text("workspaces", key) or "")
        kind = tuple[int, tuple[int, ...]]
        return {str(name): None if row is None else Measured(*Codec().read(kind, row)) for name, row in record.items()}
    except disk_cache.UNUSABLE:
        return {}


def _can_run(node: fx.Node, tensors: list[torch.Tensor]) -> bool:
    """Returns True if the call may run alone: an op of torch, on dense tensors of a present device, and not too large."""
    device = tensors[0].device
    if not measurable(device) or higher_order.name_of(node) or Trait.OPAQUE in op_traits.traits_of(node):
        return False
    if "mkldnn" in str(node.target):
        return False  # oneDNN's own ops do not check that their arguments match
    dense = all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors)
    return dense and sum(size_hint(t.numel()) * t.element_size() for t in tensors) <= LARGEST


def _measure(
    node: fx.Node, args: Any, kwargs: Any, result: Any, device: torch.device, layout: Layout | None
) -> Measured | None:
    """Returns the largest workspace and excess of several runs; None if the op rejects all data."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    found: list[Measured] = []
    try:
        own_args, own_kwargs = torch.utils._pytree.tree_map(real, (args, kwargs))
        if layout is not None:
            own_args, own_kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, layout, (own_args, own_kwargs))
    except REFUSALS as error:
        log.debug("%s cannot be run by itself: %s", node.target, error)
        return None
    arguments = tensors_in((own_args, own_kwargs))
    told = _new_storages(tensors_in(result), tensors_in((args, kwargs)))
    # Integers from zero to the least side of all tensors are valid for any index. A kernel need not check its indices, and a
    # wrong one could damage the process.
    sides = (size_hint(side) for tensor in tensors_in((args, kwargs, result)) for side in tensor.shape)
    valid = min(filter(None, sides), default=1)
    for filling in _fillings(node, any(map(_holds_integers, arguments)), valid):
        if found and filling == ONES and valid == 1:
            break  # ones are then only for ops that reject zeros
        try:
            for tensor in arguments:
                _fill(tensor, filling, valid)
            found.append(_memory(lambda: target(*own_args, **own_kwargs), arguments, told, device))
        except REFUSALS as error:
            log.debug("%s cannot be run by itself: %s", node.target, error)
    if not found:
        return None
    excess = itertools.zip_longest(*(one.excess for one in found), fillvalue=0)
    return Measured(max(one.workspace for one in found), tuple(map(max, excess)))


def _fillings(node: fx.Node, has_integers: bool, valid: int) -> tuple[Filling, ...]:
    if node.target in PIVOTS:
        return (ONES,)
    found = PLAIN
    if has_integers and node.target not in LENGTHS:
        ascends = valid > 1 and node.target not in COUNTS
        found += ((None, None), ONES) if ascends else (ONES,)
    return tuple(one for one in found if one[0] != 0 or node.target not in REFUSE_ZEROS)


def _holds_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _fill(tensor: torch.Tensor, filling: Filling, valid: int) -> None:
    """Fills the tensor's whole storage. Ascending integers are below ``valid``."""
    whole, (floats, integers) = (
        tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0),
        filling,
    )
    if not _holds_integers(tensor):
        if tensor.dtype is torch.bool or floats is not None:
            whole.fill_(1 if floats is None else floats)
    elif integers is None:
        below = min(valid, torch.iinfo(tensor.dtype).max)
        whole.copy_(torch.arange(whole.numel(), device=whole.device) * below // max(1, whole.numel()))
    else:
        whole.fill_(integers)


def _memory(run: Callable[[], object], arguments: list[torch.Tensor], told: list[int], device: torch.device) -> Measured:
    """Returns the memory of a warm ``run()``, whose new results have the bytes ``told`` by their sizes.

    A first run allocates the memory that the kernel keeps for later calls.
    """
    run()
    peak, result = allocator.peak_on_cpu(run) if device.type == "cpu" else allocator.peak_on_cuda(run, device)
    made = _new_storages(tensors_in(result), arguments)
    if len(made) != len(told):  # the kernel's results share storages otherwise than the fake ones
        return Measured(max(0, peak - sum(made)), (max(0, sum(made) - sum(told)),))
    return Measured(max(0, peak - sum(made)), tuple(max(0, own - size) for own, size in zip(made, told, strict=True)))


def _new_storages(results: list[torch.Tensor], arguments: list[torch.Tensor]) -> list[int]:
    there = {storage_key(tensor) for tensor in arguments}
    found = {storage_key(tensor): size_hint(tensor.untyped_storage().nbytes()) for tensor in results}
    return [size for key, size in found.items() if key not in there]


# -- signatures of calls, and real arguments for them ------------------------------------------------------------------------


LONGEST_WAIT = 10.0
"""Seconds to wait for another process that writes its measurements."""

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""Errors that ops raise for arguments that they reject. An out-of-memory error is a ``RuntimeError`` too."""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
        bits = f"{'~' * value.is_conj()}{'-' * value.is_neg()}"  # views that an op conjugates or negates as it reads
        return f"{bits}{str(value.dtype).removeprefix('torch.')}{shape}{strides}@{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return str(size_hint(value)) if isinstance(value, torch.SymInt) else str(value)


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the node's arguments, with the (fake) values of argument nodes, and graphs for nodes that hold one."""

    def held(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        return higher_order.held_graph(x) or x.meta.get("val")

    args, kwargs = torch.utils._pytree.tree_map(held, (node.args, node.kwargs))
    return tuple(args), dict(kwargs)


def node_of_call(op: Any, args: Any, kwargs: Any) -> fx.Node:
    """Returns a node that calls ``op``, in a graph of its own whose inputs hold the tensors among the arguments."""
    graph = fx.Graph()

    def held(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    return graph.call_function(op, *torch.utils._pytree.tree_map(held, (tuple(args), dict(kwargs))))


def signature(node: fx.Node) -> str:
    """Returns text that is equal for equal calls: op, shapes, strides, types, other arguments."""
    args, kwargs = arguments(node)
    named = (f"{name}={_described(value)}" for name, value in sorted(kwargs.items()))
    return f"{node.target}({', '.join([*map(_described, args), *named])})"


def real(value: Any) -> Any:
    """Returns a real value for a fake one, in the same layout: random floats, or zeros for integers, which may be indices.

    Raises ``ValueError`` for a symbolic value that has no known number.
    """
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise ValueError(f"{value} has no known value")
        return value
    shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
    # Fill the storage, not the tensor: two of the tensor's elements may share one address.
    length = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if value.dtype.is_floating_point or value.dtype.is_complex:
        # Numbers from 0 to 1 are valid probabilities. A CUDA kernel that rejects other numbers makes the device unusable for
        # the process.
        storage = torch.rand(length, device=value.device).to(value.dtype)
    else:
        storage = torch.zeros(length, dtype=value.dtype, device=value.device)
    made = storage.as_strided(shape, strides)
    made = made.conj() if value.is_conj() else made
    return torch.ops.aten._neg_view(made) if value.is_neg() else made
