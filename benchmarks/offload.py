"""Recomputation alone, offload alone, and both chosen together, by the simulator and the cost model.

    python benchmarks/offload.py                                  # all models, some minutes each
    python benchmarks/offload.py --only llama-8b/8 gpt2-medium    # plans these again; rows of other models stay

Models have no weights (meta device) and are planned in bfloat16 for an H100 by name. Saved tensors of at least one MiB may be
kept on the host, over three links. Budgets are shares of the peak that saves everything. Costs are in % of the step, above
those of the fastest plan. Plans are made for 0.8 of a link's rate; one column has the cost of the same plan at its full rate.

Beside the planner's choice stand rules of others, each a choice of saved values that the placement stores at the same budget:

- *everything*: every saved value, as far as this lowers the peak (TRL's context of activation offloading)
- *by layer*: whole layers from the first one on, as many as it takes (torchtitan)
- *largest*: the largest values first, as many as it takes (DeepCompile)

They recompute what the fastest plan recomputes, or nothing, whichever is cheaper.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import parser, percent, run, table
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from autoremat.options.options import Options
from autoremat.planner.cost.durations import stalls_of
from autoremat.planner.cost.links import LATENCY_SECONDS, PLANNED_SHARE, HostLink, host_form
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan, Storable
from autoremat.planner.search.placement import place
from autoremat.planner.search.planner import Planner
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers

DEVICE, LEAST_BYTES, TIME_LIMIT, GIBIBYTE = "H100-80GB", 2**20, 120.0, 2**30
LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9, "C2C": 350e9}
"""Rates of each direction in bytes per second."""

Step = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """One model at one budget over one link. Costs are shares of the step; None: no plan fits."""

    model: str
    link: str
    budget: float
    """As a share of the peak that saves everything."""
    recomputation: float | None
    offload: float | None
    everything: float | None
    by_layer: float | None
    largest: float | None
    together: float | None
    at_full_rate: float | None
    bound: float
    """No plan within the budget costs less."""
    host_gib: float
    stored: int
    seconds: float
    """Of planning, of this process alone."""
    seconds_without: float
    """The same without forms."""
    least: float
    """The least peak found, as a share like the budget."""
    least_without: float


def llama(layers: int, batch: int, vocabulary: int = 128_256) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=vocabulary,
        num_hidden_layers=layers, max_position_embeddings=8192, use_cache=False, rope_theta=500000.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss, (torch.zeros((batch, 8192), dtype=torch.int64),)


def gpt2(batch: int) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss, (torch.zeros((batch, 1024), dtype=torch.int64),)


def images(model: torch.nn.Module, batch: int) -> Step:
    model = model.to(torch.bfloat16).to(memory_format=torch.channels_last).train()
    pixels = torch.zeros((batch, 3, 224, 224), dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    labels = torch.zeros((batch,), dtype=torch.int64)
    return lambda x, y: F.cross_entropy(model(pixel_values=x).logits.float(), y), (pixels, labels)


def vit(batch: int) -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000)
    return images(ViTForImageClassification(config), batch)


def resnet(batch: int) -> Step:
    from transformers import ResNetConfig, ResNetForImageClassification

    return images(ResNetForImageClassification(ResNetConfig(num_labels=1000)), batch)


class Block(nn.Module):
    """A block of a diffusion transformer: attention and an MLP, both shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulate(F.silu(condition))[:, None].chunk(6, -1)
        parts = self.query_key_value(self.norm(x) * (1 + scale) + shift).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.project(attended)
        return x + gate_2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale_2) + shift_2), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """A transformer in the sizes of DiT-XL/2."""

    def __init__(self, width: int = 1152, layers: int = 28, heads: int = 16) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(16, width), nn.Linear(width, 16)
        self.condition = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, time: Tensor, target: Tensor) -> Tensor:
        x, condition = self.begin(x), self.condition(time)
        for layer in self.layers:
            x = layer(x, condition)
        return F.mse_loss(self.end(x).float(), target)


