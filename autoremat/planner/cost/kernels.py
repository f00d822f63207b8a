"""Computes the seconds of library kernels from their shapes.

    seconds  =  launch  +  max(arithmetic, memory traffic)

A matrix product runs in waves: one tile of the result per multiprocessor at a time, and the last wave takes as long as the
others. The library chooses the best of a few tiles, and divides long inner sides among multiprocessors that would be idle.
Attention reaches more of the card's rate with more keys per query.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from autoremat.planner.cost.devices import Device
from autoremat.planner.cost.efficiencies import ATTENTION_BACKWARD, Efficiencies
from autoremat.planner.cost.rates import Rate, Work
from autoremat.planner.cost.roofline import roofline_seconds

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the tiles that libraries choose from."""

LARGEST_TILE = 256 * 128
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which an inner side is divided."""

SHORTEST_PART = 256
"""The least length of such a part."""

PARTIAL_SUM_BYTES = 8
"""Bytes that are written and read for an element of a part's result, in float32."""

CAUSAL_KEYS = 0.25
"""Share of the keys that count under a causal mask. It halves them, in tiles that are unequally long."""

HEAD_WIDTHS = {64: 0.76, 96: 0.90, 128: 1.0, 192: 1.0, 256: 1.05}
"""Widths of heads that attention kernels are compiled for, with their rates as shares of that of 128."""


@dataclass(frozen=True)
class Product:
    """``count`` products of a matrix of ``rows`` × ``inner`` with one of ``inner`` × ``columns``."""

    rows: int
    columns: int
    inner: int
    count: int = 1


class AttentionKernel(enum.Enum):
    """The origin of a kernel of fused attention."""

    NEWEST = "FlashAttention 3 and later"
    CUDNN = "cuDNN"
    AMPERE = "written for Ampere"


@dataclass(frozen=True)
class Attention:
    """Fused attention over heads of ``width`` elements, with ``keys`` per query; half of them if it is ``causal``."""

    width: int
    keys: int
    causal: bool
    backward: bool = False
    kernel: AttentionKernel = AttentionKernel.NEWEST


def kernel_seconds(flops: int, bytes_moved: int, device: Device, shapes: tuple[Product, ...] | Attention = ()) -> float:
    """Returns the seconds of a library kernel on ``device``, or of one kernel for each of several products.

    Without efficiencies of the device, they are the roofline's.
    """
    reached = device.efficiencies
    if reached is None:
        return roofline_seconds(flops, bytes_moved, device)
    traffic = bytes_moved / device.bytes_per_second
    if isinstance(shapes, Attention):
        return reached.launch_seconds + max(flops / _attention_rate(shapes, device, reached), traffic)
    if not shapes:
        return reached.launch_seconds + roofline_seconds(flops, bytes_moved, device)
    waves = sum(_seconds_of_waves(product, device, reached) for product in shapes)
    return len(shapes) * reached.product_seconds + max(waves, traffic * reached.stream / reached.operands)


SPECIALS = {
    Rate.CHEAP: 0.1, Rate.DIVISION: 0.5, Rate.EXPONENTIAL: 2.2, Rate.TANH: 2.2, Rate.SPECIAL: 3.5, Rate.RANDOM: 13.4,
    Rate.REDUCTION: 0.1, Rate.NORMALISATION: 2.2, Rate.LAYOUT: 0.1,
}  # fmt: skip
"""Time of an element's arithmetic, as a multiple of that of one result of the special function units.

Measured on an H100 (`benchmarks/gpu_rates.py`): a multiplication and an addition 0.1, rsqrt (which counts twice) 1.0, exp 1.4,
sigmoid 2.0, tanh 2.2, log 3.8, erf 4.1, a random number by Philox 13.4."""


def seconds_of_arithmetic(work: Work, device: Device) -> float:
    """Returns the seconds of a fused op's arithmetic, without memory traffic; 0 if the rate of the units is unknown."""
    specials = sum(SPECIALS.get(task.rate, 0.0) * task.amount * task.count for task in work.tasks)
    return specials / device.specials_per_second if device.specials_per_second else 0.0


def _seconds_of_waves(product: Product, device: Device, reached: Efficiencies) -> float:
    of_one = device.flops_per_second / device.multiprocessors
    elements, best = product.rows * product.columns * product.count, math.inf
    summing = elements * PARTIAL_SUM_BYTES / device.bytes_per_second * (reached.stream / reached.operands)
    for rows, columns in TILES:
        tiles = math.ceil(product.rows / rows) * math.ceil(product.columns / columns) * product.count
        rate = of_one * (rows * columns / LARGEST_TILE) ** reached.small_tile
        of_tile = 2 * rows * columns * product.inner / rate
        for parts in SPLITS:
            if parts == 1:
                best = min(best, math.ceil(tiles / device.multiprocessors) * of_tile)
            elif tiles * parts <= device.multiprocessors and product.inner >= parts * SHORTEST_PART:
                best = min(best, of_tile / parts + reached.product_seconds / 2 + parts * summing)
    return best


def _attention_rate(attention: Attention, device: Device, reached: Efficiencies) -> float:
    """Returns FLOP/s of ``attention``, where a causal mask halves the time of the same FLOPs."""
    compiled = next((width for width in HEAD_WIDTHS if width >= attention.width), attention.width)
    keys = attention.keys * (CAUSAL_KEYS if attention.causal else 1.0)
    share = reached.attention / reached.product * HEAD_WIDTHS.get(compiled, HEAD_WIDTHS[256])
    half_at = (reached.cudnn_keys if attention.kernel is AttentionKernel.CUDNN else None) or reached.keys
    share *= attention.width / compiled * keys / (keys + half_at)
    share *= reached.older_attention if attention.kernel is AttentionKernel.AMPERE else 1.0
    share *= ATTENTION_BACKWARD if attention.backward else 1.0
    return device.flops_per_second * share * (2 if attention.causal else 1)
