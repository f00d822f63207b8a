"""Random layered graphs, the benchmark of MOCCASIN (Bartan et al., ICML 2023) and FastSA.

The generator is that of Gagrani et al., "Neural Topological Ordering for Computation Graphs" (NeurIPS 2022), appendix A. It is
written anew from its description.

Ops stand in layers. Consecutive layers are joined locally and evenly; skip edges go over at least one layer. Bytes come from a
mixture of four normal distributions, seconds are uniform. The order of the ops is by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EDGE_DENSITY = 0.2
SKIP_SHARE = 0.14
LAYER_VARIATION = 0.75
MIXTURE = ((0.3, 0.5, 0.5), (0.3, 1.0, 1.0), (0.3, 3.0, 1.0), (0.1, 5.0, 1.0))
"""Weight, mean and deviation of each part, in thousands of bytes."""

WIDTHS = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}
"""The width factors of the published graphs RL1 to RL4, by number of ops."""


@dataclass(frozen=True)
class LayeredGraph:
    """The arguments of `Graph.from_dag`."""

    seconds: list[float]
    sizes: list[int]
    edges: list[tuple[int, int]]


def layer_sizes(ops: int, width: float, random: np.random.Generator) -> list[int]:
    """Returns the sizes of the layers, with one op in the first and in the last. Layers are drawn until no ops are left."""
    mean = ops / math.ceil(math.sqrt(ops * (1 / width - 1)))
    low, high = math.ceil(mean * (1 - LAYER_VARIATION)), math.floor(mean * (1 + LAYER_VARIATION))
    sizes, left = [1], ops - 2
    while left:
        sizes.append(min(left, int(random.integers(low, high, endpoint=True))))
        left -= sizes[-1]
    return [*sizes, 1]


def generate(ops: int, width: float, seed: int) -> LayeredGraph:
    """Returns the graph of `ops` ops with a width factor between 0 and 1, the same for the same seed."""
    random = np.random.default_rng(seed)
    sizes = layer_sizes(ops, width, random)
    first = np.concatenate([[0], np.cumsum(sizes)])
    place = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    layer = np.repeat(np.arange(len(sizes)), sizes)
    edges: set[tuple[int, int]] = set()
    for index, (above, below) in enumerate(zip(sizes, sizes[1:], strict=False)):
        wanted = round(above * below * EDGE_DENSITY + (1 - EDGE_DENSITY) * max(above, below))
        here, there = ((np.arange(size) + 0.5) / size for size in (above, below))
        apart = np.abs(here[:, None] - there[None, :])
        # Evenly and locally: each op with the one opposite, from both sides; then the nearest pairs.
        chosen = {(i, int(j)) for i, j in enumerate(apart.argmin(axis=1))}
        chosen |= {(int(i), j) for j, i in enumerate(apart.argmin(axis=0))}
        nearest = np.unravel_index(np.argsort(apart, axis=None, kind="stable"), apart.shape)
        for pair in zip(*(axis.tolist() for axis in nearest), strict=True):
            if len(chosen) >= wanted:
                break
            chosen.add(pair)
        edges |= {(int(first[index] + i), int(first[index + 1] + j)) for i, j in chosen}
    for _ in range(round(len(edges) * SKIP_SHARE / (1 - SKIP_SHARE))):
        start = int(random.integers(0, first[-3]))
        later = np.arange(first[layer[start] + 2], ops)
        near = np.exp(-((place[later] - place[start]) ** 2) / 0.02)
        edges.add((start, int(random.choice(later, p=near / near.sum()))))
    parts = random.choice(len(MIXTURE), size=ops, p=[weight for weight, _, _ in MIXTURE])
    means, deviations = np.array([m for _, m, _ in MIXTURE]), np.array([d for _, _, d in MIXTURE])
    bytes_ = np.maximum(1, np.rint(1000 * np.abs(random.normal(means[parts], deviations[parts])))).astype(int)
    return LayeredGraph(random.uniform(0, 1000, size=ops).tolist(), bytes_.tolist(), sorted(edges))