def diffusion(batch: int) -> Step:
    latent = torch.zeros((batch, 1024, 16), dtype=torch.bfloat16)
    time = torch.zeros((batch, 256), dtype=torch.bfloat16)
    return DiffusionTransformer().to(torch.bfloat16).train(), (latent, time, torch.zeros((batch, 1024, 16)))


def experts(layers: int, batch: int) -> Step:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_hidden_layers=layers, use_cache=False, max_position_embeddings=4096)
    model = MixtralForCausalLM(config).to(torch.bfloat16).train()
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss, (torch.zeros((batch, 4096), dtype=torch.int64),)


MODELS: dict[str, tuple[Callable[[], Step], tuple[float, ...]]] = {
    "llama-8b/8": (lambda: llama(8, 1), (0.5, 0.4, 0.35, 0.3, 0.288)),
    "llama-8b/8, batch 4": (lambda: llama(8, 4), (0.4, 0.3, 0.2, 0.15, 0.112)),
    "llama-8b/8, small head": (lambda: llama(8, 1, 32_000), (0.5, 0.3, 0.26, 0.2545, 0.2505)),
    "gpt2-medium": (lambda: gpt2(16), (0.5, 0.364, 0.3, 0.25, 0.1725)),
    "vit-large": (lambda: vit(128), (0.5, 0.3, 0.2, 0.1, 0.054)),
    "resnet-50": (lambda: resnet(256), (0.7, 0.5, 0.4, 0.3, 0.17)),
    "dit-xl": (lambda: diffusion(32), (0.3, 0.2, 0.1, 0.05, 0.03)),
    "mixtral/2": (lambda: experts(2, 16), (0.7, 0.6, 0.5, 0.4, 0.3)),
    "llama-8b": (lambda: llama(32, 1), (0.5, 0.4, 0.3, 0.27, 0.245)),
    "llama-8b/80": (lambda: llama(80, 1), (0.4,)),
}
"""Models and budgets. ``/8`` is the model with 8 layers."""


def captured(build: Callable[[], Step]) -> Graph:
    """Returns the largest graph of the step, priced for the device."""
    with torch.device("meta"):
        function, inputs = build()
    options = Options.parse({"progress": False}, None, compilers.inductor_config_names)
    found, _ = previews(function, inputs, {}, options, DEVICE, lambda priced: priced.graph)
    return max(found, key=lambda graph: len(graph.ops))


def with_link(graph: Graph, rate: float) -> Graph:
    """Returns ``graph`` with a form on the host for each large value of the forward that is no output."""
    link = HostLink(rate, rate, LATENCY_SECONDS)
    storable = set(graph.forward_values).difference(graph.forward_outputs, graph.backward_outputs)
    values = [
        replace(value, forms=(host_form(value.bytes, link),)) if number in storable and value.bytes >= LEAST_BYTES else value
        for number, value in enumerate(graph.values)
    ]
    return replace(graph, values=tuple(values))


