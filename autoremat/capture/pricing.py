"""The work of ops, the shapes of library kernels, and the prices of a captured graph.

The table of facts (:mod:`autoremat.ops.op_table`) has the class of an op's arithmetic. A kernel of its own without FLOPs is
charged for its bytes and its arithmetic. The cost models differ in where the rates of the device come from.

- ``roofline`` (the default): data sheets.
- ``calibrated``: measurements of the device (:mod:`autoremat.measure.calibration`).

Under both, collectives have the seconds of their process group's interconnect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.units import format_bytes
from autoremat.capture.communication import seconds_of
from autoremat.measure.calibration import rates_of
from autoremat.ops import op_traits
from autoremat.ops.op_traits import is_wait, stays_in_kernel
from autoremat.planner.cost.datasheets import TF32
from autoremat.planner.cost.device import SPECIALS, Attention, AttentionKernel, Device, Pricing, Product, Rate, Rates, Work
from autoremat.planner.cost.links import Interconnect, Links
from autoremat.planner.graph.graph import Machine
from autoremat.planner.graph.op import Kind, Op
from autoremat.torch_private import compilers
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import tensors_in
from autoremat.workspaces.measurement import arguments

FUSED_SHARE = 3
"""A fused pointwise op is charged 1/``FUSED_SHARE`` of the bytes that it would move alone: its share of the chain's traffic."""

ROOT_AND_DIVISION = torch.ops.aten.rsqrt
"""The op that counts as two of the class of divisions."""

MOST_MULTIPLIED = 8
"""The largest whole exponent of a power that counts as multiplications."""

FEWEST_CHANNELS = 8
"""Convolutions with fewer channels per group are no matrix products."""

CONVOLUTIONS = (Rate.CONVOLUTION, Rate.CONVOLUTION_BACKWARD)

TOKENS_FIRST = ("_flash_attention", "_efficient_attention")
"""Ops whose operands have the tokens before the heads."""


def work_of(node: fx.Node, op: Op, fuses: bool) -> Work:
    """Returns the work of ``node``, which the graph knows as ``op``. Unless the graph ``fuses``, each op is launched."""
    if op.flops:
        return Work(op.flops, product_type(node), op.bytes_moved, launches=True, shapes=shapes_of(node))
    by_library, rate = op.kind is Kind.EXTERN and not op_traits.adds_to_product(node), op_traits.facts(node).rate
    moved = op.bytes_moved
    if rate is Rate.GATHER:
        # The op reads only the selected rows of the table. The indices themselves are few bytes in comparison.
        moved = 2 * sum(size_hint(t.numel()) * t.element_size() for t in tensors_in(node.meta.get("val")))
    elif fuses and not by_library and op.kind is not Kind.REDUCTION:
        moved //= FUSED_SHARE
    specials = _specials(node, by_library)
    return Work(0.0, "", moved, specials, by_library or not fuses, shapes_of(node))


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]


def _specials(node: fx.Node, by_library: bool) -> float:
    """Returns how many results of special function units take as long as the arithmetic of an op without FLOPs."""
    facts, packet = op_traits.facts(node), op_traits.packet(node)
    read, made = (
        max((size_hint(t.numel()) for t in tensors), default=0)
        for tensors in (_operands(node), tensors_in(node.meta.get("val")))
    )
    if packet is torch.ops.aten.pow and (of_power := _specials_of_power(node.args[1])):
        return of_power * made
    if facts.rate in SPECIALS:
        return SPECIALS[facts.rate] * max(read, made) * (2 if packet is ROOT_AND_DIVISION else 1)
    if op_traits.is_random(node) or getattr(packet, "__name__", "") in op_traits.DRAWS:
        return SPECIALS[Rate.RANDOM] * made
    if facts.reduces:
        return SPECIALS[Rate.CHEAP] * read
    return 0.0 if by_library else SPECIALS[Rate.CHEAP] * made


def _specials_of_power(exponent: object) -> float:
    """Returns the price of a power that is a few multiplications, a quotient or a root, or 0 for any other power."""
    if not isinstance(exponent, int | float) or abs(exponent) > MOST_MULTIPLIED:
        return 0.0
    if exponent == 0.5 or (exponent < 0 and float(exponent).is_integer()):
        return SPECIALS[Rate.DIVISION]
    return 2 * SPECIALS[Rate.CHEAP] if float(exponent).is_integer() else 0.0


