"""Seconds of single kernels on a CUDA device beside those that plans for this device by name assume.

`benchmarks/gpu.py` runs this script. Library kernels and copies are those of `card_rates.py`. The chains have no published
times: a backward kernel reads the saved result of some pointwise ops, or computes it again from their input. It takes the
time of its memory traffic, which is the same, or that of its arithmetic.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from gpu_rows import Line, Rows, Skipped, Unit, parser_of
from gpu_steps import in_turn, summary_of
from rich.table import Table
from torch.nn import functional as F

from autoremat.planner.cost.device import SPECIALS, Attention, AttentionKernel, Device, Product, Rate, Work, cuda_device
from autoremat.planner.cost.links import assumed_host_link

ROUNDS, LAUNCHES = 7, 20
"""Number of samples, and of launches in a sample. A CUDA graph holds these, so that no launch waits for the host."""

HALF = 2
"""Bytes of an element."""

PRODUCTS = (
    (64, 64, 64), (512, 512, 512), (1024, 1024, 256), (256, 4096, 256), (2048, 2048, 2048), (4096, 4096, 512),
    (8192, 1024, 1024), (8192, 8192, 8192), (4096, 14336, 4096), (16384, 4096, 4096),
)  # fmt: skip
"""Rows, columns and inner side."""

ATTENTIONS = ((8, 16, 1024, 64), (4, 32, 2048, 128), (1, 32, 8192, 128))
"""Batch, heads, tokens and width of a head."""

STREAMS = (2**10, 2**20, 2**24, 2**28)
"""Elements of each operand of a sum."""

COPIES = (2**20, 2**26, 2**29)
"""Bytes of a copy between host and device."""

LINKS, ELEMENTS = (1, 4, 16, 64), (2**20, 2**24, 2**27)
"""Lengths of chains of SiLU, and elements of their input."""

REPEATED: dict[str, tuple[Rate, Callable[[torch.Tensor], torch.Tensor]]] = {
    "multiply and add": (Rate.CHEAP, lambda x: x * 0.9 + 0.1),
    "exp": (Rate.EXPONENTIAL, lambda x: torch.exp(-x)),
    "log": (Rate.EXPONENTIAL, lambda x: torch.log(x.abs() + 1)),
    "division": (Rate.DIVISION, lambda x: 1.0 / (x.abs() + 1)),
    "sigmoid": (Rate.EXPONENTIAL, torch.sigmoid),
    "tanh": (Rate.EXPONENTIAL, torch.tanh),
    "erf": (Rate.SPECIAL, torch.erf),
    "sin": (Rate.EXPONENTIAL, torch.sin),
    "dropout": (Rate.RANDOM, lambda x: F.dropout(x, 0.1)),
}
"""Arithmetic of which a kernel repeats so much that it takes longer than the memory traffic."""

REPEATED_LINKS, REPEATED_ELEMENTS = (16, 64), 2**24

TINY_PRODUCTS, TINY_ATTENTIONS, TINY = ((32, 32, 32),), ((1, 2, 32, 16),), (2**10,)
"""Those of a rehearsal."""


@dataclass(frozen=True)
class Case:
    """One kernel, or one copy in each of some directions."""

    name: str
    run: Callable[[], Any]
    predicted: float
    """Seconds."""
    in_graph: bool = True


def device() -> Device:
    return cuda_device(torch.cuda.get_device_name()).of_type("bfloat16")


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


def products(rehearsed: bool) -> Iterator[Case]:
    for m, n, k in TINY_PRODUCTS if rehearsed else PRODUCTS:
        predicted = device().kernel_seconds(2 * m * n * k, HALF * (m * k + k * n + m * n), (Product(m, n, k),))
        yield Case(f"{m} x {n} x {k}", functools.partial(torch.mm, random(m, k), random(k, n)), predicted)


def attentions(rehearsed: bool, backward: bool) -> Iterator[Case]:
    """Yields fused attention, whole and causal, or its backward: five products instead of two."""
    kernel = AttentionKernel.CUDNN  # which torch chooses on Hopper and later
    for batch, heads, tokens, width in TINY_ATTENTIONS if rehearsed else ATTENTIONS:
        flops, moved = 4 * batch * heads * tokens**2 * width, 4 * HALF * batch * heads * tokens * width
        for causal in (False, True):
            operands = [random(batch, heads, tokens, width).requires_grad_(backward) for _ in range(3)]
            run = functools.partial(F.scaled_dot_product_attention, *operands, is_causal=causal)
            if backward:
                out = run()
                run = functools.partial(torch.autograd.grad, out, operands, torch.ones_like(out), retain_graph=True)
            shape = Attention(width, tokens, causal, backward, kernel)
            predicted = device().kernel_seconds(flops * 5 // 2 if backward else flops, moved * (1 + backward), shape)
            # Autograd runs on the stream of the forward, which no graph can record.
            yield Case(f"{batch} x {heads} x {tokens} x {width}{', causal' * causal}", run, predicted, in_graph=not backward)


def streams(rehearsed: bool) -> Iterator[Case]:
    for count in TINY if rehearsed else STREAMS:
        a, b, out = (random(count) for _ in range(3))
        yield Case(
            f"{count} elements", functools.partial(torch.add, a, b, out=out), device().kernel_seconds(0, 3 * HALF * count)
        )


def copies(rehearsed: bool) -> Iterator[Case]:
    """Yields copies to the host and from it."""
    link = assumed_host_link(torch.cuda.get_device_name())
    if link is None:
        raise Skipped("the device shares the memory of its host")
    for count in TINY if rehearsed else COPIES:
        here, there = (torch.empty(count, dtype=torch.uint8, device="cuda") for _ in range(2))
        out, back = (torch.empty(count, dtype=torch.uint8, pin_memory=not rehearsed) for _ in range(2))
        store, load = (
            functools.partial(out.copy_, here, non_blocking=True),
            functools.partial(there.copy_, back, non_blocking=True),
        )
        seconds = count / link.to_host, count / link.from_host
        yield Case(f"{count} bytes to the host", store, seconds[0], in_graph=False)
        yield Case(f"{count} bytes from the host", load, seconds[1], in_graph=False)


def with_chain(gradient: torch.Tensor, x: torch.Tensor, links: int) -> torch.Tensor:
    """Returns the gradient times the chain of ``x``."""
    for _ in range(links):
        x = F.silu(x)
    return gradient * x


def predicted_chain(rate: Rate, count: int, links: int) -> float:
    """Returns the predicted seconds of a kernel that reads two tensors, repeats an op on one and writes one."""
    work = Work(specials=SPECIALS[rate] * count * links)
    return max(device().kernel_seconds(0, 3 * HALF * count), device().seconds(work))


def chains(rehearsed: bool) -> Iterator[Case]:
    """Yields, for each size, one kernel that reads the chain's result and those that compute it again."""
    fused = torch.compile(with_chain, dynamic=False)
    for count in TINY if rehearsed else ELEMENTS:
        gradient, x = random(count), random(count)
        for links in (0, *(LINKS[:1] if rehearsed else LINKS)):
            predicted = predicted_chain(Rate.EXPONENTIAL, count, links)
            name = f"{count} elements, {f'chain of {links} again' if links else 'saved'}"
            yield Case(name, functools.partial(fused, gradient, x, links), predicted)


