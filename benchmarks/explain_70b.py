"""Seconds and memory that it takes to explain a training step of a Llama for a CUDA card that is not there.

    python benchmarks/explain_70b.py                  # 70B: 80 layers, one sequence of 8192 tokens, bfloat16
    python benchmarks/explain_70b.py --layers 8       # a smaller one
    python benchmarks/explain_70b.py --model 8b --lower    # with the code that Inductor generates

The model has no weights (meta device), and nothing runs. The result is the report, the seconds of its parts, and the largest
resident memory of this process. Written to `benchmarks/results/explain_<model>.txt` and `.json`, with `_lowered` in the name if
code was generated.
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

COMMON: dict[str, Any] = {
    "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0, "use_cache": False,
}  # fmt: skip
SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Llama 3's configurations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="70b")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--lower", action="store_true", help="also generate the code")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="H100-80GB")
    parser.add_argument("--budget", default=0.6, type=budget, help='bytes ("200GiB") or a share of the peak (0.6)')
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    sizes = SIZES[arguments.model] | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    model, tokens = build(sizes, arguments.tokens)
    built = time.perf_counter()

    def step(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    options = {"memory_budget": arguments.budget}
    report = autoremat.explain(step, tokens, options=options, device=arguments.device, lower=arguments.lower)
    end = time.perf_counter()
    figures = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "layers": sizes["num_hidden_layers"],
        "tokens": arguments.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": report.device,
        "seconds to build the model": round(built - begin, 1),
        "seconds to explain": round(end - built, 1),
        "processor seconds in all": round(time.process_time(), 1),
        "seconds to plan": round(report.planning_seconds, 1),
        "largest resident memory": format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    write(f"explain_{arguments.model}" + "_lowered" * arguments.lower, figures, report, arguments.output)


def budget(text: str) -> float | str:
    """Returns a share if ``text`` is a number, else the text, which has a unit."""
    try:
        return float(text)
    except ValueError:
        return text


def build(sizes: dict[str, int], tokens: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns Llama 3 without weights, and a batch of one sequence."""
    config = LlamaConfig(**COMMON, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        return model, torch.zeros((1, tokens), dtype=torch.int64)


def write(name: str, figures: dict[str, Any], report: autoremat.Report, folder: Path) -> None:
    """Writes a text and a JSON file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*(f"{name}: {value}" for name, value in figures.items()), "", str(report)])
    (folder / f"{name}.txt").write_text(text + "\n")
    known = {"budget_bytes", "predicted_peak_bytes", "compiled_peak_bytes", "baseline_peak_bytes",
             "minimum_peak_bytes", "lower_bound_bytes",
             "recompute_seconds", "forward_seconds", "step_seconds", "lower_bound_seconds", "ops"}  # fmt: skip
    record = figures | {name: value for name, value in json.loads(report.to_json()).items() if name in known}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
