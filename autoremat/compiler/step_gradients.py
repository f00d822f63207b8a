"""The gradients that calls of the present step have computed, and that are live beside its later calls."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autoremat.device_memory.inventory import Inventory
from autoremat.planner.memory.caching_allocator import ROUNDING
from autoremat.torch_private.autograd import backward_number


def leaves_of(args: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the arguments of a graph that get a gradient of their own: parameters, and inputs that require one."""
    return [one for one in args if isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad]


@dataclass(frozen=True)
class _Leaf:
    """A leaf that a call found without a gradient."""

    reference: weakref.ref[torch.Tensor]
    version: int
    """The number of its in-place changes at that time."""
    function: int | None
    """Dynamo's number of the function that was called."""


class StepGradients:
    """The leaves that calls of the present step found without a gradient.

    If such a leaf has a gradient later on, an earlier call of the step computed it. A change in place of one of them, as an
    optimizer makes it, ends the step. Gradients that are live then belong to the memory at the start of the next step.
    """

    def __init__(self) -> None:
        self._bare: dict[int, _Leaf] = {}
        """The leaves by identity."""
        self._computed: dict[int, int | None] = {}
        """The backward that computed a gradient last, by the leaf's identity. Autograd holds gradients of a leaf that several
        calls take, until it has their sum."""

    def note(self, leaves: Iterable[torch.Tensor], function: int | None) -> None:
        """Records that a call of ``function`` in the present step takes ``leaves``."""
        for leaf in leaves:
            if leaf.grad is None:
                self._bare[id(leaf)] = _Leaf(weakref.ref(leaf), leaf._version, function)

    def note_backward(self, leaves: Collection[int]) -> None:
        """Records that the running backward has computed gradients of the leaves with these identities."""
        self._computed.update(dict.fromkeys(leaves, backward_number()))

    def live_bytes(
        self, device: torch.device, own: Collection[int], function: int | None, is_within_step: bool
    ) -> tuple[int, int]:
        """Returns the bytes of the step's gradients on ``device``: of leaves with an identity in ``own``, and of all others.

        ``is_within_step`` tells that other calls are open. Without them, gradients of other leaves belong to the present step
        in three cases: the running backward computed them, own leaves have gradients too, or they are inputs of an earlier
        call of ``function``. Else another model left them.
        """
        known = list(self._bare.values())
        found = [(leaf, one) for one in known if (leaf := one.reference()) is not None]
        if any(leaf._version != one.version for leaf, one in found):
            self.forget()
            return 0, 0
        inventory = Inventory(device.type, ROUNDING if device.type == "cuda" else 1)
        owns: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        earlier: list[torch.Tensor] = []
        running = backward_number()
        for leaf, one in found:
            waits = running is not None and self._computed.get(id(leaf)) == running
            gradient = leaf if leaf.grad is None and waits else leaf.grad  # a leaf has the size of its gradient
            if gradient is None or gradient.device != device:
                continue
            of_function = one.function is not None and one.function == function and not isinstance(leaf, torch.nn.Parameter)
            (owns if id(leaf) in own else others if waits or of_function else earlier).append(gradient)
        others += earlier if is_within_step or owns else []
        return inventory.bytes_of(owns), inventory.bytes_of(others)

    def forget(self) -> None:
        """Drops all leaves."""
        self._bare.clear()
        self._computed.clear()
