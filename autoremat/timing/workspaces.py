"""Workspaces of kernels, measured: each kernel runs by itself on made-up tensors, every distinct signature once, and its result
is read from disk afterwards.

A measurement is exact for tensors of these sizes, strides and types; only a kernel that looks at the numbers may need more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoremat import store, torch_memory
from autoremat.timing.calibration import device_key
from autoremat.timing.profiling import LONGEST_WAIT, REFUSALS, real, signature
from autoremat.timing.stopwatch import measurable, undisturbed
from autoremat.torch_compat import size_hint, storage_key

log = logging.getLogger("autoremat")

LARGEST = 2**30
"""Bytes of arguments and results together: a kernel that needs more is not run for its workspace."""

TIME_LIMIT = 60.0
"""Seconds of measuring for one graph; the kernels that come later are not measured."""

METHOD = 3
"""To be raised with every change of how workspaces are measured: figures of another method are not taken."""

REMEMBERED = 20_000
"""Signatures that the file of a device keeps; the newest stay."""

REFUSE_ZEROS = frozenset({torch.ops.aten.multinomial.default})
"""Ops that no zeros are tried on: their CUDA kernels would leave the process without its device."""

Workspaces = dict[str, int | None]
"""Bytes by signature; None for a kernel that cannot be run by itself."""

Layout = Callable[[torch.Tensor], torch.Tensor]
"""Lays a made-up argument out as the compiled code will."""

_known: dict[str, Workspaces] = {}
_unwritten: set[str] = set()
"""Devices of which something was measured since the last :func:`remember`."""
_spent = 0.0
"""Seconds of measuring for the graph at hand."""


def measured_workspace(node: fx.Node, args: Any, kwargs: Any, result: Any, layout: Layout | None = None) -> int | None:
    """Bytes that ``node``'s ATen op allocates beside its results and frees again; None if they cannot be measured.

    ``args``, ``kwargs`` and ``result`` are the call's, with fake tensors; ``layout`` is how images among them lie when it runs.
    """
    global _spent
    tensors = _tensors((args, kwargs, result))
    if not tensors or not _can_run(node, tensors):
        return None
    device = tensors[0].device
    key = f"{device_key(device)}-{METHOD}"
    known = _known[key] if key in _known else _known.setdefault(key, _stored(key))
    name = signature(node) + (f" {layout.__name__}" if layout is not None else "")
    if name not in known and _spent < TIME_LIMIT:
        begin = time.perf_counter()
        known[name] = undisturbed(device, lambda: _measure(node, args, kwargs, device, layout))
        _spent += time.perf_counter() - begin
        _unwritten.add(key)
    return known.get(name)


def remember() -> None:
    """Write to disk what was measured for the graph at hand, which ends here."""
    global _spent
    _spent = 0.0
    for key in tuple(_unwritten):
        _unwritten.discard(key)
        with store.locked("workspaces", key, LONGEST_WAIT):  # another process may have written since, or be about to
            newest = list((_stored(key) | _known[key]).items())[-REMEMBERED:]
            store.write_text("workspaces", key, json.dumps(dict(newest), indent=1))


def _stored(key: str) -> Workspaces:
    try:
        record = json.loads(store.read_text("workspaces", key) or "")
        return {str(name): None if size is None else int(size) for name, size in record.items()}
    except store.UNUSABLE:
        return {}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _can_run(node: fx.Node, tensors: list[torch.Tensor]) -> bool:
    """Whether the call may be run by itself: an op of torch's own, on dense tensors of this device that are not too large."""
    device = tensors[0].device
    if not isinstance(node.target, torch._ops.OpOverload) or not measurable(device):
        return False
    if "mkldnn" in str(node.target):
        return False  # oneDNN's own ops trust that their arguments belong together
    if device.type == "cpu" and not torch_memory.can_see_allocations():
        return False
    dense = all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors)
    return dense and sum(size_hint(t.numel()) * t.element_size() for t in tensors) <= LARGEST


def _measure(node: fx.Node, args: Any, kwargs: Any, device: torch.device, layout: Layout | None) -> int | None:
    """The larger workspace on random numbers from 0 to 1 with full masks, and on zeros; None if the op refuses both."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def lay_out(value: Any) -> Any:
        return layout(value) if layout is not None and isinstance(value, torch.Tensor) else value

    found = []
    try:
        own_args, own_kwargs = torch.utils._pytree.tree_map(lambda value: lay_out(real(value)), (args, kwargs))
    except REFUSALS as error:
        log.debug("%s cannot be run by itself: %s", node.target, error)
        return None
    arguments = _tensors((own_args, own_kwargs))
    for zeros in (False, True):
        if zeros and node.target in REFUSE_ZEROS:
            continue
        try:
            for tensor in arguments:
                if zeros or tensor.dtype is torch.bool:  # a mask takes all, then nothing
                    storage: Any = tensor.untyped_storage()
                    storage.fill_(0 if zeros else 1)
            found.append(_workspace(lambda: target(*own_args, **own_kwargs), arguments, device))
        except REFUSALS as error:
            log.debug("%s cannot be run by itself: %s", node.target, error)
    return max(found, default=None)


def _workspace(run: Callable[[], object], arguments: list[torch.Tensor], device: torch.device) -> int:
    """Bytes that ``run()`` allocates beside what it returns, on ``device``, once whatever it keeps for later calls is there."""
    run()
    peak, result = torch_memory.peak_on_cpu(run) if device.type == "cpu" else torch_memory.peak_on_cuda(run, device)
    there = {storage_key(tensor) for tensor in arguments}
    made = {storage_key(t): t.untyped_storage().nbytes() for t in _tensors(result)}
    return max(0, peak - sum(size for address, size in made.items() if address not in there))