def shapes_of(node: fx.Node) -> tuple[Product, ...] | Attention:
    """Returns the matrix products that ``node`` computes, or its attention. Empty for any other kernel."""
    facts = op_traits.facts(node)
    if not (facts.is_product or facts.is_attention or facts.rate in CONVOLUTIONS):
        return ()
    args, _ = arguments(node)
    sizes = [[size_hint(size) for size in value.shape] for value in args if isinstance(value, torch.Tensor)]
    if facts.is_product:
        left, right = sizes[:2] if op_traits.packet(node) is torch.ops.aten._scaled_mm else sizes[-2:]  # behind a bias
        *batch, rows, inner = left
        return (Product(rows, right[-1], inner, math.prod(batch)),)
    is_backward = facts.rate in (Rate.ATTENTION_BACKWARD, Rate.CONVOLUTION_BACKWARD)
    if facts.is_attention:
        query, key = sizes[is_backward : is_backward + 2]
        name, named = op_traits.packet(node).__name__, op_traits.named_arguments(node)
        causal = bool(named.get("is_causal") or named.get("custom_mask_type"))
        kernel = AttentionKernel.CUDNN if "cudnn" in name else AttentionKernel.AMPERE
        return Attention(query[-1], key[1 if name.startswith(TOKENS_FIRST) else -2], causal, is_backward, kernel)
    if is_backward:
        return _convolution(sizes[1], sizes[2], sizes[0], args, args[-1][:2])
    (made,) = tensors_in(node.meta["val"])
    return _convolution(sizes[0], sizes[1], [size_hint(size) for size in made.shape], args, None)


def product_type(node: fx.Node) -> str:
    """Returns the type in which a device multiplies: that of the operands, or TF32 where a card may round these."""
    types = (t.dtype for t in _operands(node) if t.dtype.is_floating_point or t.dtype.is_complex)
    dtype = str(next(types, torch.float32)).removeprefix("torch.")
    convolves = op_traits.facts(node).rate in CONVOLUTIONS
    return TF32 if dtype == "float32" and compilers.rounds_to_tf32(convolves) else dtype


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
    links: Links = Links()
    """The rates of process groups."""
    others: Rates | None = None
    """The rates of another rank, which take the place of the device's own."""


class Pricer:
    """Prices the ops of one graph, and counts where their seconds come from."""

    def __init__(self, prices: Prices, device: torch.device, sheet: Device, fuses: bool) -> None:
        self.prices, self.fuses = prices, fuses
        rates = prices.others or (None if prices.cost_model == ROOFLINE else rates_of(device))
        self.is_measured = rates is not None
        self.device = sheet if rates is None else sheet.with_rates(rates)
        self.total_seconds = self.calibrated_seconds = 0.0
        self.links: set[Interconnect] = set()

    def price(self, node: fx.Node, op: Op) -> Op:
        """Returns ``op`` with its seconds.

        A collective takes at least the seconds of its own memory traffic. A wait that is an op of its own takes none.
        """
        work, is_calibrated, traffic = work_of(node, op, self.fuses), self.is_measured, 0.0
        if is_wait(node):
            seconds = 0.0
        elif self.fuses and stays_in_kernel(node):  # its share of the kernel's traffic, and its arithmetic
            traffic = self.device.saving_seconds_per_byte / 2 * work.moved_bytes
            arithmetic = self.device.seconds(Work(specials=work.specials))
            seconds = traffic + arithmetic
            traffic *= 1.0 if arithmetic else 1 - ARITHMETIC_SHARE
        else:
            seconds = self.device.seconds(work)
        if (communication := seconds_of(node, self.prices.links, self.device.name)) is not None:
            link, seconds = communication[0], max(seconds, communication[1])
            is_calibrated = link.is_given
            self.links.add(link)
        self.total_seconds += seconds
        self.calibrated_seconds += seconds if is_calibrated else 0.0
        return replace(op, seconds=seconds, memory_bound_seconds=traffic)

    def machine(self, groups_hold_buffers: bool) -> Machine:
        """Returns the machine on which fused kernels have these rates."""
        device = self.device
        return Machine(
            self.fuses, device.saving_seconds_per_byte, device.write_share, device.overlaps_wholly, device.launch_seconds,
            groups_hold_buffers, compilers.most_reads_inlined(),
        )  # fmt: skip

    def pricing(self) -> Pricing:
        """Returns a summary of the cost sources of all ops."""
        links = ((format_bytes(int(one.bytes_per_second)), "given" if one.is_given else "assumed") for one in self.links)
        shown = sorted({f"{rate}/s ({origin})" for rate, origin in links})
        calibrated = self.calibrated_seconds / self.total_seconds if self.total_seconds else 0.0
        return Pricing(CALIBRATED if self.is_measured else ROOFLINE, calibrated, 1.0 - calibrated, ", ".join(shown))


def identity(cost_model: str, device: torch.device) -> str:
    """Returns text that identifies the cost model's rates on ``device``; empty for data sheets.

    Plans depend on the graph and on these rates. Under ``calibrated``, unknown rates are measured.
    """
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return "" if rates is None else rates.to_json()
