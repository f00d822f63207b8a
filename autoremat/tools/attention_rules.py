"""The kernel of attention that torch chooses on a CUDA device.

The rules are those of torch 2.11 to 2.15 (``sdp_utils.cpp`` and ``sdp_utils_cpp.h``), with the cuDNN of their wheels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from autoremat.torch_private.names import MINOR

HALF = (torch.float16, torch.bfloat16)

FLASH_WIDTH = 256
"""Maximum head width of flash attention. Any smaller width is accepted and padded to a multiple of eight."""

CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))
"""Architectures on which torch tries cuDNN's attention first. ROCm has none."""

CUDNN_MOST = 65_535
"""Most batches, and most heads, of cuDNN's attention."""

SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Architectures on which the backward of flash attention supports fewer head widths above 192."""

Capability = tuple[int, int]


@dataclass(frozen=True)
class Attention:
    """The arguments of an attention on a device of the ``capability``, under torch 2.``minor``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: Capability
    minor: int = MINOR

    @property
    def kernel(self) -> str:
        """The first suitable kernel.

        1. "cudnn" on the newest server GPUs;
        2. "flash" for half precision without a mask;
        3. "efficient" for other dense cases;
        4. "math", the plain product.
        """
        suits = {"cudnn": self._suits_cudnn, "flash": self._suits_flash, "efficient": self._suits_efficient}
        return next((kernel for kernel, is_suitable in suits.items() if is_suitable()), "math")

    @property
    def needs_gradients(self) -> bool:
        """True if the backward of the kernel will run."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._operands)

    @property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def _widths(self) -> tuple[int, int]:
        return self.query.shape[-1], self.value.shape[-1]

    def _is_dense(self, dtypes: tuple[torch.dtype, ...], any_stride_of_one: bool) -> bool:
        """Returns True if the operands have four dimensions, one of the types, and contiguous columns, as has the mask."""
        if any(tensor.dim() != 4 or tensor.dtype is not self.query.dtype for tensor in self._operands):
            return False
        if self.query.dtype not in dtypes or 0 in (self.query.shape[2], self.key.shape[2]):
            return False
        has_columns = all(tensor.stride(-1) == 1 for tensor in self._operands)
        is_single = any_stride_of_one and self.query.shape[-1] == 1
        return (has_columns or is_single) and (self.mask is None or self.mask.stride(-1) == 1)

    def _has_heads(self, takes_groups: bool, together: bool) -> bool:
        """Several heads share one under ``enable_gqa`` if the kernel ``takes_groups``; from torch 2.14, all may share one."""
        if len({tensor.shape[0] for tensor in self._operands}) > 1:
            return False
        queries, keys, values = (tensor.shape[1] for tensor in self._operands)
        if self.enable_gqa and takes_groups:
            return queries % keys == 0 and (values == keys if together else queries % values == 0)
        return queries == keys == values or (self.minor >= 14 and keys == values == 1)

    def _suits_cudnn(self) -> bool:
        enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        if self.capability not in CUDNN_FIRST or not enabled or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
            return False
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return False
        if not self._is_dense(HALF, any_stride_of_one=True) or not self._has_heads(takes_groups=True, together=False):
            return False
        if self.minor >= 12 and self.dropout_p * 16 % 1:
            return False
        if self.minor >= 13 and max(self.query.shape[:2]) > CUDNN_MOST:
            return False
        if self.key.shape[2] == 1 or (self.query.shape[2] == 1 and self.dropout_p):
            return False
        return self._has_mask_of_cudnn() and self._has_widths_of_cudnn()

    def _has_mask_of_cudnn(self) -> bool:
        if self.mask is None:
            return True
        if self.mask.requires_grad or self.mask.dim() not in (2, 4):
            return False
        wanted = (*self.query.shape[:3], self.key.shape[2])[-self.mask.dim() :]
        return all(size in (1, most) for size, most in zip(self.mask.shape, wanted, strict=True))

    def _has_widths_of_cudnn(self) -> bool:
        widths = self._widths
        if any(width % 8 for width in widths):
            return False
        if self.minor >= 14:  # with cuDNN 9.22
            return max(widths) <= (128 if self.needs_gradients else 256) or widths in ((192, 128), (256, 256))
        return max(widths) <= (256 if self.capability[0] == 9 else 128) or (self.capability[0] == 10 and widths == (192, 128))

    def _suits_flash(self) -> bool:
        enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        width, is_square = self.query.shape[-1], self.query.shape[2] == self.key.shape[2]
        if not enabled or self.capability < (8, 0) or self.mask is not None or (self.is_causal and not is_square):
            return False
        if not self._is_dense(HALF, any_stride_of_one=True) or not self._has_heads(takes_groups=True, together=True):
            return False
        if self.capability in SMALL_SHARED_MEMORY and self.needs_gradients:
            if 192 < width <= 224 or (width > 224 and self.dropout_p):
                return False
        return self.key.shape[-1] == self.value.shape[-1] == width <= FLASH_WIDTH

    def _suits_efficient(self) -> bool:
        enabled: bool = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        is_recent, has_groups = self.capability >= (8, 0), self.minor >= 14
        dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if is_recent else ()))
        if not enabled or not self._is_dense(dtypes, any_stride_of_one=False) or not self._has_heads(has_groups, together=True):
            return False
        columns = 8 if self.query.dtype in HALF else 4 if is_recent else 1
        sizes = (*self._widths, *((t.storage_offset() for t in self._operands) if is_recent and self.minor >= 13 else ()))
        return self.key.shape[-1] == self.query.shape[-1] and all(size % columns == 0 for size in sizes)
