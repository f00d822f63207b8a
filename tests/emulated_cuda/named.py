"""Steps that are planned twice: for the card by its name in a process without it, and on the emulated card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn

import autoremat
from autoremat.planner.plans.plan_file import difference, graph_hash
from emulated_cuda import small_steps

FOLDER_VARIABLE = "NAMED_PLANS"
"""Environment variable with the folder of the plans that were made by name."""

STEPS = {
    "llama_bfloat16": ("llama", torch.bfloat16, None),
    "gpt2_autocast": ("gpt2", torch.float32, torch.bfloat16),
    "resnet_float32": ("resnet", torch.float32, None),
    "attention_float32": ("attention", torch.float32, None),
    "attention_bfloat16": ("attention", torch.bfloat16, None),
}
"""Model, its type, and the type of autocast."""

SIZES = {"llama": {"layers": 1}, "gpt2": {"layers": 1}}
"""Sizes of the models that have others than their own."""

OPTIONS = {"cost_model": "roofline", "memory_budget": 0.7, "on_infeasible": "best_effort"}


class Attention(nn.Module):
    """An attention of single ops, which Inductor recognises and fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2).contiguous() for layer in (self.query, self.key, self.value))
        query, key, value = heads
        return (query @ key.transpose(-2, -1)).div(4.0).softmax(-1).matmul(value).square().mean()


def built(name: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Returns the step of that name and its inputs."""
    model, dtype, autocast = STEPS[name]
    if model == "attention":
        module, inputs = Attention(), (torch.randn(4, 128, 64),)
    else:
        module, inputs = models.build(model, **SIZES.get(model, {}))
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


def write_graphs(folder: Path, device: str) -> None:
    """Plans all small steps for the card ``device`` by its name, without generated code, and writes the plans to ``folder``."""
    for name, build in small_steps.steps().items():
        step, inputs = build()
        report = autoremat.explain(step, *inputs, device=device)
        assert report.plan is not None
        report.plan.save(graph_path(folder, name))


def graph_path(folder: Path, name: str) -> Path:
    """Returns the file of the plan of a small step."""
    return folder / f"small {name}.json"


def difference_on_card(folder: Path, name: str) -> str:
    """Returns how the graph of a small step that was planned by name differs from that on the card; empty if it does not."""
    step, inputs = small_steps.steps()[name]()
    if isinstance(step, nn.Module):
        step = step.cuda()
    inputs = tuple(tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in inputs)
    by_name, report = autoremat.Plan.load(graph_path(folder, name)).graph, autoremat.explain(step, *inputs, device="cuda")
    assert report.plan is not None
    return "" if graph_hash(by_name) == graph_hash(report.plan.graph) else difference(by_name, report.plan.graph)
