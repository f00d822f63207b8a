"""Measured workspaces: each kernel runs alone, on synthetic tensors, once per signature.

Later processes read the result from disk. A measurement is exact for tensors of these sizes, strides and types. Only a kernel
whose memory depends on the data may need more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.basics import disk_cache
from autoremat.measure.calibration import device_key
from autoremat.measure.signatures import LONGEST_WAIT, REFUSALS, real, signature
from autoremat.measure.timer import measurable, undisturbed
from autoremat.ops.tensors import tensors_in
from autoremat.torch_private import allocator
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensor_identity import storage_key

log = logging.getLogger("autoremat")

LARGEST = 2**30
"""The most bytes of arguments and results together. A kernel with more is not measured."""

TIME_LIMIT = 60.0
"""The most seconds of measuring for one graph. Kernels after that are not measured."""

METHOD = 5
"""The version of the measuring method. Increase it with every change of the method: results of other versions are not used."""

REMEMBERED = 20_000
"""The most signatures in the file of a device. The newest are kept."""

REFUSE_ZEROS = frozenset({torch.ops.aten.multinomial.default})
"""Ops that are not run on zeros: their CUDA kernels would make the device unusable for the process."""


@dataclass(frozen=True)
class Measured:
    """The memory of one call, in bytes.

    ``workspace`` is the kernel's workspace. ``excess`` is the memory of its results above their sizes: the mean of a loss may
    keep the whole buffer of the losses.
    """

    workspace: int
    excess: int


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
        known[name] = undisturbed(device, lambda: _measure(node, args, kwargs, result, device, layout))
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
        return {str(name): None if row is None else Measured(int(row[0]), int(row[1])) for name, row in record.items()}
    except disk_cache.UNUSABLE:
        return {}


def _can_run(node: fx.Node, tensors: list[torch.Tensor]) -> bool:
    """Returns True if the call may run alone: an op of torch's own, on dense tensors of a present device, and not too large."""
    device = tensors[0].device
    if not isinstance(node.target, torch._ops.OpOverload) or not measurable(device):
        return False
    if "mkldnn" in str(node.target):
        return False  # oneDNN's own ops do not check that their arguments match
    if device.type == "cpu" and not allocator.can_see_allocations():
        return False
    dense = all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors)
    return dense and sum(size_hint(t.numel()) * t.element_size() for t in tensors) <= LARGEST


def _measure(
    node: fx.Node, args: Any, kwargs: Any, result: Any, device: torch.device, layout: Layout | None
) -> Measured | None:
    """Returns the largest workspace and excess of several runs; None if the op rejects all arguments.

    The runs use random numbers from 0 to 1 with full masks, then zeros. Integers are ones if no run with zeros succeeds.
    """
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def lay_out(value: Any) -> Any:
        return layout(value) if layout is not None and isinstance(value, torch.Tensor) else value

    found: list[Measured] = []
    try:
        own_args, own_kwargs = torch.utils._pytree.tree_map(lambda value: lay_out(real(value)), (args, kwargs))
    except REFUSALS as error:
        log.debug("%s cannot be run by itself: %s", node.target, error)
        return None
    arguments = tensors_in((own_args, own_kwargs))
    told = sum(_new_storages(tensors_in(result), tensors_in((args, kwargs))))
    for floats, integers in ((None, 0), (0, 0), (None, 1)):
        if found and integers:
            break  # ones are only for ops that reject zeros, such as those that read the pivots of a decomposition
        if floats == 0 and node.target in REFUSE_ZEROS:
            continue
        try:
            for tensor in arguments:
                _fill(tensor, floats, integers)
            found.append(_memory(lambda: target(*own_args, **own_kwargs), arguments, told, device))
        except REFUSALS as error:
            log.debug("%s cannot be run by itself: %s", node.target, error)
    return Measured(max(one.workspace for one in found), max(one.excess for one in found)) if found else None


def _fill(tensor: torch.Tensor, floats: int | None, integers: int) -> None:
    """Fills the tensor's whole storage. ``floats=None`` leaves floats unchanged and sets masks to True."""
    if tensor.dtype is torch.bool:
        number = 1 if floats is None else floats
    elif tensor.is_floating_point() or tensor.is_complex():
        if floats is None:
            return
        number = floats
    else:
        number = integers
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    whole.fill_(number)


def _memory(run: Callable[[], object], arguments: list[torch.Tensor], told_bytes: int, device: torch.device) -> Measured:
    """Returns the memory of a warm ``run()``, whose results have ``told_bytes`` by their sizes.

    A first run allocates the memory that the kernel keeps for later calls.
    """
    run()
    peak, result = allocator.peak_on_cpu(run) if device.type == "cpu" else allocator.peak_on_cuda(run, device)
    made = sum(_new_storages(tensors_in(result), arguments))
    return Measured(max(0, peak - made), max(0, made - told_bytes))


def _new_storages(results: list[torch.Tensor], arguments: list[torch.Tensor]) -> list[int]:
    """Returns the bytes of each storage of ``results`` that ``arguments`` do not share."""
    there = {storage_key(tensor) for tensor in arguments}
    found = {storage_key(tensor): size_hint(tensor.untyped_storage().nbytes()) for tensor in results}
    return [size for key, size in found.items() if key not in there]
