"""The first stage of a compilation: from the joint graph of AOTAutograd to the planner's graph with its seconds."""

from __future__ import annotations

from torch import fx

from autoremat.capture.capture import Capture, capture, runs_on_type
from autoremat.passes import before_capture


def captured(joint: fx.GraphModule, num_fwd_outputs: int, fuses: bool, cuda_name: str | None) -> Capture:
    """Returns the capture of ``joint``, which is rewritten in place first.

    ``fuses``: Inductor compiles the graph. ``cuda_name``: the card that is planned for, if it is not here.
    """
    before_capture(joint, runs_on_type(joint, cuda_name) if fuses else None)
    return capture(joint, num_fwd_outputs, fuses, cuda_name)
