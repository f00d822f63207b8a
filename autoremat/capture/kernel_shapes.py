"""The shapes of library kernels, by which cards by name are priced: of matrix products, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.measure.signatures import arguments
from autoremat.ops import op_traits
from autoremat.ops.tensors import tensors_in
from autoremat.ops.work import operand_type
from autoremat.planner.cost import TF32, Attention, AttentionKernel, Product, Rate
from autoremat.torch_private import kernel_settings
from autoremat.torch_private.symbolic_sizes import size_hint

FEWEST_CHANNELS = 8
"""Convolutions with fewer channels per group are no matrix products."""

CONVOLUTIONS = (Rate.CONVOLUTION, Rate.CONVOLUTION_BACKWARD)


def shapes_of(node: fx.Node) -> tuple[Product, ...] | Attention:
    """Returns the matrix products that ``node`` computes, or its attention. Empty for any other kernel."""
    facts = op_traits.facts(node)
    if not (facts.is_product or facts.is_attention or facts.rate in CONVOLUTIONS):
        return ()
    args, kwargs = arguments(node)
    sizes = [[size_hint(size) for size in value.shape] for value in args if isinstance(value, torch.Tensor)]
    if facts.is_product:
        left, right = sizes[:2] if op_traits.packet(node) is torch.ops.aten._scaled_mm else sizes[-2:]  # behind a bias
        *batch, rows, inner = left
        return (Product(rows, right[-1], inner, math.prod(batch)),)
    is_backward = facts.rate in (Rate.ATTENTION_BACKWARD, Rate.CONVOLUTION_BACKWARD)
    if facts.is_attention:
        return _attention(node, sizes[is_backward : is_backward + 2], args, kwargs, is_backward)
    if is_backward:
        return _convolution(sizes[1], sizes[2], sizes[0], args, args[-1][:2])
    (made,) = tensors_in(node.meta["val"])
    return _convolution(sizes[0], sizes[1], [size_hint(size) for size in made.shape], args, None)


def product_type(node: fx.Node) -> str:
    """Returns the type in which a card multiplies: that of the operands, or TF32 where these are float32 and may be rounded."""
    dtype = operand_type(node)
    convolves = op_traits.facts(node).rate in CONVOLUTIONS
    return TF32 if dtype == "float32" and kernel_settings.rounds_to_tf32(convolves) else dtype


def _attention(
    node: fx.Node, sizes: Sequence[list[int]], args: Sequence[Any], kwargs: Mapping[str, Any], backward: bool
) -> Attention:
    query, key = sizes
    name = op_traits.packet(node).__name__
    schema = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    named = dict(zip(schema, args, strict=False)) | dict(kwargs)
    causal = bool(named.get("is_causal") or named.get("custom_mask_type"))
    keys = key[1] if name.startswith(TOKENS_FIRST) else key[-2]
    kernel = AttentionKernel.CUDNN if "cudnn" in name else AttentionKernel.AMPERE
    return Attention(query[-1], keys, causal, backward, kernel)


TOKENS_FIRST = ("_flash_attention", "_efficient_attention")
"""Ops whose operands have the tokens before the heads."""


def _convolution(
    image: list[int], weight: list[int], result: list[int], args: Sequence[Any], gradients: Sequence[bool] | None
) -> tuple[Product, ...]:
    """Returns the products of a convolution, or those of the wanted ``gradients`` of its image and weight."""
    *_, transposed, _, groups = args[:9] if gradients is None else args[:10]
    kernel = math.prod(weight[2:])
    outer, inner = weight[0] // groups, weight[1] * kernel
    if min(outer, weight[1]) < FEWEST_CHANNELS:
        return ()
    of_positions = image if transposed else result
    positions = of_positions[0] * math.prod(of_positions[2:])
    if gradients is None:
        return (Product(positions, outer, inner, groups),)
    of_both = Product(positions, inner, outer, groups), Product(outer, inner, positions, groups)
    return tuple(product for product, wanted in zip(of_both, gradients, strict=True) if wanted)
