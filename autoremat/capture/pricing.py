"""The work of ops in the units of rates, the shapes of library kernels, and the prices of a captured graph.

The table of facts (:mod:`autoremat.ops.op_table`) has the rate of an op. An op without one is charged for its bytes: a fused op
at the rate of sequential access, a kernel of its own at the rate of indexed access, which is slower. The cost models differ in
where the rates of the device come from.

- ``roofline`` (the default): data sheets.
- ``calibrated``: measurements of the device (:mod:`autoremat.measure.calibration`).

Under both, collectives have the seconds of their process group's interconnect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.units import format_bytes
from autoremat.measure.calibration import rates_of
from autoremat.ops import op_traits
from autoremat.ops.collectives import traffic_of_group
from autoremat.ops.op_traits import is_wait, stays_in_kernel
from autoremat.planner.cost.datasheets import TF32
from autoremat.planner.cost.device import Device
from autoremat.planner.cost.links import Interconnect, Links, LinkSource
from autoremat.planner.cost.rates import BATCH, Attention, AttentionKernel, Pricing, Product, Rate, Rates, Task, Work
from autoremat.planner.graph.graph import Machine
from autoremat.planner.graph.op import Kind, Op
from autoremat.torch_private import compilers
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import tensors_in
from autoremat.workspaces.measurement import arguments

FUSED_SHARE = 3
"""A fused pointwise op is charged 1/``FUSED_SHARE`` of the bytes that it would move alone: its share of the chain's traffic."""

BY_ELEMENT = frozenset(
    {
        Rate.DIVISION, Rate.EXPONENTIAL, Rate.TANH, Rate.SPECIAL, Rate.NORMALISATION, Rate.SORT, Rate.SCAN, Rate.WINDOW,
    }
)  # fmt: skip
"""Rates of arithmetic per element."""

ROOT_AND_DIVISION = torch.ops.aten.rsqrt
"""The op that counts as two of the rate of divisions."""

MOST_MULTIPLIED = 8
"""The largest whole exponent of a power that counts as multiplications."""

FEWEST_CHANNELS = 8
"""Convolutions with fewer channels per group are no matrix products."""

CONVOLUTIONS = (Rate.CONVOLUTION, Rate.CONVOLUTION_BACKWARD)

TOKENS_FIRST = ("_flash_attention", "_efficient_attention")
"""Ops whose operands have the tokens before the heads."""

INDEXED = frozenset({Rate.GATHER, Rate.SCATTER})
"""Rates of indexed memory accesses."""


def work_of(node: fx.Node, op: Op, fuses: bool) -> Work:
    """Returns the work of ``node``, which the graph knows as ``op``. Unless the graph ``fuses``, each op is launched."""
    if op.flops:
        by_library, known = True, True
        tasks = [_flops(node, op.flops), Task(Rate.STREAM, op.bytes_moved)]
    else:
        by_library = op.kind is Kind.EXTERN and not op_traits.adds_to_product(node)
        traffic, arithmetic = _traffic(node, op, by_library, fuses), _arithmetic(node, by_library)
        known = not by_library or arithmetic is not None or op_traits.facts(node).rate in INDEXED
        tasks = [traffic, arithmetic] if arithmetic is not None else [traffic]
    return Work(tuple(task for task in tasks if task.amount > 0), by_library or not fuses, shapes_of(node), known)


def arithmetic_of(node: fx.Node) -> Work:
    """Returns the arithmetic of a fused ``node``, without memory traffic."""
    arithmetic = _arithmetic(node, by_library=False)
    return Work(() if arithmetic is None else (arithmetic,))


def operand_type(node: fx.Node) -> str:
    """Returns the name of the type that ``node`` computes with: that of its first operand that is no integer tensor."""
    types = (t.dtype for t in _operands(node) if t.dtype.is_floating_point or t.dtype.is_complex)
    return str(next(types, torch.float32)).removeprefix("torch.")


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]


def _elements(tensors: list[torch.Tensor]) -> int:
    return max((size_hint(t.numel()) for t in tensors), default=0)


