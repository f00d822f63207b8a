"""Published kernel times against the rates of cards by name.

    python benchmarks/card_rates.py

Prints predicted over measured time, its median and its 10th and 90th percentile, by class of kernel and card: before the rates
knew shapes and types (0.7 of the 16-bit FLOPs, causal or not, 0.8 of the bandwidth, 20 µs per collective), and now. The
sources, and which rows were fitted, are in `tests/data/kernel_times/README.md`.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness import ROOT, parser, table, write

from autoremat.planner.cost.datasheets import datasheet
from autoremat.planner.cost.device import SPECIALS, Attention, AttentionKernel, Device, Product, Rate, Work, cuda_device
from autoremat.planner.cost.links import NVLINK, Pattern, assumed_host_link, assumed_interconnect, sent_bytes, steps_of

TIMES = ROOT / "tests" / "data" / "kernel_times"
FITTED = {
    "products": {"A100", "H100", "B200", "L40S", "RTX PRO 6000"},
    "products_float8": {"H100", "B200", "L40S", "RTX PRO 6000"},
    "products_by_type": {"RTX 4090", "RTX PRO 6000", "H200 NVL"},
    "attention": {"A100", "H100", "B200", "B300", "L40S", "RTX PRO 6000"},
    "attention_cudnn": {"H100"},
    "arithmetic": {"H100"},
    "collectives": {"A100", "H100", "B200", "RTX PRO 6000"},
    "streams": {"A100", "H100", "A40"},
}
"""Cards whose rows were fitted, by file."""

HALVED = {"products", "products_float8", "attention"}
"""Files of which only the even rows were fitted."""

HALF = 2
"""Bytes of an element."""

LARGEST_CACHE = 50e6
"""Bytes of the H100's L2 cache, the largest of the cards with times of streams."""


@dataclass(frozen=True)
class Comparison:
    """One measured kernel with two predictions, in seconds."""

    kind: str
    card: str
    split: str
    measured: float
    before: float
    now: float


@dataclass(frozen=True)
class Score:
    """Predicted over measured times of one class on one card."""

    kind: str
    card: str
    split: str
    rows: int
    median_before: float
    error_before: float
    median: float
    tenth: float
    ninetieth: float
    error: float
    """Median of the absolute relative error."""


Row = dict[str, str]
Predictions = tuple[str, float, float]
"""The class of a row, and its seconds before and now."""


def before(card: str, flops: float, moved: float) -> float:
    """Returns the seconds by the shares of large kernels alone."""
    sheet = datasheet(card)
    assert sheet is not None
    return max(flops / (0.7 * sheet.half_flops), moved / (0.8 * sheet.bandwidth))


def product(row: Row) -> Predictions:
    m, n, k = (int(row[side]) for side in "mnk")
    flops, moved = 2 * m * n * k, HALF * (m * k + k * n + m * n)
    kind = "products below 1 GFLOP" if flops < 1e9 else "products to 100 GFLOP" if flops < 1e11 else "products above"
    now = card_of(row).kernel_seconds(flops, moved, (Product(m, n, k),))
    return kind, before(row["card"], flops, moved), now


def product_float8(row: Row) -> Predictions:
    m, n, k = (int(row[side]) for side in "mnk")
    flops, moved = 2 * m * n * k, m * k + k * n + HALF * m * n
    kind = "float8 products to 100 GFLOP" if flops < 1e11 else "float8 products above"
    now = card_of(row, "float8_e4m3fn").kernel_seconds(flops, moved, (Product(m, n, k),))
    return kind, before(row["card"], flops, moved), now


def product_of_type(row: Row) -> Predictions:
    """Predicts float32, and the time of other types beside that of bfloat16.

    Constant operands let tensor cores run faster than in a step.
    """
    side = int(row["side"])
    shape, flops, moved = (Product(side, side, side),), 2 * side**3, 3 * HALF * side**2
    mine, half = (card_of(row, dtype).kernel_seconds(flops, moved, shape) for dtype in (row["type"], "bfloat16"))
    if row["type"] == "float32":
        return "float32 products", before(row["card"], flops, moved), mine
    measured = float(row["bfloat16_microseconds"]) / 1e6
    return f"{row['type']} beside bfloat16", measured, measured * mine / half


def card_of(row: Row, dtype: str = "bfloat16") -> Device:
    return cuda_device(row["card"]).of_type(dtype)


def attention(row: Row) -> Predictions:
    batch, tokens, heads, width = (int(row[name]) for name in ("batch", "tokens", "heads", "width"))
    flops, moved = 4 * batch * heads * tokens**2 * width, 4 * HALF * batch * heads * tokens * width
    causal = row["causal"] == "1"
    now = card_of(row).kernel_seconds(flops, moved, Attention(width, tokens, causal))
    return "attention, causal" if causal else "attention", before(row["card"], flops, moved), now


