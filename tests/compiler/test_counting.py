"""The settings of CUDA's allocator that a count of generated code follows, and those that a report tells of."""

from __future__ import annotations

import pytest
import torch

from autoremat.compiler import counting
from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.torch_private import allocator
from autoremat.torch_private.names import MINOR

MIB = 2**20


@pytest.mark.parametrize(("text", "rest"), [("", MIB), ("expandable_segments: True", 0)])
def test_rests_of_blocks_count_unless_segments_expand(monkeypatch, text, rest):
    monkeypatch.setattr(counting, "settings_of_process", lambda: text)
    assert counting.code_unsplit_bytes({False: HalfAllocations(((0, 11 * MIB),))}, []) == rest


def test_settings_without_a_rule_are_noted(monkeypatch):
    monkeypatch.setattr(counting, "settings_of_process", lambda: "max_split_size_mb:64")
    assert "without max_split_size_mb" in counting.note_on_settings("cuda")
    assert not counting.note_on_settings("cpu")


def test_the_settings_are_those_of_the_environment(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator.settings_of_process() == "max_split_size_mb:64"


@pytest.mark.skipif(MINOR < 12, reason="this torch does not tell the settings")
def test_settings_of_the_process_come_first(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:True", raising=False)
    assert allocator.settings_of_process() == "expandable_segments:True"
