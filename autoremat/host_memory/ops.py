"""The ops by which a graph keeps a tensor on the host between its halves.

    copied = copy_to_host(source, capacity)               # begins
    host = wait_for_copy_to_host(copied, source)          # complete: in the forward, which saves `host`, or the backward
    loaded = copy_from_host(host, device)                 # begins
    value = wait_for_copy_from_host(loaded, host)         # complete: the backward reads `value`

Each wait reads the source of the copy and returns its first argument. So whoever runs the graph frees the source after the wait
or a later reader. A wait aliases its argument, which functionalization refuses: the ops belong into functional graphs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from autoremat.host_memory.links import link_of

_library = torch.library.Library("autoremat", "FRAGMENT")  # type: ignore[no-untyped-call]


def _alias(copy: Tensor) -> Tensor:
    """Returns another tensor with the memory of ``copy``, because no op may return its argument itself."""
    alias: Tensor = torch.ops.aten.alias.default(copy)
    return alias


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _define(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> torch._ops.OpOverload:
    """Returns the op that ``schema`` defines. No compiler removes its calls, or copies an operand to change its layout."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.flexible_layout,))  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autoremat::{name}", fake, lib=_library)
    op: torch._ops.OpOverload = getattr(torch.ops.autoremat, name).default
    torch.fx.has_side_effect(op)
    return op


copy_to_host = _define(
    "copy_to_host(Tensor source, int capacity) -> Tensor",
    lambda source, capacity: link_of(source.device).copy_to_host(source, capacity),
    lambda source, capacity: _on(torch.device("cpu"), source),
)
wait_for_copy_to_host = _define(
    "wait_for_copy_to_host(Tensor(a) copy, Tensor source) -> Tensor(a)",
    lambda copy, source: _alias(link_of(source.device).wait_for_copy_to_host(copy)),
    lambda copy, source: _alias(copy),
)
copy_from_host = _define(
    "copy_from_host(Tensor host, Device device) -> Tensor",
    lambda host, device: link_of(device).copy_from_host(host),
    lambda host, device: _on(device, host),
)
wait_for_copy_from_host = _define(
    "wait_for_copy_from_host(Tensor(a) copy, Tensor host) -> Tensor(a)",
    lambda copy, host: _alias(link_of(copy.device).wait_for_copy_from_host(copy, host)),
    lambda copy, host: _alias(copy),
)
