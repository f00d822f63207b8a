"""The first stage of a compilation: turns AOTAutograd's joint graph into the planner's graph."""

from __future__ import annotations

from torch import fx

from autoremat.capture.capture import Capture, capture, runs_on_type
from autoremat.passes import before_capture


def captured(joint: fx.GraphModule, num_fwd_outputs: int, fuses: bool, cuda_name: str | None) -> Capture:
    """Returns the capture of ``joint``, which is rewritten in place first.

    ``fuses`` is True if Inductor compiles the graph. ``cuda_name`` names the GPU that is planned for, if it is not present.
    """
    before_capture(joint, runs_on_type(joint, cuda_name) if fuses else None)
    return capture(joint, num_fwd_outputs, fuses, cuda_name)
