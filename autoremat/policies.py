"""The checkpoint policies, for ``options={"policy": ...}``; see :mod:`autoremat.planner.constraints.policies`."""

from autoremat.planner.constraints.policies import (
    Block,
    Forward,
    Full,
    Module,
    Policy,
    Region,
    Segments,
    Selective,
    Sqrt,
    Uniform,
    parse,
)

__all__ = [
    "Block",
    "Forward",
    "Full",
    "Module",
    "Policy",
    "Region",
    "Segments",
    "Selective",
    "Sqrt",
    "Uniform",
    "parse",
]
