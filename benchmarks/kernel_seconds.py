"""Seconds of training steps by the rules of fusion, against those by the kernels of the generated code.

    python benchmarks/kernel_seconds.py
    python benchmarks/kernel_seconds.py --only vit

Both have the same rates, so the difference is that of fusion: what a kernel computes, reads and writes. Models of the zoo are
small, and their code is C++ for this CPU. Models of `published_steps.py` have their published widths and two layers, and their
code is Triton code for a card by name. Nothing runs, and data sheets give the rates. Written to
`benchmarks/results/kernel_seconds.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import model_zoo
import torch
from model_zoo import Built
from published_steps import FEW, bert, gpt, llama, resnet, vit

import autoremat

RESULTS = Path(__file__).resolve().parent / "results"

SMALL: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: model_zoo.gpt2(FEW),
    "llama": lambda: model_zoo.llama(FEW),
    "bert": lambda: model_zoo.bert(FEW),
    "t5": lambda: model_zoo.t5(FEW),
    "vit": lambda: model_zoo.vit(FEW),
    "resnet": lambda: model_zoo.resnet("bottleneck", [1, 1, 1, 1]),
    "vgg11": model_zoo.vgg11,
}

LARGE: dict[str, Callable[[], Built]] = {
    "gpt-350m": lambda: gpt(1024, 16, 32)(FEW),
    "llama-8b": lambda: llama(FEW),
    "bert-large": lambda: bert(FEW),
    "vit-base": lambda: vit(768, 12, 192)(FEW),
    "resnet-50": lambda: resnet(256)(1),
}
CARD = "H100-80GB"


@dataclass(frozen=True)
class Row:
    """One step in seconds, by the rules of fusion and by the kernels of its code."""

    model: str
    device: str
    predicted: float
    forward: float
    backward: float
    library: float
    """Seconds of library kernels, which both have."""

    @property
    def by_code(self) -> float:
        return self.forward + self.backward

    def line(self) -> str:
        fused = (self.predicted - self.library) / (self.by_code - self.library) - 1
        return (
            f"{self.model:11} {self.device:10} {1e3 * self.predicted:10.3f} {1e3 * self.by_code:10.3f} "
            f"{self.predicted / self.by_code - 1:+8.1%} {fused:+8.1%} {self.library / self.by_code:9.1%}"
        )


HEAD = f"{'model':11} {'device':10} {'rules':>10} {'code':>10} {'error':>8} {'fused':>8} {'library':>9}"


def row(name: str, build: Callable[[], Built], card: str | None) -> Row:
    """Returns the seconds of one step, whose code is generated for the CPU or for ``card``."""
    torch._dynamo.reset()
    with torch.device("cpu" if card is None else "meta"):
        model, inputs = build()
        if card is not None:
            model, inputs = model.to(torch.bfloat16), tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    report = autoremat.explain(
        model.train(), *inputs, device=card, lower=True, options={"cost_model": "roofline", "progress": False}
    )
    assert report.code_seconds is not None
    assert report.plan is not None
    graph = report.plan.graph
    library = sum(graph.ops[index].seconds for index in report.plan.sequence if graph.ops[index].kind.value == "extern")
    return Row(name, card or "CPU", report.predicted_seconds, *report.code_seconds, library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of models")
    arguments = parser.parse_args()
    rows = []
    for models, card in ((SMALL, None), (LARGE, CARD)):
        for name, build in models.items():
            if not arguments.only or name in arguments.only:
                rows.append(row(name, build, card))
                print(rows[-1].line(), flush=True)
    legend = (
        "rules, code: ms of forward and backward. error: of the rules against the code, for the whole step and for fused "
        "kernels alone. library: share of library kernels"
    )
    text = "\n".join([HEAD, *(one.line() for one in rows), legend]) + "\n"
    if not arguments.only:
        (RESULTS / "kernel_seconds.txt").write_text(text)
        (RESULTS / "kernel_seconds.json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
