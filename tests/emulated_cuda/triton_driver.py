"""Triton's driver for the emulated card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from emulated_cuda.card import CAPABILITY, PROCESSORS, PROPERTIES, SHARED_MEMORY_BYTES


class Driver(DriverBase):  # type: ignore[misc]
    """Describes the card. Kernels are compiled for it, and run by the interpreter, but never launched."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": SHARED_MEMORY_BYTES,
            "multiprocessor_count": PROCESSORS,
            "sm_clock_rate": PROPERTIES.clock_rate,
            "mem_clock_rate": PROPERTIES.memory_clock_rate,
            "mem_bus_width": PROPERTIES.memory_bus_width,
        }
    )

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "int"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> Any:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return CAPABILITY

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("an emulated card has no clock")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError("an emulated card has no clock")

    def clear_cache(self, cache: Any) -> None:
        pass


def install() -> None:
    """Makes the driver the one of CUDA, for the rest of the process."""
    triton.runtime.driver.set_active(Driver())
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = type(nvidia)(nvidia.compiler, Driver)