def _flops(node: fx.Node, flops: int) -> Task:
    dtype, facts = product_type(node), op_traits.facts(node)
    rate = facts.rate
    if rate is Rate.BATCHED_MATMUL:
        batch = max(size_hint(_operands(node)[-1].shape[0]), 1)
        return Task(rate, flops / batch * BATCH, dtype, batch / BATCH)
    if rate is not None and facts.is_attention:
        return Task(rate, flops, dtype)
    if rate in CONVOLUTIONS:
        return Task(_convolution_rate(node), flops, dtype)
    return Task(Rate.MATMUL, flops, dtype)


def _convolution_rate(node: fx.Node) -> Rate:
    backward = op_traits.facts(node).rate is Rate.CONVOLUTION_BACKWARD
    # Arguments are (image, weight, ..., groups). The backward has the result's gradient in front.
    weight = _operands(node)[2 if backward else 1]
    if size_hint(weight.shape[1]) == 1 and size_hint(weight.shape[0]) > 1:
        return Rate.DEPTHWISE_CONVOLUTION_BACKWARD if backward else Rate.DEPTHWISE_CONVOLUTION
    if all(size_hint(side) == 1 for side in weight.shape[2:]):
        return Rate.POINT_CONVOLUTION_BACKWARD if backward else Rate.POINT_CONVOLUTION
    return Rate.CONVOLUTION_BACKWARD if backward else Rate.CONVOLUTION


