"""FX -> FX rewrites, in the order in which they run. See README.md in this folder."""

from __future__ import annotations

from collections.abc import Collection

from autoremat import torch_compat
from autoremat.capture import Capture
from autoremat.passes.recompute import insert_recomputation
from autoremat.passes.split import split
from autoremat.schedule import Schedule


def realise(capture: Capture, schedule: Schedule, static_inputs: Collection[int]) -> torch_compat.PartitionedModules:
    """The (forward, backward) modules that run ``schedule``; ``capture.joint`` is rewritten in place and used up."""
    insert_recomputation(capture, schedule)
    forward, backward = split(capture, schedule, static_inputs)
    forward.graph.lint()
    backward.graph.lint()
    return forward, backward
