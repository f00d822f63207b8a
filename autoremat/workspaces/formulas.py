"""Workspaces of extern kernels, in bytes: the memory that a call allocates beside its results and frees before it returns.

A kernel with a formula has an upper bound, computed from the kernel's block sizes. ``tests/workspaces/test_formulas.py``
checks the formulas of the CPU against the allocator. Those of CUDA come from torch's sources. Matrix products need no workspace
there: cuBLAS allocates its own (8 MiB, 32 MiB on Hopper) for a stream at its first product and keeps it.

Any other kernel is measured if its device is present (:mod:`autoremat.workspaces.measurement`). If there is neither, the
workspace is unknown, and the report says so.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoremat.basics.units import rounded
from autoremat.ops import op_traits
from autoremat.ops.declarations import grouped_workspace, is_plain_matrix
from autoremat.planner.graph.op import Kind
from autoremat.torch_private.compilers import lays_channels_last, packs_operands
from autoremat.torch_private.symbolic_sizes import most, size_hint
from autoremat.torch_private.tensors import tensor_bytes, tensors_in
from autoremat.workspaces.measurement import Layout, measured

aten, prims = torch.ops.aten, torch.ops.prims

MOST_MULTIPROCESSORS = 192
"""The most multiprocessors of any card. Attention splits its sums to keep all of them busy."""

FLASH_ROWS = 64
"""Queries per block in the forward of flash attention."""


def _columns(width: int) -> int:
    return rounded(width, 32 if width <= 128 else 64)


def _flash(query: torch.Tensor, key: torch.Tensor, _: Any, dropout_p: float = 0.0, *__: Any, **___: Any) -> int:
    """Returns the bytes of partial results, where few queries would leave the card idle and keys are split among blocks.

    Each part has an output in float32 and row sums.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    idle = batch * heads * -(-queries // FLASH_ROWS) < 0.8 * 2 * MOST_MULTIPROCESSORS
    parts = min(128, -(-size_hint(key.shape[2]) // (256 if width <= 64 else 128 if width <= 128 else 64)))
    return 4 * batch * heads * queries * (_columns(width) + 1) * parts if idle and parts > 1 and not dropout_p else 0


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the bytes of accumulated gradients and of copies in the backward of flash attention.

    - The query's gradient is accumulated in float32, with a row sum per query. Rows and columns are padded to blocks.
    - Deterministic algorithms accumulate it in several parts.
    - If heads share keys, the gradients of keys and values are first computed for each head.
    - The output's gradient is read token by token, with all heads of a token together. It is copied if its layout differs.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    parts = -(-MOST_MULTIPROCESSORS // (batch * heads)) if torch.are_deterministic_algorithms_enabled() else 1
    accumulated = 4 * batch * heads * rounded(queries, 128) * (_columns(width) * parts + 1)
    shared = size_hint(key.shape[1]) != heads
    ungrouped = 2 * batch * size_hint(key.shape[2]) * heads * width * key.element_size() if shared else 0
    lies_by_token = gradient.transpose(1, 2).is_contiguous()
    return accumulated + ungrouped + (0 if lies_by_token else batch * heads * queries * width * gradient.element_size())


def _efficient(query: torch.Tensor, _: Any, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """Returns the bytes of the output in float32: wide heads in half precision accumulate it there."""
    batch, heads, queries, _ = (size_hint(s) for s in query.shape)
    width = size_hint(value.shape[3])
    return 4 * batch * heads * queries * width if query.element_size() < 4 and width > 128 else 0


def _efficient_backward(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """Returns the bytes of accumulated gradients in the backward of memory-efficient attention.

    - Half precision accumulates the query's gradient in float32, in blocks. Wide heads do the same for keys and values.
    - If few heads would leave the card idle, keys and values have several such parts.
    - Float32 needs only the product of the output and its gradient.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    if query.element_size() == 4:
        return 4 * batch * heads * queries * (size_hint(value.shape[3]) + 2)
    columns = rounded(width, 64 if width <= 64 else 128)
    accumulated = rounded(queries, 128) * (columns + 1)
    if width > 128:
        keys = rounded(size_hint(key.shape[2]), 128)
        parts = min(max(MOST_MULTIPROCESSORS // (batch * heads), 1), keys // 64)
        accumulated += parts * keys * (columns + rounded(size_hint(value.shape[3]), 128))
    return 4 * batch * heads * accumulated


CUDA: dict[Any, Callable[..., int]] = {
    # cuBLAS has a workspace of its own, and a copy within a device needs no temporary tensor.
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.copy_), lambda *_, **__: 0),
    # The states of all blocks in a scan of one long row. Inductor's own scan has a buffer in its code.
    **dict.fromkeys(
        (aten.cumsum, aten.cumprod, aten.logcumsumexp), lambda operand, *_, **__: size_hint(operand.numel()) // 16 + 4096
    ),
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
"""Workspace formulas by kernel. A kernel without one, such as cuDNN's, is measured if a card is present, else unknown."""

CUDA_ESTIMATES: dict[Any, Callable[..., int]] = {aten._scaled_dot_product_cudnn_attention_backward: _flash_backward}
"""Estimates for kernels whose workspace depends on the library's version: the formula of a similar kernel."""


KEY_BLOCK = 512
"""Keys per block of the CPU's flash attention."""

CHANNEL_BLOCK = 16
"""Channels per block when oneDNN reorders a tensor: it pads them to its vector width."""

SMALL = 64 * 1024

GENERATED = frozenset({prims._low_memory_max_pool_with_offsets})
"""Ops of Inductor that it always generates code for, without workspace. Torch's own function for them makes large copies."""

SCALARS = 256
"""Bytes for numbers among the arguments, which ATen wraps into tensors during the call, and for small counters."""


def _query_block(queries: int) -> int:
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


def _packed_keys_and_values(query: torch.Tensor, key: torch.Tensor) -> int:
    """Returns the bytes of packed keys and values on CPUs with matrix tiles (AMX).

    Keys and values are copied into the order of the tiles, with odd sizes made even. In addition, each thread holds a block of
    keys, and a block of queries if these are padded.
    """
    batch, heads, keys, width = (size_hint(s) for s in key.shape)
    even, columns = width + width % 2, min(KEY_BLOCK, keys)
    copies = batch * heads * (keys + -(-keys // columns)) * 2 * even
    blocks = torch.get_num_threads() * even * (columns + 1 + (_query_block(size_hint(query.shape[2])) if width % 2 else 0))
    return query.element_size() * (copies + blocks)


def _cpu_attention(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the bytes of all threads' blocks: attention matrix, row maxima and sums, and output."""
    queries, width, keys = size_hint(query.shape[2]), size_hint(query.shape[3]), size_hint(key.shape[2])
    rows, columns = _query_block(queries), min(KEY_BLOCK, keys)
    per_thread = max(4, query.element_size()) * rows * (columns + 2 + width)
    if query.element_size() < 4:
        per_thread += 2 * rows * columns
    packed = _packed_keys_and_values(query, key) if packs_operands(query.dtype) else 0
    return torch.get_num_threads() * per_thread + packed


def _cpu_attention_backward(_: Any, query: torch.Tensor, key: torch.Tensor, *__: Any, **___: Any) -> int:
    """Returns the bytes of each thread's attention block with its gradient, and of a contiguous output gradient."""
    queries, width, keys = size_hint(query.shape[2]), size_hint(query.shape[3]), size_hint(key.shape[2])
    rows, columns = _query_block(queries), min(KEY_BLOCK, keys)
    per_thread = max(4, query.element_size()) * 2 * rows * columns
    if query.element_size() < 4:
        per_thread += 2 * (2 * rows * columns + 3 * width * (rows + columns))
    return torch.get_num_threads() * per_thread + tensor_bytes(query) + 4096


def _blocked(tensor: torch.Tensor) -> int:
    """Returns the bytes of a batch of images that is reordered into blocks of channels."""
    channels = size_hint(tensor.shape[1]) if tensor.dim() > 1 else 1
    return tensor_bytes(tensor) // max(channels, 1) * rounded(channels, CHANNEL_BLOCK)


def _large_convolution(args: tuple[Any, ...], result: torch.Tensor) -> int | None:
    """Returns a bound for a convolution that is too large to measure; None for types that oneDNN does not convolve."""
    if args[1].dtype not in (torch.float32, torch.bfloat16):
        return None
    if len(args) == 9:
        return _blocked(args[0]) + _blocked(result) + tensor_bytes(args[1]) + SMALL
    gradient, image, weight = args[:3]  # the image's gradient has its size
    return 2 * max(_blocked(gradient), _blocked(image)) + 2 * tensor_bytes(weight) + SMALL


def channels_last_workspace(node: fx.Node, args: tuple[Any, ...], runs_on: str) -> int | None:
    """Returns the workspace of a convolution that Inductor runs channels last, in bytes; None for other calls.

    Only the weights and the threads' sums of weight gradients are reordered, into blocks of both channels. None also for kinds
    of convolutions that were not measured.
    """
    backward = op_traits.packet(node) is aten.convolution_backward
    if not backward and op_traits.packet(node) is not aten.convolution:
        return None
    weight, transposed, groups = (args[2], args[7], args[9]) if backward else (args[1], args[6], args[8])
    if groups != 1 or weight.dim() != 4 or weight.dtype != torch.float32 or transposed or not lays_channels_last(runs_on):
        return None
    outputs, inputs, *window = (size_hint(size) for size in weight.shape)
    padded = [rounded(channels, CHANNEL_BLOCK) for channels in (outputs, inputs)]
    size: int = math.prod([*padded, *window]) * weight.element_size()
    return 2 * size + torch.get_num_threads() * min(size, SMALL) + SMALL if backward else size + SMALL


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Returns images, and weights of their convolutions, channels last; any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def layouts_under_inductor(node: fx.Node, runs_on: str) -> tuple[Layout | None, ...]:
    """Returns the layouts in which Inductor may run the call on that device type: as traced, and channels last."""
    convolves = op_traits.packet(node) in (aten.convolution, aten.convolution_backward)
    return (None, channels_last) if convolves and lays_channels_last(runs_on) else (None,)


def _lies_in_order(tensor: torch.Tensor) -> bool:
    return bool(op_traits.without_data(tensor).is_contiguous())


def _cpu_product(*operands: Any, **_: Any) -> int | None:
    """Returns the bytes of copied operands: ATen copies an operand that BLAS cannot read, such as an expanded gradient.

    None for types that BLAS does not multiply.
    """
    matrices = [t for t in operands if isinstance(t, torch.Tensor) and t.dim() >= 2]
    if any(t.dtype not in (torch.float32, torch.float64) for t in matrices):
        return None
    return sum(tensor_bytes(t) for t in matrices if not is_plain_matrix(t))


MAXIMUM = 2
"""The mode of an embedding bag that returns the largest embedding of each bag."""


def _cpu_bags_backward(gradient: torch.Tensor, *arguments: Any) -> int | None:
    """Returns the bytes of gradients and positions of the bags that are not empty, if each bag's maximum is wanted.

    How many these are depends on the data. A gradient that is not contiguous is copied. None for other modes.
    """
    bag_sizes, maxima, mode = arguments[3], arguments[4], arguments[7]
    if mode != MAXIMUM:
        return None
    copies = 1 if _lies_in_order(gradient) else 2
    return copies * tensor_bytes(gradient) + tensor_bytes(maxima) + 2 * 8 * size_hint(bag_sizes.numel())


CPU: dict[Any, Callable[..., int | None]] = {
    aten._embedding_bag_backward: _cpu_bags_backward,
    aten._grouped_mm: grouped_workspace,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    # A contiguous copy of the columns. The result of ``im2col`` is not contiguous, although ATen declares it so.
    aten.col2im: lambda columns, *_, **__: tensor_bytes(columns),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _cpu_product),
}

KEEPS_OPERAND_SIZE = frozenset(
    {aten.binary_cross_entropy, aten.col2im, aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss}
)
"""Ops whose result may lie in a buffer of the first operand's size: images in that of columns, means in that of losses."""

EXACT_RESULTS = GENERATED | {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten._grouped_mm, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}  # fmt: skip
"""Ops that allocate exactly their results and write into them. A formula of the workspace says nothing about that."""


def _large_reduction(operands: list[torch.Tensor], results: list[torch.Tensor]) -> int | None:
    """Returns the bytes of converted or reordered copies in a reduction; None for complex numbers.

    An operand is copied if its elements are not in order, or if it is reduced in another type. Numbers of 16 bits are reduced
    in 32 bits. For complex numbers, absolute values may need further memory.
    """
    if any(t.is_complex() for t in operands):
        return None
    # A result of positions is not a conversion: argmax converts nothing.
    floats = any(t.is_floating_point() for t in operands)
    tensors = [t for t in (*operands, *results) if t.is_floating_point() or not floats]
    width = max(4, *(t.element_size() for t in tensors))
    converted = len({t.dtype for t in tensors}) > 1 or any(t.element_size() < 4 for t in tensors)
    copied = [t for t in operands if converted or not _lies_in_order(t)]
    return width * sum(size_hint(t.numel()) for t in (*copied, *(results if converted else ())))


def bound_bytes(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, runs_on: str) -> int | None:
    """Returns a bound for a kernel that is not measured; None if there is no bound.

    Such a kernel is too large, or its device is absent.
    """
    name, facts, on_cpu = op_traits.packet(node), op_traits.facts(node), runs_on == "cpu"
    if on_cpu and name in (aten.convolution, aten.convolution_backward):
        return _large_convolution(args, tensors_in(result)[0])
    if on_cpu and facts.is_product:  # packed and accumulated in 32 bits at least
        return sum(size_hint(t.numel()) * max(4, t.element_size()) for t in tensors_in((args, kwargs, result)))
    if on_cpu and name is aten.native_batch_norm_backward:
        width, channels = max(4, args[0].element_size()), size_hint(args[0].shape[1])
        # The image's deviations, in 32 bits at least, and a few sums per thread and channel.
        return int(width * (size_hint(args[0].numel()) + 2 * (torch.get_num_threads() + 1) * channels))
    if on_cpu and name is aten.roll:  # one dimension after another; without dimensions, one row of all elements
        return (len(args[2]) - 1 if len(args) > 2 and args[2] else 1) * tensor_bytes(args[0])
    operands, sorting = tensors_in((args, kwargs)), 0
    if on_cpu and facts.sorts_on_cpu:
        sorting = sum(most(t.numel()) * max(4, t.element_size()) for t in tensors_in(result))
    if on_cpu and facts.reduces:
        copies = _large_reduction(operands, tensors_in(result))
        return None if copies is None else copies + sorting
    if sorting:
        return sorting
    if not operands and name is not aten.randperm:
        return 0  # such a kernel only writes its result
    if op_traits.kind_of(node, runs_on) is Kind.EXTERN or facts.expands:
        return None
    # Operands of different types are first converted, in copies.
    widest = max(tensor.element_size() for tensor in tensors_in((args, kwargs, result)))
    return sum(size_hint(t.numel()) * widest for t in operands if len({o.dtype for o in operands}) > 1)


def workspace_bytes(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    runs_on: str,
    layout: Layout | None = None,
) -> int | None:
    """Returns the bytes of the call's workspace, or an upper bound; None if it is unknown.

    ``args``, ``kwargs`` and ``result`` hold (fake) tensors. ``runs_on`` is the type of the device that runs the kernel.
    ``layout`` gives the layout of images among the arguments.
    """
    tensors = tensors_in(result)
    if not tensors or op_traits.packet(node) in GENERATED:
        return 0
    formula = (CPU if runs_on == "cpu" else CUDA).get(op_traits.packet(node))
    if formula is not None and (bound := formula(*args, **kwargs)) is not None:
        return bound
    alone = measured(node, args, kwargs, result, layout) if tensors[0].device.type == runs_on else None
    found = bound_bytes(node, args, kwargs, result, runs_on) if alone is None else alone.workspace
    return None if found is None else found + (SCALARS if runs_on == "cpu" else 0)


def excess_bytes(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, runs_on: str) -> tuple[int, ...]:
    """Returns the bytes of each new result's memory above its size; nothing for results behind the last that is known."""
    tensors, name = tensors_in(result), op_traits.packet(node)
    if not tensors or tensors[0].device.type != runs_on or name in EXACT_RESULTS:
        return ()
    if op_traits.facts(node).copies_storage:
        kept, told = (size_hint(t.untyped_storage().nbytes()) for t in (args[0], tensors[0]))
        return (max(0, kept - told),)
    alone = measured(node, args, kwargs, result)
    if alone is not None:
        return alone.excess
    return (max(0, tensor_bytes(args[0]) - tensor_bytes(tensors[0])),) if name in KEEPS_OPERAND_SIZE else ()


def estimated_bytes(node: fx.Node, args: tuple[Any, ...], runs_on: str) -> int:
    """Returns an estimate, in bytes, of a workspace that :func:`workspace_bytes` does not know; 0 without an estimate."""
    estimate = CUDA_ESTIMATES.get(op_traits.packet(node)) if runs_on == "cuda" else None
    return estimate(*args) if estimate is not None else 0
