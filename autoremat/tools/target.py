"""The device to plan for: one that is here, or a card by name that other tensors represent."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import OptionsError
from autoremat.capture.capture import device_of_inputs
from autoremat.capture.pricing import ROOFLINE
from autoremat.measure.machine import checked_device
from autoremat.options.options import Options
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet, device_memory, known_cards
from autoremat.request.budgets import request_of
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.tools.cuda_autocast import write_casts
from autoremat.tools.cuda_kernels import attention_on_cuda, use_kernels_of_cuda
from autoremat.torch_private import named_card


@dataclass(frozen=True)
class Target:
    """The device to plan for, and the device of the fake tensors that represent it."""

    traced_on: torch.device
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet; None to plan for ``traced_on`` itself."""
    notes: tuple[str, ...] = ()

    @property
    def is_represented(self) -> bool:
        """True if tensors of the CPU stand for those of a card."""
        return self.cuda_name is not None and self.traced_on.type != "cuda"

    def as_on_card(self, module: fx.GraphModule) -> fx.GraphModule:
        """Returns ``module``, rewritten in place with the casts and the kernels of a card that the CPU represents."""
        for part in module.modules() if self.is_represented else ():
            if isinstance(part, fx.GraphModule):
                write_casts(part.graph)
                use_kernels_of_cuda(part.graph, self.capability)
                part.recompile()
        return module

    def tracing(self) -> AbstractContextManager[None]:
        """Returns the context in which torch traces a graph for this device, also for a card that the CPU represents."""
        if not self.is_represented:
            return contextlib.nullcontext()
        return named_card.traced_as_on_card(functools.partial(attention_on_cuda, capability=self.capability))

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability of a card by name; that of a middling one for an unknown card."""
        return (datasheet(self.cuda_name or "") or UNKNOWN_GPU).capability

    def request(self, options: Options, module: fx.GraphModule, inputs: Sequence[Any], resident_bytes: int) -> Request:
        """Returns the request of a graph that is planned for this device, beside ``resident_bytes`` of tensors.

        A card by name has the rates of its data sheet.
        """
        device = device_of_inputs(module, inputs)
        if self.cuda_name is None:
            return request_of(options, Surroundings(device, module, inputs, runs_here=False))
        memory = device_memory(self.cuda_name)
        free = None if memory is None else max(0, memory - resident_bytes)
        around = Surroundings(device, module, inputs, free_bytes_of=lambda device: free, is_card=True, runs_here=False)
        return request_of(replace(options, cost_model=ROOFLINE), around)


def target_of(device: str | torch.device | None, tensors: Iterable[torch.Tensor]) -> Target:
    """Returns the target that ``device`` means for a step that reads ``tensors``.

    ``device`` is a torch device, or the name of a CUDA GPU such as "H100-80GB". None means the device of the tensors. For
    tensors without data (meta) it means CUDA if present, else the CPU.

    Raises ``OptionsError`` for anything else.
    """
    if device is None:
        found = next((t.device for t in tensors if t.device.type != "meta"), None)
        if found is None:
            found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Target(checked_device(found))
    if isinstance(device, str) and device_memory(device) is not None:
        return _named(device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = torch.device("meta")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        return _named("cuda")
    if parsed.type == "meta":
        raise OptionsError(
            f'device={device!r} is not accepted. Accepted: a device of torch ("cpu", "cuda") or a CUDA card by name, with its '
            f'memory if that is another ("V100-16GB"). {known_cards(str(device))}'
        )
    return Target(checked_device(parsed))


def _named(name: str) -> Target:
    if torch.cuda.is_available():
        return Target(torch.device("cuda"), name)
    notes = [f"no CUDA device is here: traced on the CPU, planned by the figures of {name}"]
    if device_memory(name) is None:
        notes.append('no card is named: the figures are those of a middling one (name it, as in device="H100-80GB")')
    return Target(torch.device("cpu"), name, tuple(notes))
