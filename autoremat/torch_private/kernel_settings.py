"""Torch's private names for settings and instructions that kernels depend on: precision and packing of products."""

from __future__ import annotations

from typing import Any

import torch


def packs_operands(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies matrices of ``dtype`` on this CPU (AVX-512, AMX). It packs the operands for that."""
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    available: Any = torch.backends.mkldnn.is_available
    return bool(probe and available() and getattr(torch.ops.mkldnn, probe)())


def rounds_to_tf32(convolutions: bool = False) -> bool:
    """Returns True if CUDA may round the operands of float32 matrix products to TF32 or less. Torch's default is False.

    cuDNN's ``convolutions`` have a setting of their own, by default True.
    """
    return (_convolution_precision() if convolutions else _matmul_precision(torch.backends.cuda)) == "tf32"


def float32_precision() -> str:
    """Returns text that changes with the permitted rounding in float32 products and convolutions, for the CPU and for CUDA.

    It reads the setting of each backend: torch's common setting raises an error once a user has set a single backend.
    """
    return f"{_matmul_precision(torch.backends.mkldnn)} {_matmul_precision(torch.backends.cuda)} {_convolution_precision()}"


def _matmul_precision(backend: Any) -> str:
    return str(backend.matmul.fp32_precision)


def _convolution_precision() -> str:
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.conv.fp32_precision)


def machine_fingerprint() -> str:
    """Returns text that changes with this CPU's instructions, which kernels depend on, and with the switches of libraries."""
    cuda: Any = torch.backends.cuda
    switches = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    packed = [packs_operands(dtype) for dtype in (torch.bfloat16, torch.float16)]
    tiles = [torch.cpu._is_amx_tile_supported(), torch.cpu._is_amx_fp16_supported()]
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [*(getattr(cuda, switch)() for switch in switches), *(library.enabled for library in libraries)]
    return f"{torch.backends.cpu.get_cpu_capability()} {packed} {tiles} {enabled}"
