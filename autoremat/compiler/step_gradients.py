"""The gradients that calls of the present step have computed, and that are live beside its later calls."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from autoremat.device_memory.inventory import Inventory
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.torch_private.autograd import backward_number


def leaves_of(args: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the arguments of a graph that get a gradient of their own: parameters, and inputs that require one."""
    return [one for one in args if isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad]


class _Bare(NamedTuple):
    """A leaf without a gradient, its version, and Dynamo's number of the function that was called with it."""

    leaf: weakref.ref[torch.Tensor]
    version: int
    function: int | None


class StepGradients:
    """The leaves that calls of the present step found without a gradient.

    If such a leaf has a gradient later on, an earlier call of the step computed it. A change in place of one of them, as an
    optimizer makes it, ends the step. Gradients that are live then belong to the memory at the start of the next step.
    """

    def __init__(self) -> None:
        self._bare: dict[int, _Bare] = {}
        self._computed: dict[int, int | None] = {}
        """The backward that computed a gradient last, by the leaf's identity. Autograd holds gradients of a leaf that several
        calls take, until it has their sum."""

    def note(self, leaves: Iterable[torch.Tensor], function: int | None) -> None:
        """Records that a call of ``function`` in the present step takes ``leaves``."""
        self._bare |= {id(one): _Bare(weakref.ref(one), one._version, function) for one in leaves if one.grad is None}

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
        found = [(leaf, bare) for bare in list(self._bare.values()) if (leaf := bare.leaf()) is not None]
        if any(leaf._version != bare.version for leaf, bare in found):
            self._bare, self._computed = {}, {}
            return 0, 0
        owns, others, earlier = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        running = backward_number()
        for leaf, bare in found:
            waits = running is not None and self._computed.get(id(leaf)) == running
            gradient = leaf if leaf.grad is None and waits else leaf.grad  # a leaf has the size of its gradient
            if gradient is None or gradient.device != device:
                continue
            of_function = bare.function is not None and bare.function == function and not isinstance(leaf, torch.nn.Parameter)
            (owns if id(leaf) in own else others if waits or of_function else earlier).append(gradient)
        others += earlier if is_within_step or owns else []
        inventory = Inventory(device.type, ROUNDING if device.type == "cuda" else 1)
        return inventory.bytes_of(owns), inventory.bytes_of(others)
