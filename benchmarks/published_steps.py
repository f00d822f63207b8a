"""Predicted seconds of training steps against published ones.

    python benchmarks/published_steps.py
    python benchmarks/published_steps.py --only gpt-125m

A row is a model, a card by name, a batch on one card, and the published throughput. The prediction is the sum over the kernels
of forward and backward by `autoremat.explain`, fused if the published step was, without a memory budget. Optimizers,
communication and the host are left out. Models of many equal layers are explained with two and with four, and the rest is
added. Models are in 16 bits, without weights (meta device). Written to `benchmarks/results/published_steps.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from model_zoo import Built, ImageLoss, TokenLoss
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import autoremat

RESULTS = Path(__file__).resolve().parent / "results"
FOUNDRY = "mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
TIMM = "huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
EXAMPLES = "NVIDIA/DeepLearningExamples, PyTorch"

FEW, MORE = 2, 4
"""Numbers of layers of the models that are explained."""


@dataclass(frozen=True)
class Step:
    """A published throughput."""

    name: str
    card: str
    build: Callable[[int], Built]
    layers: int
    items: int
    """Tokens, sequences or images of one step."""
    per_second: float
    source: str
    compiler: str = "aot_eager"
    """The code that ran: Inductor's, or one kernel for each op."""
    note: str = ""


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros((batch, length), dtype=torch.int64)


def images(batch: int) -> tuple[torch.Tensor, ...]:
    pictures = torch.zeros(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    return pictures, torch.zeros(batch, dtype=torch.int64)


def gpt(width: int, heads: int, batch: int, length: int = 2048) -> Callable[[int], Built]:
    """Returns what builds a GPT-2 of that width; its number of layers is given later."""

    def build(layers: int) -> Built:
        config = GPT2Config(vocab_size=50368, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        return TokenLoss(GPT2LMHeadModel(config)), (tokens(batch, length),)

    return build


def llama(layers: int) -> Built:
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
                         num_attention_heads=32, num_key_value_heads=8, use_cache=False)  # fmt: skip
    return TokenLoss(LlamaForCausalLM(config)), (tokens(2, 8192),)


def bert(layers: int) -> Built:
    config = BertConfig(vocab_size=30528, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
                        intermediate_size=4096, attn_implementation="eager")  # fmt: skip
    return TokenLoss(BertForMaskedLM(config)), (tokens(64, 128),)


def vit(width: int, heads: int, batch: int) -> Callable[[int], Built]:
    def build(layers: int) -> Built:
        config = ViTConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
                           hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1000,
                           attn_implementation="eager")  # fmt: skip
        return ImageLoss(ViTForImageClassification(config)), images(batch)

    return build


def resnet(batch: int) -> Callable[[int], Built]:
    def build(layers: int) -> Built:
        assert layers == 1, "ResNet-50 is explained as a whole"
        return ImageLoss(ResNetForImageClassification(ResNetConfig(num_labels=1000))), images(batch)

    return build


STEPS = (
    Step("gpt-125m", "A100-80GB", gpt(768, 12, 32), 12, 32 * 2048, 141737, FOUNDRY),
    Step("gpt-350m", "A100-80GB", gpt(1024, 16, 32), 24, 32 * 2048, 58782, FOUNDRY),
    Step("gpt-1b", "A100-80GB", gpt(2048, 16, 14), 24, 14 * 2048, 20513, FOUNDRY),
    Step("gpt-3b", "A100-80GB", gpt(2560, 32, 10), 32, 10 * 2048, 10811, FOUNDRY),
    Step("gpt-760m", "H100-80GB", gpt(1536, 12, 24), 24, 24 * 2048, 68551, FOUNDRY),
    Step("gpt-1b", "H100-80GB", gpt(2048, 16, 20), 24, 20 * 2048, 46037, FOUNDRY),
    Step("gpt-3b", "H100-80GB", gpt(2560, 32, 10), 32, 10 * 2048, 24142, FOUNDRY),
    Step("gpt-7b", "H100-80GB", gpt(4096, 32, 6), 32, 6 * 2048, 10643, FOUNDRY),
    Step("llama-8b", "H100-80GB", llama, 32, 2 * 8192, 6667, TITAN, "inductor",
         "selective checkpointing; 500 W, 2.4 TB/s"),
    Step("bert-large", "V100-32GB", bert, 24, 64, 171.52, f"{EXAMPLES}/LanguageModeling/BERT/README.md"),
    Step("vit-base", "RTX 3090", vit(768, 12, 192), 12, 192, 392.99, TIMM),
    Step("vit-large", "RTX 3090", vit(1024, 16, 64), 24, 64, 117.2, TIMM),
    Step("resnet-50", "A100-80GB", resnet(256), 1, 256, 2470,
         f"{EXAMPLES}/Classification/ConvNets/resnet50v1.5/README.md"),
    Step("resnet-50", "RTX 3090", resnet(512), 1, 512, 1218.01, TIMM),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One step, predicted and published, in seconds."""

    name: str
    card: str
    published: float
    predicted: float
    ratio: float
    note: str
    source: str


def predicted(step: Step) -> float:
    """Returns the seconds of forward and backward."""
    if step.layers == 1:
        return explained(step, 1)
    few, more = explained(step, FEW), explained(step, MORE)
    return few + (step.layers - FEW) * (more - few) / (MORE - FEW)


def explained(step: Step, layers: int) -> float:
    """Returns the seconds of a model with so many layers."""
    torch._dynamo.reset()
    dtype = torch.float16 if step.card.startswith("V100") else torch.bfloat16
    with torch.device("meta"):
        model, inputs = step.build(layers)
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    report = autoremat.explain(model.to(dtype).train(), *inputs, device=step.card, options={"compiler": step.compiler})
    return report.predicted_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of steps")
    arguments = parser.parse_args()
    rows = []
    for step in STEPS:
        if not arguments.only or step.name in arguments.only:
            published, found = step.items / step.per_second, predicted(step)
            rows.append(
                Row(
                    step.name,
                    step.card,
                    published,
                    found,
                    found / published,
                    f"{step.compiler} {step.note}".strip(),
                    step.source,
                )
            )
            print(rows[-1].name, rows[-1].card, f"{rows[-1].ratio:.2f}", flush=True)
    lines = [f"{'step':11} {'card':10} {'published':>10} {'predicted':>10} {'ratio':>6}  note; source"]
    lines += [
        f"{r.name:11} {r.card:10} {r.published:9.4f}s {r.predicted:9.4f}s {r.ratio:6.2f}  {r.note}; {r.source}" for r in rows
    ]
    lines.append(f"median of the absolute errors: {statistics.median(abs(r.ratio - 1) for r in rows):.0%}")
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.only:
        (RESULTS / "published_steps.txt").write_text(text)
        (RESULTS / "published_steps.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
