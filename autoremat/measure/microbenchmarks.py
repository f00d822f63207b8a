"""The recipes of a calibration: for each rate and type, one typical op at a few sizes.

Dense kernels, and kernels that Inductor calls from a library, run eagerly. Fused arithmetic runs as Inductor compiles it,
because Inductor's code differs from the library's, for example for tanh and random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F

from autoremat.basics.progress import status_if_slow
from autoremat.planner.cost.rates import BATCH, Rate
from autoremat.torch_private import compilers

aten = torch.ops.aten

VERSION = 3
"""Number of the recipes, which rises if one of them measures something else. Stored rates have that of their recipes."""

Run = Callable[[], object]
Sized = tuple[float, Run]
"""An amount of work, and a function that does it: FLOPs of dense kernels, bytes of streams and indexed accesses, elements."""

Function = Callable[[torch.Tensor], torch.Tensor]
"""A function to compile."""

Compile = Callable[[Function, torch.Tensor], Run]


@dataclass(frozen=True)
class Place:
    """The device and the element type of a run."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    def random(self, *shape: int) -> torch.Tensor:
        """Returns normally distributed numbers of the element type."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def indices(self, count: int, below: int) -> torch.Tensor:
        """Returns ``count`` random integers from 0 to ``below``, which is not among them."""
        return torch.randint(below, (count,), device=self.device)


@dataclass(frozen=True)
class Recipe:
    """The measurement of one curve: ``prepare(place, size)`` for each of ``sizes``, smallest first."""

    rate: Rate
    sizes: tuple[int, ...]
    prepare: Callable[[Place, int], Sized]
    dtype: torch.dtype = torch.float32


def matmul(place: Place, side: int) -> Sized:
    left, right = place.random(side, side), place.random(side, side)
    return 2.0 * side**3, lambda: left @ right


def batched_matmul(place: Place, side: int) -> Sized:
    left, right = place.random(BATCH, side, side), place.random(BATCH, side, side)
    return 2.0 * side**3 * BATCH, lambda: torch.bmm(left, right)


HEADS, HEAD_WIDTH = 8, 64


def attention(place: Place, length: int) -> Sized:
    query, key, value = (place.random(1, HEADS, length, HEAD_WIDTH) for _ in range(3))
    return 4.0 * HEADS * HEAD_WIDTH * length**2, lambda: F.scaled_dot_product_attention(query, key, value)


def attention_backward(place: Place, length: int) -> Sized:
    query, key, value = tensors = [place.random(1, HEADS, length, HEAD_WIDTH).requires_grad_() for _ in range(3)]
    with torch.enable_grad():
        result = F.scaled_dot_product_attention(query, key, value)
    gradient = torch.ones_like(result)
    return (
        10.0 * HEADS * HEAD_WIDTH * length**2,
        lambda: torch.autograd.grad(result, tensors, gradient, retain_graph=True),
    )


IMAGES, IMAGE_SIDE = 8, 28


def convolution(kernel: int, depthwise: bool, backward: bool) -> Callable[[Place, int], Sized]:
    """Returns the recipe of a convolution that keeps the image's size. The recipe's size is the number of channels."""

    def prepare(place: Place, channels: int) -> Sized:
        groups, padding = channels if depthwise else 1, kernel // 2
        image = place.random(IMAGES, channels, IMAGE_SIDE, IMAGE_SIDE)
        weight = place.random(channels, channels // groups, kernel, kernel)
        geometry = ([1, 1], [padding, padding], [1, 1], False, [0, 0], groups)
        flops = 2.0 * IMAGES * IMAGE_SIDE**2 * channels * (channels // groups) * kernel**2
        if not backward:
            return flops, lambda: aten.convolution(image, weight, None, *geometry)
        wanted = [True, True, False]
        return 2 * flops, lambda: aten.convolution_backward(image, image, weight, None, *geometry, wanted)

    return prepare


def stream(place: Place, count: int) -> Sized:
    left, right, out = place.random(count), place.random(count), place.random(count)
    return 12.0 * count, lambda: torch.add(left, right, out=out)


ROW = 128
"""The number of elements in a row that an index selects."""


def gather(place: Place, rows: int) -> Sized:
    table, index = place.random(rows, ROW), place.indices(rows, rows)
    return 8.0 * rows * ROW + 8 * rows, lambda: F.embedding(index, table)


def scatter(place: Place, rows: int) -> Sized:
    table, added, index = place.random(rows, ROW), place.random(rows, ROW), place.indices(rows, rows)
    return 12.0 * rows * ROW + 8 * rows, lambda: aten.index_put(table, [index], added, True)


def sort(place: Place, count: int) -> Sized:
    tensor = place.random(count)
    return float(count), lambda: torch.sort(tensor)


def scan(place: Place, rows: int) -> Sized:
    tensor = place.random(rows, ROW)
    return float(rows * ROW), lambda: torch.cumsum(tensor, 0)


def window(place: Place, channels: int) -> Sized:
    image = place.random(IMAGES, channels, 2 * IMAGE_SIDE, 2 * IMAGE_SIDE)
    return float(image.numel()), lambda: aten.max_pool2d_with_indices(image, [2, 2], [2, 2])


def in_turn(function: Function, times: int) -> Function:
    """Returns ``function`` applied to its own result, ``times`` in all."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = function(x)
        return x

    return apply


def added(function: Callable[[torch.Tensor, float], torch.Tensor], times: int) -> Function:
    """Returns the sum of ``function(x, number)`` over ``times`` numbers up to 1.

    Larger ones would make arguments that activations seldom have, and intermediate results so small that they take longer.
    """
    return lambda x: functools.reduce(torch.add, (function(x, number / times) for number in range(1, times + 1)))


