"""Products of groups of rows with a matrix per group: FLOPs, and bytes of the operands that BLAS cannot read in place.

Groups are multiplied one after another, into slices of the result. Sizes of groups depend on the data, so one group may hold
all rows.
"""

from __future__ import annotations

from typing import Any

import torch

from autoremat.ops.tensors import tensor_bytes
from autoremat.torch_private.kernel_settings import packs_operands
from autoremat.torch_private.symbolic_sizes import size_hint

LARGEST_BLOCK = 2**17 + 2**10
"""Bytes of the largest block of packed operands and sums that oneDNN allocates for a thread, with what belongs to it."""


def is_plain_matrix(tensor: torch.Tensor) -> bool:
    """Returns True if BLAS can read the last two dimensions in place.

    One of them must have stride 1, and the other a stride of at least the first one's length.
    """
    rows, columns = (size_hint(s) for s in tensor.shape[-2:])
    row_stride, column_stride = (size_hint(s) for s in tensor.stride()[-2:])
    return (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)


def workspace_bytes(*operands: Any, **_: Any) -> int:
    """Returns the bytes of copied operands, of a single matrix for a stack of them.

    Where oneDNN multiplies, it packs the operands and accumulates in 32 bits. Each further thread has a block of its own.
    """
    found, packed = 0, 0
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.dim() >= 2:
            matrices = size_hint(operand.shape[0]) if operand.dim() == 3 else 1
            size = tensor_bytes(operand) // max(1, matrices)
            if packs_operands(operand.dtype):
                packed += 2 * size * max(1, 4 // operand.element_size())
            elif not is_plain_matrix(operand):
                found += size
    return found + packed + (torch.get_num_threads() - 1) * min(2 * packed, LARGEST_BLOCK)


def flops(rows: torch.Tensor, matrices: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the product of each row with the matrix of its group."""
    return 2 * size_hint(rows.shape[0]) * size_hint(matrices.shape[1]) * size_hint(matrices.shape[2])
