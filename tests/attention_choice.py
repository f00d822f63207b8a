"""Torch's rules for the kernel of an attention on CUDA as a table, by which the emulated card chooses and rules are tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HALF = ("Half", "BFloat16")
WIDE = 256
SERVERS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class Facts:
    """What torch asks about an attention. Triples are those of query, key and value."""

    dtype: str
    capability: tuple[int, int]
    dimensions: int
    batches: tuple[int, int, int]
    heads: tuple[int, int, int]
    lengths: tuple[int, int, int]
    widths: tuple[int, int, int]
    strides: tuple[int, int, int]
    """Strides of the last dimension."""
    offsets: tuple[int, int, int]
    mask: tuple[int, ...] | None
    """The shape of the mask."""
    mask_stride: int
    mask_trains: bool
    trains: bool
    causal: bool
    grouped: bool
    dropout: float

    def fits_mask(self) -> bool:
        whole = (self.batches[0], self.heads[0], self.lengths[0], self.lengths[1])
        return self.mask is None or all(a in (1, b) for a, b in zip(self.mask[::-1], whole[::-1], strict=False))

    def divides(self, heads: int) -> bool:
        return self.heads[0] % heads == 0


def equal(sizes: tuple[int, ...]) -> bool:
    return len(set(sizes)) == 1


Need = Callable[[Facts], bool]


def widths_of_older(f: Facts) -> bool:
    return max(f.widths[0], f.widths[2]) <= (256 if f.capability == (9, 0) else 128) or (
        f.capability[0] == 10 and (f.widths[0], f.widths[2]) == (192, 128)
    )


def widths_of_newer(f: Facts) -> bool:
    pair = (f.widths[0], f.widths[2])
    return max(pair) <= 256 and (not f.trains or max(pair) <= 128 or pair in ((192, 128), (256, 256)))


def trains_by_flash(f: Facts) -> bool:
    narrow = f.capability not in ((8, 6), (8, 9), (12, 0)) or f.widths[0] <= 192
    return not f.trains or narrow or (f.widths[0] > 224 and f.dropout == 0)


def columns(f: Facts) -> int:
    return 8 if f.dtype in HALF else 4 if f.capability[0] >= 8 else 1


def shared(f: Facts, by_groups: bool, by_all: bool, keys_alone: bool) -> bool:
    """True if the heads of the keys suffice for those of the queries."""
    if f.grouped and by_groups:
        return f.divides(f.heads[1]) and (f.divides(f.heads[2]) if keys_alone else f.heads[1] == f.heads[2])
    return equal(f.heads) or (by_all and f.heads[1:] == (1, 1))


FIRST, LAST = 11, 15

DENSE: tuple[tuple[int, int, Need], ...] = (
    (FIRST, LAST, lambda f: f.dimensions == 4),
    (FIRST, LAST, lambda f: equal(f.batches)),
    (FIRST, LAST, lambda f: f.lengths[0] > 0 and f.lengths[1] > 0),
    (FIRST, LAST, lambda f: f.mask is None or f.mask_stride == 1),
)

UNIT: Need = lambda f: f.strides == (1, 1, 1)  # noqa: E731
UNIT_OR_SINGLE: Need = lambda f: f.strides == (1, 1, 1) or f.widths[0] == 1  # noqa: E731

NEEDS: dict[str, tuple[tuple[int, int, Need], ...]] = {
    "cudnn": (
        *DENSE,
        (FIRST, LAST, UNIT_OR_SINGLE),
        (FIRST, LAST, lambda f: f.capability in SERVERS),
        (FIRST, LAST, lambda f: f.dtype in HALF),
        (FIRST, LAST, lambda f: not f.mask_trains),
        (FIRST, LAST, lambda f: f.mask is None or len(f.mask) in (2, 4)),
        (FIRST, LAST, Facts.fits_mask),
        (FIRST, 13, lambda f: shared(f, by_groups=True, by_all=False, keys_alone=True)),
        (14, LAST, lambda f: shared(f, by_groups=True, by_all=True, keys_alone=True)),
        (FIRST, LAST, lambda f: f.lengths[1] != 1),
        (FIRST, LAST, lambda f: f.lengths[0] != 1 or f.dropout == 0),
        (FIRST, LAST, lambda f: f.widths[0] % 8 == f.widths[2] % 8 == 0),
        (FIRST, 13, widths_of_older),
        (14, LAST, widths_of_newer),
        (12, LAST, lambda f: (16 * f.dropout).is_integer()),
        (13, LAST, lambda f: f.batches[0] < 2**16 and f.heads[0] < 2**16),
    ),
    "flash": (
        *DENSE,
        (FIRST, LAST, UNIT_OR_SINGLE),
        (FIRST, LAST, lambda f: f.capability[0] >= 8),
        (FIRST, LAST, lambda f: f.dtype in HALF),
        (FIRST, LAST, lambda f: f.mask is None),
        (FIRST, LAST, lambda f: equal(f.widths) and f.widths[0] <= WIDE),
        (FIRST, LAST, lambda f: not f.causal or f.lengths[0] == f.lengths[1]),
        (FIRST, 13, lambda f: shared(f, by_groups=True, by_all=False, keys_alone=False)),
        (14, LAST, lambda f: shared(f, by_groups=True, by_all=True, keys_alone=False)),
        (FIRST, LAST, trains_by_flash),
    ),
    "efficient": (
        *DENSE,
        (FIRST, LAST, UNIT),
        (FIRST, LAST, lambda f: f.dtype in ("Float", "Half") or (f.dtype == "BFloat16" and f.capability[0] >= 8)),
        (FIRST, LAST, lambda f: f.widths[0] == f.widths[1]),
        (FIRST, LAST, lambda f: all(width % columns(f) == 0 for width in f.widths)),
        (13, LAST, lambda f: f.capability[0] < 8 or all(offset % columns(f) == 0 for offset in f.offsets)),
        (FIRST, 13, lambda f: shared(f, by_groups=False, by_all=False, keys_alone=False)),
        (14, LAST, lambda f: shared(f, by_groups=True, by_all=True, keys_alone=False)),
    ),
}
"""By kernel, in torch's sequence: the first and the last minor version of torch with the need, and the need."""


def chosen(facts: Facts, minor: int, preferred: str = "cudnn") -> str:
    """The kernel that torch 2.``minor`` takes: the first from ``preferred`` on whose needs are met, else "math"."""
    kernels = [*NEEDS, "math"]
    for kernel in kernels[kernels.index(preferred) : -1]:
        if all(need(facts) for first, last, need in NEEDS[kernel] if first <= minor <= last):
            return kernel
    return "math"
