"""Seconds by stage that `autoremat.explain` takes for the largest open models, idle and beside busy processes.

    python benchmarks/explain_large.py                        # both models, idle, then beside three busy processes
    python benchmarks/explain_large.py --only llama-405b --busy 0
    python benchmarks/explain_large.py --layers 8             # smaller ones, to try the script

The models have no weights (meta device) and one sequence of 4096 tokens in bfloat16. They are planned for an H100 by name, at
half of the peak without recomputation. Each row is a process of its own. A stage is a text of the status line without its
numbers. Written to `benchmarks/results/explain_large.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

import autoremat
from autoremat.basics import progress
from autoremat.basics.errors import BudgetInfeasible
from autoremat.basics.units import format_bytes

RESULTS = Path(__file__).resolve().parent / "results"
DEVICE, SHARE, TOKENS = "H100-80GB", 0.5, 4096
BUSY = "while True: pass"


def llama(layers: int | None) -> torch.nn.Module:
    """Returns Llama 3.1 405B."""
    sizes: dict[str, Any] = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, num_hidden_layers=layers or 126,
                         max_position_embeddings=131072, rope_theta=500000.0, use_cache=False, **sizes)  # fmt: skip
    return LlamaForCausalLM(config)


def deepseek(layers: int | None) -> torch.nn.Module:
    """Returns DeepSeek-V3 (671B), whose sizes are the configuration's defaults."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False, **({"num_hidden_layers": layers} if layers else {})))


MODELS: dict[str, Callable[[int | None], torch.nn.Module]] = {"llama-405b": llama, "deepseek-v3": deepseek}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one model instead of both")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 3], help="numbers of busy processes beside, one row each")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--alone", action="store_true", help="explains --only in this process and prints the row as JSON")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(explained(arguments.only, arguments.layers)))
        return
    rows = []
    for name in [arguments.only] if arguments.only else MODELS:
        for busy in arguments.busy:
            with busy_processes(busy):
                rows.append({"model": name, "busy processes": busy} | in_a_process(name, arguments.layers))
            write(rows, arguments.output)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs that many processes that never wait while the body runs."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def in_a_process(name: str, layers: int | None) -> dict[str, Any]:
    """Returns the row of one model, from a process of its own."""
    command = [sys.executable, __file__, "--alone", "--only", name, *(["--layers", str(layers)] if layers else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def explained(name: str, layers: int | None) -> dict[str, Any]:
    """Returns the figures of one explanation, with the seconds of each stage."""
    with torch.device("meta"):
        model = MODELS[name](layers).to(torch.bfloat16).train()
        tokens = torch.zeros((1, TOKENS), dtype=torch.int64)
    seconds: dict[str, float] = {}
    stage = note_stages(seconds)
    begin, processor = time.perf_counter(), time.process_time()
    try:
        report = autoremat.explain(lambda ids: model(input_ids=ids, labels=ids).loss, tokens, device=DEVICE,
                                   options={"memory_budget": SHARE}, advice=False)  # fmt: skip
        outcome = {"ops": report.ops, "outcome": report.summary().splitlines()[0], "cut short": report.time_limited,
                   "budget": report.budget_bytes, "predicted peak": report.predicted_peak_bytes,
                   "minimum peak": report.minimum_peak_bytes}  # fmt: skip
    except BudgetInfeasible as error:
        outcome = {"outcome": "infeasible", "budget": error.budget_bytes, "minimum peak": error.minimum_bytes,
                   "gradients": error.gradient_bytes}  # fmt: skip
    stage("")
    figures = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - begin, 1),
        "processor seconds": round(time.process_time() - processor, 1),
        "largest resident memory": format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    return figures | outcome | {"stages": {what: round(spent, 1) for what, spent in seconds.items()}}


def note_stages(seconds: dict[str, float]) -> Callable[..., None]:
    """Adds the seconds of each stage that the status line names to ``seconds`` from now on. Returns what begins a stage."""
    named, current = progress.now, ["starting", time.perf_counter()]

    def now(doing: str, *arguments: Any, **keywords: Any) -> None:
        at = time.perf_counter()
        seconds[current[0]] = seconds.get(current[0], 0.0) + at - current[1]
        current[:] = [re.split(r" [\d,]+ ops|, ", doing)[0], at]
        named(doing, *arguments, **keywords)

    for module in list(sys.modules.values()):
        if getattr(module, "now", None) is named:  # modules that are imported later find it in `progress`
            module.now = now  # type: ignore[attr-defined]
    return now


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Writes all rows, as a text and as JSON, and prints the last one."""
    texts = []
    for row in rows:
        lines = [f"{what}: {figure:,}" if isinstance(figure, int) else f"{what}: {figure}"
                 for what, figure in row.items() if what != "stages"]  # fmt: skip
        texts.append("\n".join([*lines, *(f"{spent:>9.1f} s  {what}" for what, spent in row["stages"].items())]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "explain_large.txt").write_text("\n\n".join(texts) + "\n")
    (folder / "explain_large.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(texts[-1], flush=True)


if __name__ == "__main__":
    main()
