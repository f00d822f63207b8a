"""Defines the measured rates of a device, and computes the seconds of an op from them.

Needs no torch and no clock.

The work of an op is a few :class:`Task`: FLOPs of one kind, bytes moved in one way, or elements of one class of arithmetic. The
tasks of an op overlap, so the slowest counts (the roofline model). An extern kernel adds the time of a launch.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoremat.basics.codec import Codec
from autoremat.planner.cost.datasheets import FLOAT8_TYPES

CODEC = Codec()

BYTES_OF_SAVING = 256 * 2**20
"""Bytes of the stream whose rate prices saved tensors: more than caches hold."""

BATCH = 32
"""Number of small matrix products in one measured batch."""


class Rate(str, enum.Enum):
    """Kinds of work that can limit an op. The comment beside each kind gives the unit of its amount."""

    MATMUL = "matmul"  # FLOPs
    BATCHED_MATMUL = "batched_matmul"  # FLOPs of BATCH products
    ATTENTION = "attention"  # FLOPs
    ATTENTION_BACKWARD = "attention_backward"
    CONVOLUTION = "convolution"  # FLOPs; 3x3 and larger
    CONVOLUTION_BACKWARD = "convolution_backward"
    POINT_CONVOLUTION = "point_convolution"  # 1x1
    POINT_CONVOLUTION_BACKWARD = "point_convolution_backward"
    DEPTHWISE_CONVOLUTION = "depthwise_convolution"
    DEPTHWISE_CONVOLUTION_BACKWARD = "depthwise_convolution_backward"
    STREAM = "stream"  # bytes read or written in order
    GATHER = "gather"  # bytes read by index
    SCATTER = "scatter"  # bytes added to by index
    CHEAP = "cheap"  # elements, of one op in a chain of fused ones: add, multiply, compare
    DIVISION = "division"  # elements: quotients, square roots
    EXPONENTIAL = "exponential"  # elements: exp, log, sigmoid
    TANH = "tanh"  # elements
    SPECIAL = "special"  # elements: erf, powers
    LAYOUT = "layout"  # elements, of a copy with another dense dimension, as to channels-last
    RANDOM = "random"  # elements
    REDUCTION = "reduction"  # elements read: sum, maximum
    NORMALISATION = "normalisation"  # elements read: softmax, layer norm
    SORT = "sort"  # elements
    SCAN = "scan"  # elements
    WINDOW = "window"  # elements: pooling, interpolation


FLOP_RATES = frozenset(
    {
        Rate.MATMUL, Rate.BATCHED_MATMUL, Rate.ATTENTION, Rate.ATTENTION_BACKWARD, Rate.CONVOLUTION, Rate.CONVOLUTION_BACKWARD,
        Rate.POINT_CONVOLUTION, Rate.POINT_CONVOLUTION_BACKWARD, Rate.DEPTHWISE_CONVOLUTION,
        Rate.DEPTHWISE_CONVOLUTION_BACKWARD,
    }
)  # fmt: skip
"""Rates that count FLOPs and depend on the element type. All others are measured with 32-bit floats."""

BYTE_RATES = frozenset({Rate.STREAM, Rate.GATHER, Rate.SCATTER})
"""Rates whose amounts are bytes."""

SUBSTITUTES: Mapping[str, tuple[str, ...]] = {
    "float16": ("bfloat16",),
    "bfloat16": ("float16",),
    **dict.fromkeys(FLOAT8_TYPES, ("bfloat16", "float16")),
}
"""Types whose rates replace those of a type that was not measured. The last resort is float32."""

DOUBLE_SLOWDOWN = 2.0
"""Lower bound for the slowdown of 64-bit arithmetic against 32-bit."""


LARGEST_FIGURE = 1e30
"""Above this, and below its inverse, a figure is no time and no amount of work. Products of such figures could overflow."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of an amount of work, through measured points.

    Linear on logarithmic axes between two points, proportional before the first and after the last. Raises ``ValueError``
    unless all figures are finite and positive, amounts ascend and seconds never fall.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        figures = [x for point in self.points for x in point]
        if not figures or not all(1 / LARGEST_FIGURE <= x <= LARGEST_FIGURE for x in figures):
            raise ValueError(f"a curve needs finite points above 0, not {self.points}")
        amounts, seconds = zip(*self.points, strict=True)
        if sorted(set(amounts)) != list(amounts) or sorted(seconds) != list(seconds):
            raise ValueError(f"amounts must grow and seconds must not fall along a curve: {self.points}")

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Returns the curve through measured points, given in any order.

        Where more work took less time, the longer time counts.
        """
        rising: dict[float, float] = {}
        longest = 0.0
        for amount, seconds in sorted(points):
            longest = max(longest, seconds)
            rising[amount] = longest
        return cls(tuple(rising.items()))

    def seconds(self, amount: float) -> float:
        """Returns the seconds for ``amount``; 0 only for 0."""
        above = bisect.bisect_left(self.points, (amount,))
        if above == 0 or above == len(self.points):
            known, seconds = self.points[max(above - 1, 0)]
            return seconds * (amount / known)
        (less, least), (more, most) = self.points[above - 1], self.points[above]
        share = math.log(amount / less) / math.log(more / less)
        return min(most, least * math.pow(most / least, share))


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
class Task:
    """``count`` times ``amount`` of one kind of work, on elements of type ``dtype`` if the rate depends on it."""

    rate: Rate
    amount: float
    dtype: str = "float32"
    count: float = 1.0


@dataclass(frozen=True)
class Work:
    """The tasks of one op."""

    tasks: tuple[Task, ...]
    launches: bool = False
    """True if the op is an extern kernel, which costs a launch."""
    shapes: tuple[Product, ...] | Attention = ()
    """The matrix products of a library kernel, or its attention."""
    known: bool = True
    """True if a rate was calibrated for the op's class. If False, its bytes are charged at the rate of reads by index."""