def attention_by_cudnn(row: Row) -> Predictions:
    batch, tokens, heads, width = (int(row[name]) for name in ("batch", "tokens", "heads", "width"))
    backward, causal = row["backward"] == "1", row["causal"] == "1"
    flops, moved = 4 * batch * heads * tokens**2 * width, 4 * HALF * batch * heads * tokens * width
    flops, moved = (flops * 5 // 2, 2 * moved) if backward else (flops, moved)
    shape = Attention(width, tokens, causal, backward, AttentionKernel.CUDNN)
    kind = "attention by cuDNN" + ", backward" * backward
    return kind, before(row["card"], flops, moved), card_of(row).kernel_seconds(flops, moved, shape)


def arithmetic(row: Row) -> Predictions:
    """Predicts a fused kernel that repeats an op, reads two tensors and writes one."""
    moved, times = 3 * HALF * int(row["elements"]), int(row["times"])
    traffic = card_of(row).kernel_seconds(0, moved)
    work = Work(specials=SPECIALS[Rate(row["rate"])] * int(row["elements"]) * times)
    kind = "fused arithmetic, " + ("at most 4 ops" if times <= 4 else "more")
    return kind, before(row["card"], 0, moved), max(traffic, card_of(row).seconds(work))


def collective(row: Row) -> Predictions:
    ranks, pattern = int(row["ranks"]), Pattern.REDUCE if row["collective"] == "all_reduce" else Pattern.GATHER
    sent = sent_bytes(pattern, int(row["bytes"]), ranks)
    now = assumed_interconnect(row["card"], ranks).seconds(sent, steps_of(pattern, ranks))
    by = "NVLink" if row["card"] in NVLINK else f"PCI Express, {ranks} GPUs"
    return f"collectives by {by}", 20e-6 + sent / (0.8 * NVLINK.get(row["card"], 32e9)), now


def stream(row: Row) -> Predictions:
    moved = int(row["bytes"])
    now = card_of(row).kernel_seconds(0, moved)
    kind = f"{row['op']}, {'beyond' if moved > LARGEST_CACHE else 'within'} the L2 cache"
    return kind, before(row["card"], 0, moved), now


PREDICTORS: dict[str, Callable[[Row], Predictions]] = {
    "products": product, "products_float8": product_float8, "products_by_type": product_of_type, "attention": attention,
    "attention_cudnn": attention_by_cudnn, "arithmetic": arithmetic,
    "collectives": collective, "streams": stream,
}  # fmt: skip


def comparisons() -> Iterator[Comparison]:
    """Yields all published times with their predictions."""
    for name, predict in PREDICTORS.items():
        for number, row in enumerate(rows_of(name)):
            held_out = "held-out shapes" if number % 2 and name in HALVED else "fitted"
            split = held_out if row["card"] in FITTED[name] else "held-out card"
            kind, old, now = predict(row)
            yield Comparison(kind, row["card"], split, float(row["microseconds"]) / 1e6, old, now)
    for row in rows_of("host_links"):
        link = assumed_host_link(row["card"])
        assert link is not None
        for direction, rate in (("to_host", link.to_host), ("from_host", link.from_host)):
            took = 1 / (float(row[direction]) * 1e9)
            yield Comparison(f"host link, {direction}", row["card"], "fitted", took, 1 / 32e9, 1 / rate)


def rows_of(name: str) -> list[Row]:
    """Returns the rows of one file of published times."""
    with (TIMES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def scores(found: list[Comparison]) -> list[Score]:
    """Returns the scores by class, card and split."""
    groups = defaultdict[tuple[str, str, str], list[Comparison]](list)
    for one in found:
        groups[one.kind, one.card, one.split].append(one)
    return [_score(*key, group) for key, group in groups.items()]


def _score(kind: str, card: str, split: str, group: list[Comparison]) -> Score:
    old, new = (sorted(predicted / one.measured for one, predicted in zip(group, times, strict=True))
                for times in ([one.before for one in group], [one.now for one in group]))  # fmt: skip
    errors = [statistics.median(abs(ratio - 1) for ratio in ratios) for ratios in (old, new)]
    tenth, ninetieth = new[len(new) // 10], new[-1 - len(new) // 10]
    return Score(kind, card, split, len(group), statistics.median(old), errors[0], statistics.median(new), tenth, ninetieth,
                 errors[1])  # fmt: skip


def cells(score: Score) -> dict[str, object]:
    return {
        "class": score.kind,
        "card": score.card,
        "split": score.split,
        "rows": score.rows,
        "before: ratio": f"{score.median_before:.2f}",
        "before: error": f"{score.error_before:.0%}",
        "now: ratio": f"{score.median:.2f}",
        "p10, p90": f"{score.tenth:.2f}, {score.ninetieth:.2f}",
        "now: error": f"{score.error:.0%}",
    }


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    found = scores(list(comparisons()))
    write("card_rates", arguments.output, [table("Predicted over measured time", list(map(cells, found)))], found)
