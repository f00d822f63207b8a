"""The rates of a device by its data sheet or as measured, the work of ops, and the seconds of an op from both.

    seconds  =  launch  +  max(FLOPs, memory traffic, other arithmetic)

It is the roofline model (Williams, Waterman, Patterson, CACM 2009). A matrix product of a card runs in waves: one tile of the
result per multiprocessor at a time, and the last wave takes as long as the others. The library chooses the best of a few
tiles, and divides long inner sides among multiprocessors that would be idle. Attention reaches more of the card's rate with
more keys per query.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoremat.basics.codec import Codec, plain
from autoremat.planner.cost.datasheets import (
    ATTENTION_BACKWARD,
    DOUBLE_SHARE,
    FEW_DOUBLES,
    FEW_DOUBLES_BY_NAME,
    FEW_LANES,
    FIRST_BFLOAT16,
    FIRST_FLOAT8,
    FLOAT8_TYPES,
    LANES,
    SPECIAL_UNITS,
    TF32,
    UNKNOWN_GPU,
    Efficiencies,
    datasheet,
    datasheet_name,
    efficiencies,
)

CPU_FLOPS_PER_CORE = 48e9
"""float32 FLOP/s: two 8-wide fused multiply-add units at about 3 GHz, halved for the rate of real kernels."""

CPU_BYTES_PER_SECOND_PER_CORE = 6e9
CPU_MAX_BYTES_PER_SECOND = 100e9

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


class Rate(enum.Enum):
    """Classes of ops by what limits them."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution_backward"
    GATHER = "gather"
    CHEAP = "cheap"
    """Additions, multiplications, comparisons."""
    DIVISION = "division"
    """Quotients and square roots."""
    EXPONENTIAL = "exponential"
    """Also logarithms, sigmoids, hyperbolic tangents, and what normalises."""
    SPECIAL = "special"
    """Error functions and powers."""
    RANDOM = "random"


SPECIALS = {Rate.CHEAP: 0.1, Rate.DIVISION: 0.5, Rate.EXPONENTIAL: 2.2, Rate.SPECIAL: 3.5, Rate.RANDOM: 13.4}
"""Time of an element's arithmetic, as a multiple of that of one result of the special function units.

Measured on an H100 (`benchmarks/gpu_rates.py`): a multiplication and an addition 0.1, rsqrt (which counts twice) 1.0, exp 1.4,
sigmoid 2.0, tanh 2.2, log 3.8, erf 4.1, a random number by Philox 13.4."""


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


@dataclass(frozen=True)
class Work:
    """What one op does."""

    flops: float = 0.0
    dtype: str = "float32"
    """The type of the operands of ``flops``."""
    moved_bytes: float = 0.0
    specials: float = 0.0
    """Results of special function units that take as long as its other arithmetic."""
    launches: bool = False
    """True if the op is a kernel of its own, which costs a launch."""
    shapes: tuple[Product, ...] | Attention = ()
    """The matrix products of a library kernel, or its attention."""