@dataclass(frozen=True)
class Rates:
    """The measured rates of one device.

    Keys of ``curves`` are rates, or rates with a type such as ``matmul.bfloat16``.

    Raises ``ValueError`` unless every rate has a curve (for float32 where it depends on the type), and for an impossible launch
    time.
    """

    device: str
    launch_seconds: float
    curves: Mapping[str, Curve] = field(hash=False)

    def __post_init__(self) -> None:
        if not 0 <= self.launch_seconds <= LARGEST_FIGURE:
            raise ValueError(f"launch_seconds={self.launch_seconds} is no time")
        missing = [rate.value for rate in Rate if curve_name(rate) not in self.curves]
        if missing:
            raise ValueError(f"no curve for {', '.join(missing)}")

    def seconds(self, work: Work) -> float:
        """Returns the seconds of one op: its slowest task, plus a launch for an extern kernel."""
        slowest = max((self._task_seconds(task) for task in work.tasks), default=0.0)
        return slowest + (self.launch_seconds if work.launches else 0.0)

    @property
    def saving_seconds_per_byte(self) -> float:
        """Seconds to write one byte in the forward and to read it in the backward."""
        return 2.0 * self.curves[curve_name(Rate.STREAM)].seconds(BYTES_OF_SAVING) / BYTES_OF_SAVING

    def _task_seconds(self, task: Task) -> float:
        names = (curve_name(task.rate, dtype) for dtype in (task.dtype, *SUBSTITUTES.get(task.dtype, ()), "float32"))
        curve = next(self.curves[name] for name in names if name in self.curves)
        return (DOUBLE_SLOWDOWN if task.dtype in ("float64", "complex128") else 1.0) * task.count * curve.seconds(task.amount)

    def to_json(self) -> str:
        """Returns the rates as JSON; :meth:`from_json` reads it back."""
        curves = {name: curve.points for name, curve in sorted(self.curves.items())}
        return json.dumps({"device": self.device, "launch_seconds": self.launch_seconds, "curves": curves}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Returns the rates that :meth:`to_json` wrote. Raises ``ValueError`` on anything else."""
        try:
            record: dict[str, Any] = json.loads(text)
            points = tuple[tuple[float, float], ...]
            curves = {str(name): Curve(CODEC.read(points, found)) for name, found in record["curves"].items()}
            launch_seconds = CODEC.read(float, record["launch_seconds"])
            return cls(CODEC.read(str, record["device"]), launch_seconds, curves)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not the rates of a device: {error}") from error

    @property
    def digest(self) -> str:
        """A hash of all figures. Plans that are made with these rates depend on it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def curve_name(rate: Rate, dtype: str = "float32") -> str:
    """Returns the key of a curve in :attr:`Rates.curves`."""
    return f"{rate.value}.{dtype}" if rate in FLOP_RATES else rate.value


@dataclass(frozen=True)
class Pricing:
    """The cost model of a graph, and the share of each cost source in the step's predicted seconds."""

    cost_model: str
    calibrated_share: float
    """Measured rates of the device, for ops of a calibrated class. Measured or given rates of a process group."""
    assumed_share: float
    """Data sheets, and ops of no calibrated class."""
    interconnect: str = ""
    """The rates of the process groups with their sources, as text; empty if no op communicates."""