def measure(name: str) -> Iterator[Row]:
    """Yields the rows of a model."""
    build, budgets = MODELS[name]
    graph = captured(build)
    alone = Planner(graph, TIME_LIMIT)
    peak, step = alone.baseline.peak_bytes, graph.step_seconds
    fastest = min(alone.plans, key=lambda plan: plan.cost_seconds)
    for share in budgets:
        budget = int(share * peak)
        alone.restart()
        begun = time.process_time()
        recomputed = alone.find(Limits(budget)).plan
        without = time.process_time() - begun
        for link, rate in LINKS.items():
            linked = with_link(graph, rate)
            planner = Planner(linked, TIME_LIMIT)
            planner.plans  # noqa: B018 - the other planner has its starts, too
            begun = time.process_time()
            planning = planner.find(Limits(budget))
            took = time.process_time() - begun
            plan, unstored = planning.plan, [GroupedPlan(replace(one, graph=linked)) for one in (fastest, alone.baseline)]
            rules = [
                min(filter(None, (rule(one, budget) for one in unstored)), key=lambda found: found.cost_seconds, default=None)
                for rule in (lambda one, most: place(one, Limits(most)), everything, by_layer, largest)
            ]

            def share_of(found: Plan | None, less: float = fastest.cost_seconds) -> float | None:
                return None if found is None else (found.cost_seconds - less) / step

            faster = 0.0
            if plan is not None:
                faster = plan.stall_seconds - sum(stalls_of(linked, plan.schedule, 1 / PLANNED_SHARE))
            yield Row(
                name, link, share, share_of(recomputed), *map(share_of, rules), share_of(plan),
                share_of(plan, fastest.cost_seconds + faster), (planning.lower_bound_seconds - fastest.cost_seconds) / step,
                0.0 if plan is None else plan.host_bytes / GIBIBYTE,
                0 if plan is None else len(plan.schedule.stays), took, without,
                planner.smallest.peak_bytes / peak, alone.smallest.peak_bytes / peak,
            )  # fmt: skip


def everything(grouped: GroupedPlan, budget: int) -> Plan | None:
    """Returns the plan of the least peak that stays reach, if it is within the budget."""
    levels = range(grouped.least_bytes, budget + 1, max(grouped.plan.peak_bytes // 200, 1))
    return next(filter(None, (place(grouped, Limits(level)) for level in levels)), None)


def by_layer(grouped: GroupedPlan, budget: int) -> Plan | None:
    """Returns the plan that stores all saved values of the first layers, of as few as it takes."""

    def layer_of(one: Storable) -> float:
        producer = grouped.graph.values[one.value].producer
        number = re.search(r"\.(\d+)(\.|$)", grouped.graph.ops[producer or 0].module)
        return int(number.group(1)) if number else float("inf")

    return first_of(grouped, [layer_of(one) for one in grouped.storables], budget)


def largest(grouped: GroupedPlan, budget: int) -> Plan | None:
    """Returns the plan that stores the largest saved values, of as few sizes as it takes."""
    return first_of(grouped, [-one.bytes for one in grouped.storables], budget)


def first_of(grouped: GroupedPlan, ranks: Sequence[float], budget: int) -> Plan | None:
    """Returns the plan that stores the values of the lowest ranks, of as few ranks as it takes."""
    levels, found = sorted(set(ranks)), None
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        some = copy.copy(grouped)
        some.__dict__.pop("least_bytes", None)
        some.storables = tuple(one for one, rank in zip(grouped.storables, ranks, strict=True) if rank <= levels[middle])
        placed = place(some, Limits(budget))
        low, high, found = (low, middle, placed) if placed is not None else (middle + 1, high, found)
    return found


def cells(row: Row) -> dict[str, object]:
    costs = {
        "recomputation": row.recomputation,
        "offload": row.offload,
        "everything": row.everything,
        "by layer": row.by_layer,
        "largest": row.largest,
        "together": row.together,
        "at full rate": row.at_full_rate,
        "at least": row.bound,
    }
    return {
        "model": row.model,
        "budget": f"{row.budget:g}",
        "link": row.link,
        **{name: percent(cost, 2) for name, cost in costs.items()},
        "on the host, GiB": f"{row.host_gib:.1f}",
        "stays": row.stored,
        "planning, s": f"{row.seconds:.1f}",
        "without": f"{row.seconds_without:.1f}",
        "least peak": f"{row.least:.3f}",
        "least without": f"{row.least_without:.3f}",
    }


def shown(rows: list[Row]) -> list[Table]:
    return [table("cost above the fastest plan, in % of the step", list(map(cells, rows)))]


if __name__ == "__main__":
    run("offload", parser(__doc__, MODELS).parse_args(), Row, measure, shown)
