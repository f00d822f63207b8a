"""Steps that are planned twice: for the card by its name in a process without it, and on the emulated card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch

import autoremat

FOLDER_VARIABLE = "NAMED_PLANS"
"""Environment variable with the folder of the plans that were made by name."""

STEPS = {
    "llama_float32": ("llama", torch.float32, None),
    "llama_bfloat16": ("llama", torch.bfloat16, None),
    "gpt2_bfloat16": ("gpt2", torch.bfloat16, None),
    "gpt2_autocast": ("gpt2", torch.float32, torch.bfloat16),
    "llama_autocast": ("llama", torch.float32, torch.float16),
    "resnet_float32": ("resnet", torch.float32, None),
    "unet_float32": ("unet", torch.float32, None),
}
"""Model, its type, and the type of autocast."""

OPTIONS = {"cost_model": "roofline", "memory_budget": 0.7, "on_infeasible": "best_effort"}


def built(name: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Returns the step of that name and its inputs."""
    model, dtype, autocast = STEPS[name]
    module, inputs = models.build(model, **({"layers": 1} if model in ("llama", "gpt2") else {}))
    module = module.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    if autocast is None:
        return module, inputs

    def step(*inputs: torch.Tensor) -> Any:
        with torch.autocast("cuda", autocast):
            return module(*inputs)

    return step, inputs


def write_plans(folder: Path, device: str) -> None:
    """Plans all steps for the card ``device`` by its name, with generated code, and writes plans and peaks to ``folder``."""
    peaks = {}
    for name in STEPS:
        step, inputs = built(name)
        report = autoremat.explain(step, *inputs, device=device, lower=True, options=OPTIONS)
        assert report.plan is not None
        report.plan.save(folder / f"{name}.json")
        peaks[name] = report.compiled_peak_bytes
    (folder / "peaks.json").write_text(json.dumps(peaks))
