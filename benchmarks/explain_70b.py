"""Seconds and memory that it takes to explain a training step of a 70B Llama for a CUDA card that is not there.

    python benchmarks/explain_70b.py                  # 80 layers, one sequence of 8192 tokens, bfloat16
    python benchmarks/explain_70b.py --layers 8       # a smaller one

The model has no weights (meta device), and nothing runs. Written to `benchmarks/results/explain_70b.txt` and `.json`: the
report, where the time went, and the largest resident memory of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoremat
from autoremat.basics.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="H100-80GB")
    parser.add_argument("--budget", default=0.6, type=budget, help='bytes ("200GiB") or a share of the peak (0.6)')
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    model, tokens = build(arguments.layers, arguments.tokens)
    built = time.perf_counter()

    def step(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    report = autoremat.explain(step, tokens, options={"memory_budget": arguments.budget}, device=arguments.device)
    end = time.perf_counter()
    figures = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "layers": arguments.layers,
        "tokens": arguments.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": report.device,
        "seconds to build the model": round(built - begin, 1),
        "seconds to explain": round(end - built, 1),
        "processor seconds in all": round(time.process_time(), 1),
        "seconds to plan": round(report.planning_seconds, 1),
        "largest resident memory": format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    write(figures, report, arguments.output)


def budget(text: str) -> float | str:
    """A share if it is a number, else text with a unit."""
    try:
        return float(text)
    except ValueError:
        return text


def build(layers: int, tokens: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Llama 3 70B's configuration without weights, and a batch of one sequence."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        return model, torch.zeros((1, tokens), dtype=torch.int64)


def write(figures: dict[str, Any], report: autoremat.Report, folder: Path) -> None:
    """explain_70b.txt and explain_70b.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*(f"{name}: {value}" for name, value in figures.items()), "", str(report)])
    (folder / "explain_70b.txt").write_text(text + "\n")
    known = {"budget_bytes", "predicted_peak_bytes", "baseline_peak_bytes", "minimum_peak_bytes", "lower_bound_bytes",
             "recompute_seconds", "forward_seconds", "step_seconds", "lower_bound_seconds", "ops"}  # fmt: skip
    record = figures | {name: value for name, value in json.loads(report.to_json()).items() if name in known}
    (folder / "explain_70b.json").write_text(json.dumps(record, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