@dataclass(frozen=True)
class Arithmetic:
    """A function whose compiled kernel does one kind of arithmetic, ``times`` for each element that it reads."""

    function: Function
    times: int = 1


def as_weights(x: torch.Tensor, channels: int = 32) -> torch.Tensor:
    """Returns as many elements of ``x`` as fill weights of 3x3 convolutions of so many channels: nearly all."""
    each = channels * 9
    return x.view(-1)[: x.numel() // each * each].view(-1, channels, 3, 3)


FUSED = {
    Rate.CHEAP: Arithmetic(in_turn(lambda x: x * 0.5 + 1.0, 8), 16),
    Rate.DIVISION: Arithmetic(added(lambda x, number: number / (x + number), 8), 8),
    Rate.EXPONENTIAL: Arithmetic(added(lambda x, number: torch.exp(x * number), 4), 4),
    Rate.TANH: Arithmetic(added(lambda x, number: torch.tanh(x * number), 4), 4),
    Rate.SPECIAL: Arithmetic(added(lambda x, number: torch.erf(x * number), 4), 4),
    Rate.LAYOUT: Arithmetic(lambda x: as_weights(x).contiguous(memory_format=torch.channels_last)),
    Rate.RANDOM: Arithmetic(torch.rand_like),
    Rate.REDUCTION: Arithmetic(added(lambda x, number: (x * number).sum(-1), 8), 8),
    Rate.NORMALISATION: Arithmetic(lambda x: torch.softmax(x, -1)),
}
"""The compiled functions of each rate. A kernel of one cheap op would show its traffic, so a kernel does many. Costly functions
run beside each other, because in a chain each would wait for the result of the one before."""


def fused(arithmetic: Arithmetic, compile_: Compile) -> Callable[[Place, int], Sized]:
    """Returns the recipe of compiled arithmetic on rows, which is compiled once."""

    @functools.cache
    def prepare(place: Place, rows: int) -> Sized:
        tensor = place.random(rows, ROW)
        return float(rows * ROW * arithmetic.times), compile_(arithmetic.function, tensor)

    return prepare


FUSED_ROWS = {"cpu": 4096, "cuda": 2**18}
"""Rows of compiled arithmetic, so many that it takes longer than a call."""

DENSE: dict[Rate, tuple[tuple[int, ...], Callable[[Place, int], Sized]]] = {
    Rate.MATMUL: ((32, 128, 512, 1024, 4096), matmul),
    Rate.BATCHED_MATMUL: ((16, 64, 256, 1024), batched_matmul),
    Rate.ATTENTION: ((64, 256, 1024, 4096), attention),
    Rate.ATTENTION_BACKWARD: ((64, 256, 1024, 4096), attention_backward),
    Rate.CONVOLUTION: ((4, 32, 128, 512), convolution(3, False, False)),
    Rate.CONVOLUTION_BACKWARD: ((4, 32, 128, 512), convolution(3, False, True)),
    Rate.POINT_CONVOLUTION: ((8, 64, 256, 1024), convolution(1, False, False)),
    Rate.POINT_CONVOLUTION_BACKWARD: ((8, 64, 256, 1024), convolution(1, False, True)),
    Rate.DEPTHWISE_CONVOLUTION: ((8, 64, 512), convolution(3, True, False)),
    Rate.DEPTHWISE_CONVOLUTION_BACKWARD: ((8, 64, 512), convolution(3, True, True)),
}

MEMORY: dict[Rate, tuple[tuple[int, ...], Callable[[Place, int], Sized]]] = {
    Rate.STREAM: ((2**12, 2**16, 2**20, 2**24), stream),
    Rate.GATHER: ((2**6, 2**10, 2**14, 2**17), gather),
    Rate.SCATTER: ((2**6, 2**10, 2**14, 2**17), scatter),
    Rate.SORT: ((2**10, 2**14, 2**18), sort),
    Rate.SCAN: ((2**4, 2**9, 2**14), scan),
    Rate.WINDOW: ((4, 64), window),
}


def recipes(device: torch.device, compile_: Compile) -> Iterator[Recipe]:
    """Yields all recipes of a calibration of ``device``, those that most steps need first: the time may not suffice for all."""
    halves = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    first = (Rate.MATMUL, Rate.BATCHED_MATMUL, Rate.ATTENTION, Rate.ATTENTION_BACKWARD)
    eager = {**{rate: DENSE[rate] for rate in first}, **MEMORY}
    for rate, (sizes, prepare) in eager.items():
        yield Recipe(rate, sizes, prepare)
    for rate, arithmetic in FUSED.items():
        yield Recipe(rate, (FUSED_ROWS[device.type],), fused(arithmetic, compile_))
    for rate in (rate for rate in DENSE if rate not in first):
        yield Recipe(rate, *DENSE[rate])
    for rate, (sizes, prepare) in DENSE.items():
        for dtype in halves:
            yield Recipe(rate, sizes, prepare, dtype)


def compiled(function: Function, tensor: torch.Tensor) -> Run:
    """Returns a call of ``function(tensor)`` as Inductor compiles it, or uncompiled if Inductor cannot compile."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (function(x),)

    module = fx.symbolic_trace(Module())
    try:
        with status_if_slow("", shown=False):  # the user sees the progress of the calibration
            call = compilers.compile_with_inductor(module, [tensor], {})
        call(tensor)
    except RuntimeError:  # the base class of all of Inductor's errors
        return lambda: function(tensor)
    return lambda: call(tensor)
