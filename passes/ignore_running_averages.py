"""Drops the running averages from gradients of batch norms in training, which do not depend on them.

A backward that names them would keep the new averages of every batch norm for it. What names them cannot run again either,
because the step overwrites them.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

AVERAGES = slice(3, 5)
"""Positions of the running averages among the arguments."""
IS_TRAINING = 7
"""Position of the argument that is True in training."""


def ignore_running_averages(module: fx.GraphModule) -> int:
    """Rewrites ``module`` in place. Returns the number of rewritten calls."""
    rewrites = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[IS_TRAINING] is True and node.args[AVERAGES] != (None, None):
            node.args = (*node.args[: AVERAGES.start], None, None, *node.args[AVERAGES.stop :])
            rewrites += 1
    return rewrites
