"""Torch's private names for models under ``fully_shard`` (FSDP2).

This module decides nothing about plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import distributed, nn


def gathered_groups(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yields, for each group of parameters that is gathered as a whole, its gathered bytes and True if it is freed after use.

    The root's own parameters stay gathered between forward and backward.
    """
    if not distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    taken: set[int] = set()
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in reversed(shards):  # inner ones first
        own = [p for p in module.parameters() if id(p) not in taken]
        taken.update(map(id, own))
        group: Any = module._get_fsdp_state()._fsdp_param_group
        kept = module is shards[0] or (group is not None and group.post_forward_mesh_info is None)
        types = {} if group is None else {id(one.sharded_param): one.mp_policy.param_dtype for one in group.fsdp_params}
        yield sum(p.numel() * (types.get(id(p)) or p.dtype).itemsize for p in own), not kept
