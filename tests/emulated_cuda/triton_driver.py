"""Triton's driver for the emulated card."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from emulated_cuda.card import CAPABILITY, PROCESSORS, PROPERTIES, SHARED_MEMORY_BYTES


def answering(answer: Any) -> Callable[..., Any]:
    """Returns a method that answers so whatever it is asked."""
    return lambda self, *_, **__: answer


def without_clock(self: Any) -> Any:
    raise NotImplementedError("an emulated card has no clock")


class Driver(DriverBase):  # type: ignore[misc]
    """Describes the card. Kernels are compiled for it, and run by the interpreter, but never launched."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": SHARED_MEMORY_BYTES, "multiprocessor_count": PROCESSORS,
            "sm_clock_rate": PROPERTIES.clock_rate, "mem_clock_rate": PROPERTIES.memory_clock_rate,
            "mem_bus_width": PROPERTIES.memory_bus_width,
        }
    )  # fmt: skip
    is_active = classmethod(answering(True))
    map_python_to_cpp_type = answering("int")
    get_current_target = answering(GPUTarget("cuda", 90, 32))
    get_active_torch_device = answering(torch.device("cuda", 0))
    get_current_device = get_current_stream = answering(0)
    get_device_capability = answering(CAPABILITY)
    get_device_interface = answering(torch.cuda)
    __init__ = set_current_device = clear_cache = answering(None)
    get_benchmarker = get_empty_cache_for_benchmark = without_clock


def install() -> None:
    """Makes the driver the one of CUDA, for the rest of the process."""
    triton.runtime.driver.set_active(Driver())
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = type(nvidia)(nvidia.compiler, Driver)