@dataclass(frozen=True)
class Rates:
    """What a device was measured to reach. Raises ``ValueError`` for impossible figures."""

    launch_seconds: float
    bytes_per_second: float
    flops_by_type: tuple[tuple[str, float], ...]
    """FLOP/s of matrix products by the element type of their operands, float32 among them."""

    def __post_init__(self) -> None:
        by_type = dict(self.flops_by_type)
        figures = (self.launch_seconds, self.bytes_per_second, *by_type.values())
        if "float32" not in by_type or not all(0 < figure < math.inf for figure in figures):
            raise ValueError(f"{self} are no rates: all must be finite and above 0, that of float32 among them")

    def to_json(self) -> str:
        """Returns the rates as JSON; :meth:`from_json` reads it back."""
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Returns the rates that :meth:`to_json` wrote. Raises ``ValueError`` or ``TypeError`` on anything else."""
        found: Rates = Codec().read(cls, json.loads(text))
        return found


@dataclass(frozen=True)
class Device:
    """The attainable rates of one device, per second."""

    name: str
    flops_per_second: float
    """FLOP/s of matrix products, in float32 unless :meth:`of_type` names another type."""
    bytes_per_second: float
    allocation_bytes: int = 1
    """Granularity of the allocator in bytes (512 for CUDA's caching allocator)."""
    multiprocessors: int = 1
    efficiencies: Efficiencies | None = None
    """What kernels reach of a card by name. None where large kernels' rates are all that is known."""
    flops_by_type: Mapping[str, float] = field(default_factory=dict, hash=False)
    """FLOP/s of matrix products by the element type of their operands, where the rates differ."""
    specials_per_second: float = 0.0
    """Results of the units for exponentials, reciprocals and the like; 0 if unknown."""
    write_share: float = 0.5
    """Share of the seconds to write and read a byte that the write takes."""
    overlaps_wholly: bool = True
    """True if a fused kernel takes only the longer of its arithmetic and its traffic."""
    launch_seconds: float = 0.0
    """Seconds of a kernel that does nothing."""

    def of_type(self, dtype: str) -> Device:
        """Returns the device with the rate of matrix products of ``dtype``: a name of torch's, or :data:`TF32`."""
        return replace(self, flops_per_second=self.flops_by_type.get(dtype, self.flops_per_second))

    def with_rates(self, rates: Rates) -> Device:
        """Returns the device with measured rates in place of those of its data sheet."""
        by_type = dict(rates.flops_by_type)
        single = by_type["float32"]  # torch's setting decides on TF32, here and in the measurement
        by_type = {**self.flops_by_type, **by_type, TF32: single}
        return replace(
            self, flops_per_second=single, bytes_per_second=rates.bytes_per_second, flops_by_type=by_type,
            launch_seconds=rates.launch_seconds,
        )  # fmt: skip

    @property
    def saving_seconds_per_byte(self) -> float:
        """Seconds to write one byte in the forward and to read it in the backward."""
        return 2.0 / self.bytes_per_second

    def seconds(self, work: Work) -> float:
        """Returns the seconds of one op: the longest of its FLOPs, its traffic and its other arithmetic, and a launch."""
        device = self.of_type(work.dtype) if work.flops else self
        arithmetic = work.specials / self.specials_per_second if self.specials_per_second else 0.0
        if work.launches:
            seconds = device.kernel_seconds(work.flops, work.moved_bytes, work.shapes)
            return max(seconds, self.launch_seconds + arithmetic)
        return max(work.flops / device.flops_per_second, work.moved_bytes / self.bytes_per_second, arithmetic)

    def kernel_seconds(self, flops: float, bytes_moved: float, shapes: tuple[Product, ...] | Attention = ()) -> float:
        """Returns the seconds of a library kernel, or of one kernel for each of several products.

        Without efficiencies of the device, they are the larger of the seconds of ``flops`` and of ``bytes_moved``.
        """
        reached, traffic = self.efficiencies, bytes_moved / self.bytes_per_second
        if reached is None or not shapes:
            return self.launch_seconds + max(flops / self.flops_per_second, traffic)
        if isinstance(shapes, Attention):
            return self.launch_seconds + max(flops / _attention_rate(shapes, self, reached), traffic)
        waves = sum(_seconds_of_waves(product, self, reached) for product in shapes)
        return len(shapes) * reached.product_seconds + max(waves, traffic * reached.stream / reached.operands)


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


def cuda_device(name: str) -> Device:
    """Returns the rates of the CUDA device ``name``.

    An unknown device gets the rates of a middling card.
    """
    sheet, reached = datasheet(name) or UNKNOWN_GPU, efficiencies(name)
    single, half = sheet.single_flops * reached.single, sheet.half_flops * reached.product
    few = datasheet_name(name) in FEW_DOUBLES_BY_NAME
    by_type = {
        "float64": single * (FEW_DOUBLES if few else DOUBLE_SHARE.get(sheet.capability, FEW_DOUBLES)),
        "float16": half,
        "bfloat16": half if sheet.capability >= FIRST_BFLOAT16 else single,
        TF32: max(single, sheet.tf32_flops * reached.product),
    }
    if sheet.capability >= FIRST_FLOAT8:
        by_type |= dict.fromkeys(FLOAT8_TYPES, 2 * half * reached.float8)
    specials = SPECIAL_UNITS * sheet.single_flops / (2 * FEW_LANES.get(sheet.capability, LANES))  # the clock is that of lanes
    return Device(
        name, single, sheet.bandwidth * reached.stream, allocation_bytes=512, multiprocessors=sheet.multiprocessors,
        efficiencies=reached, flops_by_type=by_type, specials_per_second=specials, launch_seconds=reached.launch_seconds,
    )  # fmt: skip


def cpu_device(threads: int) -> Device:
    """Returns the rates of ``threads`` CPU cores.

    A core reads a line of memory into its cache before it writes the line, so a write moves a byte twice. It has few
    instructions in flight, so the shorter of arithmetic and traffic is hidden in part only.
    """
    bandwidth = min(threads * CPU_BYTES_PER_SECOND_PER_CORE, CPU_MAX_BYTES_PER_SECOND)
    return Device("cpu", threads * CPU_FLOPS_PER_CORE, bandwidth, write_share=2 / 3, overlaps_wholly=False)


@dataclass(frozen=True)
class Pricing:
    """The cost model of a graph, and the share of each cost source in the step's predicted seconds."""

    cost_model: str
    calibrated_share: float
    """Measured rates of the device, and given rates of a process group."""
    assumed_share: float
    """Data sheets."""
    interconnect: str = ""
    """The rates of the process groups with their origins, as text; empty if no op communicates."""