def repeated(gradient: torch.Tensor, x: torch.Tensor, name: str, links: int) -> torch.Tensor:
    """Returns the gradient times so many repetitions of an op of ``x``."""
    for _ in range(links):
        x = REPEATED[name][1](x)
    return gradient * x


def repetitions(rehearsed: bool) -> Iterator[Case]:
    """Yields kernels of two lengths for each op. The difference is the time of the arithmetic."""
    fused = torch.compile(repeated, dynamic=False)
    count = TINY[0] if rehearsed else REPEATED_ELEMENTS
    gradient, x = random(count), random(count)
    for name, (rate, _) in list(REPEATED.items())[: 1 if rehearsed else None]:
        for links in REPEATED_LINKS[: 1 if rehearsed else None]:
            # Seeds are drawn by a kernel of their own, on the host's request.
            run = functools.partial(fused, gradient, x, name, links)
            predicted = predicted_chain(rate, count, links)
            yield Case(f"{count} elements, {links} times {name}", run, predicted, in_graph=name != "dropout")


KINDS: Mapping[str, Callable[[bool], Iterator[Case]]] = {
    "products": products,
    "attention": functools.partial(attentions, backward=False),
    "attention backward": functools.partial(attentions, backward=True),
    "sums": streams,
    "host link": copies,
    "chains": chains,
    "arithmetic": repetitions,
}


def seconds_of(case: Case, rehearsed: bool) -> float:
    """Returns the median seconds of one launch. The emulated card replays no graph."""
    case.run()
    if rehearsed or not case.in_graph:
        return _median({case.name: case.run}, 1 if rehearsed else ROUNDS, 1 if rehearsed else LAUNCHES)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            case.run()
    return _median({case.name: graph.replay}, ROUNDS, 1) / LAUNCHES


def _median(step: Mapping[str, Callable[[], Any]], rounds: int, repeats: int) -> float:
    (samples,) = in_turn(step, rounds, repeats).values()
    return summary_of(samples).median


def measured(kind: str, rehearsed: bool) -> Line:
    """Returns the row of one kind: each case with its measured and its predicted seconds."""
    cases = KINDS[kind](rehearsed)  # one after the other: the largest ones take much of the device
    return {
        "kind": kind,
        "cases": [{"case": one.name, "measured": seconds_of(one, rehearsed), "predicted": one.predicted} for one in cases],
    }


def table_of(rows: Sequence[Line]) -> Table:
    """Returns the cases of all kinds, in microseconds."""
    table = Table(title="Seconds of kernels by name and measured, in microseconds")
    for column in ("kind", "case"):
        table.add_column(column, no_wrap=True)
    for column in ("measured", "predicted", "predicted to measured"):
        table.add_column(column, justify="right")
    for row in rows:
        for case in row["cases"]:
            times = [1e6 * case[key] for key in ("measured", "predicted")]
            table.add_row(row["kind"], case["case"], *(f"{time:.1f}" for time in times), f"{times[1] / times[0]:.2f}")
    return table


def verdict(rows: Sequence[Line]) -> str:
    ratios = {row["kind"]: [case["predicted"] / case["measured"] for case in row["cases"]] for row in rows}
    return "predicted to measured, median: " + ", ".join(
        f"{kind} {statistics.median(found):.2f}" for kind, found in ratios.items()
    )


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    dynamo_config.recompile_limit = 1000  # each size and length of a chain is compiled by itself
    units = [Unit(kind, functools.partial(measured, kind, arguments.rehearse)) for kind in KINDS]
    Rows(arguments.rows).run("rates", units, arguments.until, arguments.units)


if __name__ == "__main__":
    main()
