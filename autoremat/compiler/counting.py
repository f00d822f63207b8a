"""Counts the bytes of generated code. On CUDA they are those of whole blocks of the caching allocator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoremat.planner.memory.allocations import HalfAllocations, joined, unsplit_bytes
from autoremat.torch_private.allocator import settings_of_process

WITHOUT_RULE = ("roundup_power2_divisions", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb")
"""Settings of the allocator that change blocks and that no rule here follows."""


def code_unsplit_bytes(halves: Mapping[bool, HalfAllocations], beside: Sequence[int]) -> int:
    """Returns the bytes of blocks beside the tensors in them at the peak of generated code, of which one half may be missing.

    Further allocations of the bytes ``beside`` are live. With both halves, it is the peak of the backward.
    """
    step = joined(halves[False], halves[True]) if len(halves) == 2 else next(iter(halves.values()))
    is_expandable = "expandable_segments:True" in settings_of_process().replace(" ", "")
    return unsplit_bytes(step.beside(beside), is_expandable)


def note_on_settings(device_type: str) -> str:
    """Returns a note on the settings of the allocator that no rule here follows; empty if there are none."""
    text = settings_of_process() if device_type == "cuda" else ""
    ignored = [name for name in WITHOUT_RULE if name in text]
    return f"blocks of memory are counted without {', '.join(ignored)}" if ignored else ""


@dataclass
class Codes:
    """The allocations of the code of each attempt, by the headroom of its plan. A cache may answer for one half later on."""

    known: dict[int, dict[bool, HalfAllocations]] = field(default_factory=dict)

    def note(self, headroom_bytes: int, halves: Mapping[bool, HalfAllocations]) -> Mapping[bool, HalfAllocations]:
        """Adds ``halves`` and returns all that are known of the code of this plan."""
        found = self.known.setdefault(headroom_bytes, {})
        found.update(halves)
        return found
