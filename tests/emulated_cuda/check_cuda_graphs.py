"""Code for CUDA graphs on the emulated card. It records none, so the code is generated and replayed, and not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import inductor_lowering

BATCH = torch.Size((128, 64))
INPUT_BYTES = 4 * BATCH.numel()


class Broken(nn.Module):
    """A linear network. Part of it runs on the CPU if ``split``, so that no single CUDA graph can record the step."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.first, self.second, self.split = nn.Linear(64, 256), nn.Linear(256, 16), split

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        if self.split:
            hidden = hidden.cpu().sin().cuda() * hidden
        return self.second(hidden).square().mean()


def explained(module: nn.Module, **options: Any) -> autoremat.Report:
    x = torch.randn(BATCH, device="cuda")
    return autoremat.explain(module, x, device="cuda", lower=True, options={"cost_model": "roofline", **options})


@pytest.mark.parametrize("split", [False, True])
def test_partitions_are_replayed_and_copies_of_inputs_count(split, monkeypatch):
    sources: list[str] = []
    contexts: list[ReplayContext] = []
    original = inductor_lowering._lowered_peak

    def spy(lowering: Any, source: str, known: ReplayContext) -> Any:
        sources.append(source)
        contexts.append(known)
        return original(lowering, source, known)

    monkeypatch.setattr(inductor_lowering, "_lowered_peak", spy)
    module = Broken(split).cuda()
    whole, recorded = explained(module), explained(module, **{"triton.cudagraphs": True})
    assert not recorded.notes  # not an estimate
    assert "self.partitions[0]" in sources[-1]
    assert ("self.partitions[1]" in sources[-1]) == split
    assert recorded.compiled_peak_bytes == whole.compiled_peak_bytes + INPUT_BYTES
    assert contexts[0].copied_inputs is None
    assert list(contexts[-1].copied_inputs.values()) == [INPUT_BYTES]
    assert recorded.code_headroom_bytes >= whole.code_headroom_bytes + INPUT_BYTES
