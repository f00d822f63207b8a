"""The ledger's rows of models, and what each way to distribute a step holds beside them.

A way to distribute a step has one function here, which looks for it in the models and returns what it holds. ``STRATEGIES``
has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoremat.device_memory.inventory import Inventory
from autoremat.planner.multigraph.device_budget import COMPILED, EARLIER_GRADIENTS, UPDATES, LedgerRow, StepPart
from autoremat.torch_private.autograd import hooks_after_gradients
from autoremat.torch_private.process_groups import gathered_groups

FEWER_PARAMETERS = "hold parameters in fewer bits, or shard them (FSDP2's fully_shard)"
FEWER_GRADIENTS = "train fewer parameters (LoRA, frozen layers), or run the optimizer in the backward, which frees each early"


@dataclass(frozen=True)
class Held:
    """What a way to distribute a step holds on a device."""

    row: LedgerRow
    """Its memory. A row of no bytes is left out of the ledger."""
    gradients: frozenset[int] = frozenset()
    """Identities of the parameters whose gradients are part of that memory."""


def data_parallel(models: Sequence[nn.Module], inventory: Inventory) -> Held:
    """Returns what ``DistributedDataParallel`` holds: buckets of all gradients, which may be views of them."""
    parallel = [model for model in models if isinstance(model, DistributedDataParallel)]
    views = frozenset(id(p) for model in parallel if model.gradient_as_bucket_view for p in model.parameters())
    size = inventory.gradient_bytes(p for model in parallel for p in model.parameters())
    advice = "" if views else "gradient_as_bucket_view=True makes gradients views of the buckets"
    return Held(LedgerRow("buckets of DistributedDataParallel", size, remedy=advice), views)


def fully_sharded(models: Sequence[nn.Module], inventory: Inventory) -> Held:
    """Returns what ``fully_shard`` holds at most: groups that stay, the running, the next and the reduced one."""
    size = 0
    for model in models:
        groups = list(gathered_groups(model))
        freed = sorted((size for size, is_freed in groups if is_freed), reverse=True)
        size += sum(size for size, is_freed in groups if not is_freed) + sum(freed[:2])
        size += max((size for size, _ in groups), default=0)
    return Held(LedgerRow("gathered parameters of fully_shard", size, COMPILED, "shard smaller modules"))


STRATEGIES: Sequence[Callable[[Sequence[nn.Module], Inventory], Held]] = (data_parallel, fully_sharded)
"""The ways to distribute a step that hold memory of their own. Local SGD holds its own in the optimizer's step."""


def rows_of_models(
    models: Sequence[nn.Module], inventory: Inventory, kept_in: StepPart, hooks_free: bool
) -> Iterator[LedgerRow]:
    """Yields the rows of models: parameters, buffers, what strategies hold, and gradients.

    ``kept_in`` are the parts of forward and backward in which earlier gradients are live. With ``hooks_free``, gradients
    with post-accumulate-grad hooks are live in the backward alone, where the plans count them.
    """
    parameters = {id(p): p for model in models for p in model.parameters()}
    yield LedgerRow("parameters", inventory.bytes_of(parameters.values()), remedy=FEWER_PARAMETERS)
    yield LedgerRow("buffers", inventory.bytes_of(buffer for model in models for buffer in model.buffers()))
    held = [strategy(models, inventory) for strategy in STRATEGIES]
    yield from (one.row for one in held)
    counted = {key for one in held for key in one.gradients}
    counted |= {id(p) for p in parameters.values() if hooks_free and hooks_after_gradients(p)}
    gradients = inventory.gradient_bytes(p for p in parameters.values() if id(p) not in counted)
    yield LedgerRow("gradients", gradients, UPDATES, FEWER_GRADIENTS)
    advice = "accumulate=1 and zero_grad(set_to_none=True) free them before the forward"
    yield LedgerRow(EARLIER_GRADIENTS, gradients if kept_in else 0, kept_in, advice)
