"""Step times on a CUDA device at equal peaks: Inductor, torch's budgets and checkpoints by hand, each against autoremat.

`benchmarks/gpu.py` runs this script, several times if need be. Models have their published sizes, bfloat16 weights and random
batches. The measured peak of a rival is the budget of autoremat; plain Inductor, the rival and autoremat then take steps in
turn. All compile with Inductor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from gpu_rows import Line, Rows, Unit, parser_of
from gpu_steps import WARM_STEPS, Memory, Step, in_turn, memory_of, ratio_of, summary_of, training_step
from lowering import Device
from model_zoo import ImageLoss, TokenLoss
from peaks import MARGIN_OF_MINIMUM, mebibytes
from rich.table import Table
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.basics.errors import BudgetInfeasible

aten = torch.ops.aten

EXPENSIVE = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
"""Ops whose results selective checkpoints save."""

TORCH_BUDGETS = (0.5, 0.2)
"""Torch's `activation_memory_budget`, a share of the saved activations."""

PLAIN, SELECTIVE, FULL = "Inductor", "selective checkpoints", "full checkpoints"

RIVALS = (FULL, SELECTIVE, *(f"torch budget {share}" for share in TORCH_BUDGETS), PLAIN)

ROUNDS, STEPS_PER_SAMPLE = 7, 3
ROUNDS_OF_REHEARSAL = 2


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch. For images, ``length`` is their side."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int = 0


@dataclass(frozen=True)
class Kind:
    """A model: how it is built, the class of the layers that are checkpointed by hand, its real and its tiny size."""

    build: Callable[[Size], nn.Module]
    layer: str
    real: Size
    tiny: Size
    unit: str = "tokens"


def llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 4), max_position_embeddings=size.length,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return TokenLoss(LlamaForCausalLM(config))


def gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary, bos_token_id=0, eos_token_id=0, n_embd=size.width, n_layer=size.layers,
        n_head=size.heads, n_positions=size.length, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return TokenLoss(GPT2LMHeadModel(config))


def vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, image_size=size.length, patch_size=16, num_labels=1000,
    )  # fmt: skip
    return ImageLoss(ViTForImageClassification(config))


def resnet(size: Size) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = [3, 4, 6, 3] if size.layers == 16 else [1] * size.layers
    config = ResNetConfig(
        embedding_size=size.width, hidden_sizes=[4 * size.width * 2**stage for stage in range(len(depths))], depths=depths,
        layer_type="bottleneck", num_labels=1000, out_features=None,
    )  # fmt: skip
    return ImageLoss(ResNetForImageClassification(config))


KINDS = {
    "Llama 1B": Kind(llama, "LlamaDecoderLayer", Size(16, 2048, 32, 4, 2048, 128_256), Size(2, 64, 2, 8, 32, 256)),
    "GPT-2 medium": Kind(gpt2, "GPT2Block", Size(24, 1024, 16, 8, 1024, 50_257), Size(2, 64, 2, 8, 32, 256)),
    "ViT-L": Kind(vit, "ViTLayer", Size(24, 1024, 16, 64, 224), Size(2, 64, 2, 8, 64), "images"),
    "ResNet-50": Kind(resnet, "ResNetBottleNeckLayer", Size(16, 64, 0, 128, 224), Size(2, 8, 0, 4, 64), "images"),
    "Llama 8B, 8 layers": Kind(llama, "LlamaDecoderLayer", Size(8, 4096, 32, 1, 8192, 32_000), Size(2, 64, 2, 8, 32, 256)),
}

DUELISTS = ("GPT-2 medium", "ViT-L", "ResNet-50", "Llama 1B")
"""The other model is that of `gpu_offload.py`."""


@dataclass(frozen=True)
class Contestant:
    """One way to run the step, measured. Bytes above those live when the step begins."""

    memory: Memory
    compile_seconds: float
    loss: float
    seconds: float = 0.0
    """The median of the rounds."""


@dataclass(frozen=True)
class Row:
    """One rival and autoremat at the rival's measured peak. Ratios are medians over the rounds."""

    model: str
    rival: str
    unit: str
    items: int
    """Tokens or images of a batch."""
    plain_seconds: float
    rival_result: Contestant
    our_result: Contestant
    budget_bytes: int
    replayed_bytes: int
    predicted_seconds: float
    attempts: int
    ours_to_rival: float
    rival_to_plain: float
    ours_to_plain: float
    note: str = ""


