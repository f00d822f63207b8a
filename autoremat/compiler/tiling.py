"""Plans the graph with and without tiles, and chooses between them (``passes/tiles``).

Tiles change the rounding of sums over rows. By ``tiles="auto"``, tiled candidates are planned only if nothing else fits.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from autoremat.basics.errors import ChunkingUnsupported, OptionWarning
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, capture_and_price
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice, Contend, best_of, choose_chunking
from autoremat.passes.pipeline import run_passes
from autoremat.passes.tile_rows import tile_rows
from autoremat.torch_private import fake_tensors

NUMBERS_OF_TILES = (4, 16)
"""Numbers of tiles that are tried, in this order, if the user gives none. A tile costs another read of the weights, and each op
of a stretch once more."""


def choose_parts(priced: PricedGraph, context: PlanningContext, contend: Contend) -> ChunkingChoice:
    """Returns the best candidate, with or without tiles, with or without a chunked loss.

    Warns if the user asks for tiles and the graph has no stretch of row-by-row ops to tile.
    """
    wanted = False if priced.joint.is_region else _wanted(context)
    is_shared = priced.step_share(context.request.limits) is not None
    if type(wanted) is int:
        if is_shared:
            _warn("the budget of a profiled step is shared out among its graphs as they are")
            return choose_chunking(priced, context, contend)
        tiled = _tiled(priced, context, wanted)
        if tiled is None:
            _warn("it has no products that make rows wider, of fixed sizes, between ops that compute row by row")
        return choose_chunking(tiled or priced, context, contend)
    choice = choose_chunking(priced, context, contend)
    if wanted is False or is_shared or context.request.options.plan or choice.taken.fits:
        return choice
    return _with_tiles(choice, priced, context, contend)


def _wanted(context: PlanningContext) -> bool | int | str:
    """Returns the option ``tiles``, or the number of tiles under which a plan was made that is applied again."""
    if context.told is None:
        return context.request.options.tiles
    return context.told.tiles if context.told.tiles > 1 else False


def _with_tiles(whole: ChunkingChoice, priced: PricedGraph, context: PlanningContext, contend: Contend) -> ChunkingChoice:
    """Returns the first choice with tiles that fits; without one, the best of all."""
    first = whole.whole or whole.taken

    def contend_later(graph: PricedGraph, chunks: int, earlier: ChunkingCandidate | None) -> ChunkingCandidate:
        return contend(graph, chunks, earlier or first)

    found = [whole.taken]
    for number in NUMBERS_OF_TILES:
        tiled = _tiled(priced, context, number)
        if tiled is None:
            break
        found.append(choose_chunking(tiled, context, contend_later).taken)
        if found[-1].fits:
            break
    return dataclasses.replace(whole, taken=best_of(found, context.request.limits))


def _tiled(priced: PricedGraph, context: PlanningContext, tiles: int) -> PricedGraph | None:
    """Returns the graph with its stretches in ``tiles`` tiles; None if it has no stretch."""
    now("tiling")
    module = fake_tensors.copied_module(priced.captured.joint)
    try:
        (stretches,) = run_passes(module, partial(tile_rows, tiles=tiles))
    except ChunkingUnsupported:
        return None
    if not stretches:
        return None
    tiled = dataclasses.replace(priced.joint, module=module, tiles=tiles, stretches=stretches)
    return capture_and_price(tiled, context)


def _warn(reason: str) -> None:
    warn_user(f"tiles has no effect on a graph: {reason}", OptionWarning)