def _traffic(node: fx.Node, op: Op, by_library: bool, fuses: bool) -> Task:
    rate = op_traits.facts(node).rate
    if rate is Rate.GATHER:
        # The op reads only the selected rows of the table. The indices themselves are few bytes in comparison.
        picked = 2 * sum(size_hint(t.numel()) * t.element_size() for t in tensors_in(node.meta.get("val")))
        return Task(rate, picked)
    if rate is Rate.SCATTER:
        return Task(rate, op.bytes_moved)
    if op_traits.is_collective(node):
        return Task(Rate.STREAM, op.bytes_moved)
    if by_library:
        return Task(Rate.STREAM if _arithmetic(node, by_library) else Rate.GATHER, op.bytes_moved)
    return Task(Rate.STREAM, op.bytes_moved // FUSED_SHARE if fuses and op.kind is not Kind.REDUCTION else op.bytes_moved)


def _arithmetic(node: fx.Node, by_library: bool) -> Task | None:
    facts, read = op_traits.facts(node), _elements(_operands(node))
    made = _elements(tensors_in(node.meta.get("val")))
    packet = op_traits.packet(node)
    if packet is torch.ops.aten.pow and (power := _simple_power(node.args[1], made)):
        return power
    if facts.rate in BY_ELEMENT:
        return Task(facts.rate, max(read, made) * (2 if packet is ROOT_AND_DIVISION else 1))
    if packet is torch.ops.aten.clone and _changes_layout(node):
        return Task(Rate.LAYOUT, made)
    if op_traits.is_random(node) or getattr(packet, "__name__", "") in op_traits.DRAWS:
        return Task(Rate.RANDOM, made)
    if facts.reduces:
        return Task(Rate.REDUCTION, read)
    return None if by_library else Task(Rate.CHEAP, made)


def _changes_layout(node: fx.Node) -> bool:
    (operand,), (result,) = _operands(node), tensors_in(node.meta["val"])
    before = _dense_dimensions(operand)
    return bool(before) and not before & _dense_dimensions(result)


def _dense_dimensions(tensor: torch.Tensor) -> set[int]:
    """Returns the dimensions of more than one element whose neighbours lie side by side."""
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return {dim for dim, (size, stride) in pairs if size_hint(size) > 1 and size_hint(stride) == 1}


def _simple_power(exponent: object, made: int) -> Task | None:
    """Returns the arithmetic of a power that is a few multiplications, a quotient or a root, or None for any other power."""
    if not isinstance(exponent, int | float) or abs(exponent) > MOST_MULTIPLIED:
        return None
    if exponent == 0.5 or (exponent < 0 and float(exponent).is_integer()):
        return Task(Rate.DIVISION, made)
    return Task(Rate.CHEAP, 2 * made) if float(exponent).is_integer() else None


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
    """Returns the type in which a device multiplies: that of the operands, or TF32 where a card may round these."""
    dtype = operand_type(node)
    convolves = op_traits.facts(node).rate in CONVOLUTIONS
    return TF32 if dtype == "float32" and compilers.rounds_to_tf32(convolves) else dtype


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


ROOFLINE, CALIBRATED = "roofline", "calibrated"

ARITHMETIC_SHARE = 0.1
"""The share of a fused pointwise op's seconds that is arithmetic, where the rate of its arithmetic is unknown."""


@dataclass(frozen=True)
class Prices:
    """Where the seconds of ops come from."""

    cost_model: str = ROOFLINE
    links: Links = field(default_factory=Links)
    """The rates of process groups."""
    others: Rates | None = None
    """The rates of another rank, which take the place of the device's own."""


class Pricer:
    """Prices the ops of one graph, and counts where their seconds come from."""

    def __init__(self, prices: Prices, device: torch.device, sheet: Device, fuses: bool) -> None:
        self.prices, self.sheet, self.fuses = prices, sheet, fuses
        self.measured = prices.others or (None if prices.cost_model == ROOFLINE else rates_of(device))
        self.rates: Rates | Device = self.measured or sheet
        self.total_seconds = self.calibrated_seconds = 0.0
        self.links: set[Interconnect] = set()

    def price(self, node: fx.Node, op: Op) -> Op:
        """Returns ``op`` with its seconds.

        A collective takes at least the seconds of its own memory traffic. A wait that is an op of its own takes none.
        """
        work = work_of(node, op, self.fuses)
        is_calibrated = self.measured is not None and work.known
        seconds, traffic = self._fused(node, work) if self.fuses and stays_in_kernel(node) else (self.rates.seconds(work), 0.0)
        if is_wait(node):
            seconds = 0.0
        elif (call := traffic_of_group(node)) is not None:
            link = self.prices.links.of(call.group, call.ranks, self.sheet.name)
            seconds = max(seconds, link.seconds(call.sent_bytes, call.steps))
            is_calibrated = link.source is not LinkSource.ASSUMED
            self.links.add(link)
        self.total_seconds += seconds
        self.calibrated_seconds += seconds if is_calibrated else 0.0
        return replace(op, seconds=seconds, memory_bound_seconds=traffic)

    def _fused(self, node: fx.Node, work: Work) -> tuple[float, float]:
        """Returns the seconds of an op of a fused kernel, and the part of them for its share of the kernel's traffic."""
        streamed = sum(task.amount for task in work.tasks if task.rate is Rate.STREAM)
        traffic, arithmetic = self.rates.saving_seconds_per_byte / 2 * streamed, self.rates.seconds(arithmetic_of(node))
        return (traffic + arithmetic, traffic) if arithmetic else (traffic, (1 - ARITHMETIC_SHARE) * traffic)

    def machine(self, groups_hold_buffers: bool) -> Machine:
        """Returns the machine on which fused kernels have these rates."""
        sheet, rates = self.sheet, self.rates
        return Machine(
            self.fuses, rates.saving_seconds_per_byte, sheet.write_share, sheet.overlaps_wholly, rates.launch_seconds,
            groups_hold_buffers, compilers.most_reads_inlined(),
        )  # fmt: skip

    def pricing(self) -> Pricing:
        """Returns a summary of the cost sources of all ops."""
        shown = sorted({f"{format_bytes(int(link.bytes_per_second))}/s ({link.source.value})" for link in self.links})
        calibrated = self.calibrated_seconds / self.total_seconds if self.total_seconds else 0.0
        cost_model = ROOFLINE if self.measured is None else self.prices.cost_model
        return Pricing(cost_model, calibrated, 1.0 - calibrated, ", ".join(shown))


def identity(cost_model: str, device: torch.device) -> str:
    """Returns text that identifies the cost model's rates on ``device``; empty for data sheets.

    Plans depend on the graph and on these rates. Under ``calibrated``, unknown rates are measured.
    """
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return rates.digest if rates is not None else ""