class Checkpointed(nn.Module):
    """A layer that is checkpointed by hand; with ``selective``, the results of ``EXPENSIVE`` ops are saved."""

    def __init__(self, layer: nn.Module, selective: bool) -> None:
        super().__init__()
        self.layer = layer
        self.options: dict[str, Any] = {"use_reentrant": False}
        if selective:
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, EXPENSIVE)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return checkpoint(self.layer, *arguments, **self.options, **named)


@dataclass(frozen=True)
class Workload:
    """A model on the device with a batch. All contestants share its parameters."""

    name: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    items: int

    def copy_of_model(self) -> nn.Module:
        """Returns the model as other modules with the same parameters and buffers."""
        shared = itertools.chain(self.model.parameters(), self.model.buffers())
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def checkpointed(self, selective: bool) -> nn.Module:
        model = self.copy_of_model()
        layers = [name for name, module in model.named_modules() if type(module).__name__ == KINDS[self.name].layer]
        if not layers:
            raise RuntimeError(f"{self.name} has no {KINDS[self.name].layer} to checkpoint in this version of transformers")
        for name in layers:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Checkpointed(model.get_submodule(name), selective))
        return model


@functools.lru_cache(1)
def workload(name: str, rehearsed: bool) -> Workload:
    """Returns a model in bfloat16 with its batch, initialised on the device."""
    kind = KINDS[name]
    size = kind.tiny if rehearsed else kind.real
    torch.manual_seed(0)
    torch._dynamo.reset()
    with Device.chosen, default_dtype(torch.bfloat16):
        model = kind.build(size).train()
        if kind.unit == "images":
            images = torch.randn(size.batch, 3, size.length, size.length)
            return Workload(name, model, (images, torch.randint(0, 1000, (size.batch,))), size.batch)
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
        return Workload(name, model, (tokens,), size.batch * size.length)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inductor(share: float) -> Callable[..., Any]:
    """Returns Inductor under torch's own budget, as a backend of its own: Dynamo keeps the code of each backend apart."""

    def backend(module: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return compile_fx(module, inputs)

    return backend


def compiled_rival(work: Workload, rival: str) -> Callable[..., Any]:
    if rival in (SELECTIVE, FULL):
        return torch.compile(work.checkpointed(rival == SELECTIVE), backend=inductor(1.0), dynamic=False)
    share = 1.0 if rival == PLAIN else float(rival.rpartition(" ")[2])
    return torch.compile(work.copy_of_model(), backend=inductor(share), dynamic=False)


def prepared(work: Workload, compiled: Callable[..., Any]) -> tuple[Step, Contestant]:
    """Compiles and warms up. Returns the step and its figures but its time."""
    step = training_step(work.model, compiled, work.inputs)
    gc.collect()
    begin = time.perf_counter()
    loss = float(step())
    compile_seconds = time.perf_counter() - begin
    for _ in range(WARM_STEPS - 1):
        step()
    return step, Contestant(memory_of(work.model, step), compile_seconds, loss)


@functools.lru_cache(1)
def plain(name: str, rehearsed: bool) -> tuple[Step, Contestant]:
    work = workload(name, rehearsed)
    return prepared(work, compiled_rival(work, PLAIN))


def prepared_ours(work: Workload, budget: int, **others: object) -> tuple[Step, Contestant, int, str]:
    """Returns autoremat's step and figures, its budget and a note. The smallest peak replaces a budget that is too small."""
    for attempt, note in enumerate(("", "no plan at the rival's peak: autoremat has its own smallest")):
        try:
            options = {"memory_budget": budget, "on_planning_error": "raise", **others}
            compiled = torch.compile(work.copy_of_model(), backend="autoremat", options=options, dynamic=False)
            return *prepared(work, compiled), budget, note
        except BackendCompilerFailed as error:
            if attempt or not isinstance(error.inner_exception, BudgetInfeasible):
                raise
            budget = int(error.inner_exception.minimum_bytes * MARGIN_OF_MINIMUM)
    raise AssertionError("unreachable")


def duel(name: str, rival: str, rehearsed: bool) -> Line:
    """Returns the row of one unit."""
    work = workload(name, rehearsed)
    steps: dict[str, Step] = {}
    steps[PLAIN], result = plain(name, rehearsed)
    if rival != PLAIN:
        steps[rival], result = prepared(work, compiled_rival(work, rival))
    steps["ours"], ours, budget, note = prepared_ours(work, result.memory.allocated_bytes)
    report = autoremat.reports()[-1]
    samples = in_turn(steps, ROUNDS_OF_REHEARSAL if rehearsed else ROUNDS, 1 if rehearsed else STEPS_PER_SAMPLE)
    work.model.zero_grad(set_to_none=True)
    medians = {key: summary_of(seconds).median for key, seconds in samples.items()}
    row = Row(
        model=name,
        rival=rival,
        unit=KINDS[name].unit,
        items=work.items,
        plain_seconds=medians[PLAIN],
        rival_result=replace(result, seconds=medians[rival]),
        our_result=replace(ours, seconds=medians["ours"]),
        budget_bytes=budget,
        replayed_bytes=report.compiled_peak_bytes or report.predicted_peak_bytes,
        predicted_seconds=report.predicted_seconds,
        attempts=report.replans + 1,
        ours_to_rival=ratio_of(samples["ours"], samples[rival]),
        rival_to_plain=ratio_of(samples[rival], samples[PLAIN]),
        ours_to_plain=ratio_of(samples["ours"], samples[PLAIN]),
        note=note,
    )
    return asdict(row)


def units(rehearsed: bool) -> list[Unit]:
    """Returns the units of all models. A rehearsal has all rivals of one model, and one of each other model."""
    pairs = [(name, rival) for name in DUELISTS for rival in RIVALS]
    if rehearsed:
        first, *_ = DUELISTS
        pairs = [(name, rival) for name, rival in pairs if name == first or rival == SELECTIVE]
    return [Unit(f"{name} against {rival}", functools.partial(duel, name, rival, rehearsed)) for name, rival in pairs]


def table_of(rows: Sequence[Line]) -> Table:
    """Returns each rival beside autoremat at its peak. Ratios are of step times: below 1, the first is faster."""
    table = Table(title="Peaks in MiB above the step's start, tokens or images a second, ratios of step times")
    table.add_column("model", no_wrap=True)
    table.add_column("rival", no_wrap=True)
    for column in ("its peak", "reserved", "a second", "to Inductor", "budget", "replayed", "our peak", "reserved", "a second",
                   "to Inductor", "ours to rival", "predicted, ms", "measured, ms", "compile, s", "attempts"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        theirs, ours = row["rival_result"], row["our_result"]
        peaks = [[one["memory"][f"{kind}_bytes"] for kind in ("allocated", "reserved")] for one in (theirs, ours)]
        table.add_row(
            row["model"] + " *" * bool(row["note"]),
            row["rival"],
            *map(mebibytes, peaks[0]),
            f"{row['items'] / theirs['seconds']:.0f}",
            f"{row['rival_to_plain']:.3f}",
            *map(mebibytes, (row["budget_bytes"], row["replayed_bytes"], *peaks[1])),
            f"{row['items'] / ours['seconds']:.0f}",
            *(f"{row[ratio]:.3f}" for ratio in ("ours_to_plain", "ours_to_rival")),
            *(f"{1e3 * seconds:.2f}" for seconds in (row["predicted_seconds"], ours["seconds"])),
            f"{theirs['compile_seconds']:.0f}, {ours['compile_seconds']:.0f}",
            str(row["attempts"]),
        )
    return table


def unused_text(plans: Iterable[tuple[Line, int]]) -> str:
    """Returns how many bytes of the replayed peaks were not allocated, from the measured memory and the peak of each plan."""
    unused = sorted(replayed - memory["allocated_bytes"] for memory, replayed in plans)
    return f"{unused[0]:,} to {unused[-1]:,} bytes of the replayed peaks, code headroom included, were not allocated"


def verdict(rows: Sequence[Line]) -> str:
    over = sum(row["our_result"]["memory"]["allocated_bytes"] > row["budget_bytes"] for row in rows)
    ratios = sorted(row["ours_to_rival"] for row in rows)
    notes = {row["note"] for row in rows if row["note"]}
    return "; ".join(
        [
            f"{len(rows)} duels, {over} of our peaks over their budget",
            unused_text((row["our_result"]["memory"], row["replayed_bytes"]) for row in rows),
            f"step times, ours to the rival's: from {ratios[0]:.3f} to {ratios[-1]:.3f}",
            *(f"*: {note}" for note in notes),
        ]
    )


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    Device.chosen = torch.device("cuda", torch.cuda.current_device())
    dynamo_config.recompile_limit = 1000  # the code of a model is compiled once for each contestant
    dynamo_config.accumulated_recompile_limit = 1000
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    Rows(arguments.rows).run("duels", units(arguments.rehearse), arguments.until, arguments.units)


if __name__ == "__main__":
    main()
