"""Computes stretches of row-by-row ops, such as an MLP, tile by tile, forward and backward.

The wide hidden values of all rows (tokens) are then never live together.

    h = mm(x, w); a = silu(h); y = mm(a, v)     da = mm(dy, v'); dv = mm(a', dy); dh = ...; dx = mm(dh, w'); dw = mm(x', dh)
    becomes, with two tiles,
    h_0 = mm(x[:a], w); y_0 = ...               da_1 = mm(dy[a:], v'); dv_1 = mm(a_1', dy[a:]); dx_1 = ...; dw_1 = ...
    h_1 = mm(x[a:], w); y_1 = ...               da_0 = mm(dy[:a], v'); dv = addmm(dv_1, a_0', dy[:a]); dx_0 = ...; dw = ...
    y = cat(y_0, y_1)                           dx = cat(dx_0, dx_1)

The planner recomputes h_0 and a_0 just before their gradients (``passes/rows/run_by_parts.py``).
"""

from __future__ import annotations

from torch import fx

from autoremat.passes.chunked_loss.chunk_loss import vocabulary_projection
from autoremat.passes.rows.run_by_parts import run_by_parts
from autoremat.passes.tiles.stretches import find_stretches


def tile_rows(joint: fx.GraphModule, tiles: int) -> int:
    """Rewrites ``joint`` in place so that its stretches of row-by-row ops run in ``tiles`` tiles.

    The projection of a loss belongs to ``chunk_loss``. Returns the number of stretches; after 0 the graph is as before.
    """
    stretches = find_stretches(joint.graph, vocabulary_projection(joint.graph))
    if stretches:
        run_by_parts(joint.graph, stretches, tiles)
    return len(stretches)
