"""Steps that are planned twice: for the card by its name in a process without it, and on the emulated card."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat.planner.plans.plan_file import difference, graph_hash

Step = tuple[Callable[..., Any], tuple[Tensor, ...]]


class Products(nn.Module):
    """Products of a batch of one, of one row, of one column, and of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        scores = torch.bmm(y, y.transpose(1, 2)).sum()
        outer = torch.bmm(y[:, :, :1], y[:, :1, :]).sum()
        inner = torch.mm(y[0, :1], y[0, :1].T).sum() + self.row(y[0, :1]).sum()
        columns = torch.mm(y[0, :, :1], y[0, :1]).sum() + F.linear(y[0, :, :1], y[0, :, :1]).sum()
        return scores + outer + inner + columns + torch.bmm(y[:, :1], y[:, :1].transpose(1, 2)).sum()


class Norms(nn.Module):
    """Norms, a gate and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.of_groups, self.of_layers, self.of_batches = nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.BatchNorm2d(4)
        self.of_squares = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.of_batches(self.convolution(x))
        y = F.logsigmoid(self.of_groups(y)) + F.gelu(self.of_layers(y)) + F.rms_norm(self.of_squares(y), [8])
        return F.dropout(y, 0.3).square().sum()


class Layouts(nn.Module):
    """Operations whose results have another layout on the card, and a scatter into constants."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(self.convolution(x), (1, 1, 1, 1), mode="reflect").contiguous(memory_format=torch.channels_last)
        places = torch.arange(y.shape[-1], device=x.device)
        picked = torch.zeros(*y.shape, device=x.device, dtype=y.dtype).scatter(3, places.expand(*y.shape[:3], -1)[..., :1], 1.0)
        return (y[..., places] * picked).square().sum() + F.cross_entropy(y.flatten(2).mean(1), y.new_zeros(len(y)).long())


@dataclass(frozen=True)
class Masked:
    """An attention with a mask of one form."""

    form: str
    dropout: float = 0.0

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = x.view(batch, length, 4, 16).transpose(1, 2)
        masks: dict[str, Callable[[], Tensor | None]] = {
            "none": lambda: None, "bool": lambda: (scores > 0)[:, None], "number": lambda: scores[:, None],
            "of all": lambda: (scores > 0)[0], "number of all": lambda: scores[0],
            "of heads": lambda: scores[:, None].expand(-1, 4, -1, -1), "three": lambda: scores[:1].expand(4, -1, -1),
            "of keys": lambda: (scores > 0)[:, None, :1],
            "of queries": lambda: (scores > 0)[:, None, :, :1].expand(-1, -1, -1, length),
            "learned": lambda: x.sum() * scores[:, None], "across": lambda: scores.transpose(1, 2)[:, None],
        }  # fmt: skip
        out = F.scaled_dot_product_attention(
            heads, heads, heads, masks[self.form](), self.dropout, is_causal=self.form == "none"
        )
        return out.square().mean()


FORMS = (
    "none", "bool", "number", "of all", "number of all", "of heads", "three", "of keys", "of queries", "learned", "across",
)  # fmt: skip


class Grouped(nn.Module):
    """An attention whose heads share keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.unflatten(-1, (4, 16)).transpose(1, 2), x[..., :32].unflatten(-1, (2, 16)).transpose(1, 2)
        single = key[:, :1]
        grouped = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        return grouped.square().mean() + F.scaled_dot_product_attention(query, single.expand(-1, 4, -1, -1), single).mean()


def steps() -> dict[str, Callable[[], Step]]:
    """Returns the steps by name, each as a function that builds a step and its inputs."""

    def learned(step: Callable[..., Any], dtype: torch.dtype, *shape: int) -> Step:
        step = step.to(dtype) if isinstance(step, nn.Module) else step
        return step, (torch.randn(shape, dtype=dtype, requires_grad=True),)

    def masked(step: Masked, dtype: torch.dtype, length: int) -> Step:
        step, inputs = learned(step, dtype, 2, length, 64)
        return step, (*inputs, torch.randn(2, length, length, dtype=dtype))

    found: dict[str, Callable[[], Step]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        found[f"products {kind}"] = lambda dtype=dtype: learned(Products(), dtype, 1, 8, 32)
        found[f"norms {kind}"] = lambda dtype=dtype: learned(Norms(), dtype, 2, 4, 8, 8)
        found[f"layouts {kind}"] = lambda dtype=dtype: learned(Layouts(), dtype, 2, 3, 8, 8)
        found[f"grouped {kind}"] = lambda dtype=dtype: learned(Grouped(), dtype, 2, 32, 64)
        for form, (length, dropout) in itertools.product(FORMS, [(32, 0.0), (32, 0.1), (36, 0.0)]):
            build = functools.partial(masked, Masked(form, dropout), dtype, length)
            found[f"{form} {length} {dropout} {kind}"] = build
    return found


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
    for name, build in steps().items():
        step, inputs = build()
        report = autoremat.explain(step, *inputs, device=device)
        assert report.plan is not None
        report.plan.save(graph_path(folder, name))


def graph_path(folder: Path, name: str) -> Path:
    """Returns the file of the plan of a small step."""
    return folder / f"small {name}.json"


def difference_on_card(folder: Path, name: str) -> str:
    """Returns how the graph of a small step that was planned by name differs from that on the card; empty if it does not."""
    step, inputs = steps()[name]()
    if isinstance(step, nn.Module):
        step = step.cuda()
    inputs = tuple(tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in inputs)
    by_name, report = autoremat.Plan.load(graph_path(folder, name)).graph, autoremat.explain(step, *inputs, device="cuda")
    assert report.plan is not None
    return "" if graph_hash(by_name) == graph_hash(report.plan.graph) else difference(by_name, report.plan.graph)
