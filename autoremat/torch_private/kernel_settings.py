"""Torch's private names for settings and instructions that kernels depend on: the precision of products, and tiles of CPUs."""

from __future__ import annotations

from typing import Any

import torch


def multiplies_in_tiles(dtype: torch.dtype) -> bool:
    """Returns True if this CPU multiplies matrices of ``dtype`` in tiles (AMX). For these, oneDNN packs the operands."""
    probe = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype, "")
    return bool(getattr(torch.cpu, probe, bool)())


def rounds_to_tf32() -> bool:
    """Returns True if CUDA may round the operands of float32 matrix products to TF32 or less. Torch's default is False."""
    return _matmul_precision(torch.backends.cuda) == "tf32"


def float32_precision() -> str:
    """Returns text that changes with the permitted rounding of float32 matrix products, for the CPU and for CUDA.

    It reads the setting of each backend: torch's common setting raises an error once a user has set a single backend.
    """
    return f"{_matmul_precision(torch.backends.mkldnn)} {_matmul_precision(torch.backends.cuda)}"


def _matmul_precision(backend: Any) -> str:
    return str(backend.matmul.fp32_precision)


def machine_fingerprint() -> str:
    """Returns text that changes with this CPU's instructions, which kernels depend on, and with the switches of libraries."""
    cuda: Any = torch.backends.cuda
    switches = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    tiles = [multiplies_in_tiles(dtype) for dtype in (torch.bfloat16, torch.float16)]
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [*(getattr(cuda, switch)() for switch in switches), *(library.enabled for library in libraries)]
    return f"{torch.backends.cpu.get_cpu_capability()} {tiles} {enabled}"
