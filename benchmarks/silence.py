"""The longest silence while a first budgeted step compiles: at a terminal, in a log, in a notebook.

    python benchmarks/silence.py --blocks 30 --output benchmarks/results/silence.txt

Each outlet gets a process of its own with empty caches. The device is therefore calibrated, the step planned, and all code
generated and compiled. All text on standard error is noted with the second at which it arrives. The terminal is a
pseudo-terminal; the notebook is a process that takes itself for a kernel of IPython's.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

OUTLETS = ("terminal", "log", "notebook")
LINES_SHOWN = 60
STEP = """
import sys, time, types
if {notebook}:
    sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
import torch, autoremat
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

torch.manual_seed(0)
model, x = nn.Sequential(*(Block(32) for _ in range({blocks}))), torch.randn(256, 32)
def loss(x):
    return model(x).square().mean()
compiled = torch.compile(loss, backend="autoremat", options={{"memory_budget": 0.6, **{options!r}}})
print("begin", time.time(), flush=True)
compiled(x).backward()
print("end", time.time(), autoremat.reports()[-1].ops, flush=True)
"""
STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Heard:
    """The output at one outlet, with its times."""

    outlet: str
    ops: int
    seconds: float
    longest_silence: float
    outputs: int
    lines: tuple[str, ...]
    """Each with its second; of those that differ in figures only, the first."""

    def __str__(self) -> str:
        head = f"{self.outlet}: {self.ops} ops, first step {self.seconds:.0f} s, {self.outputs} outputs"
        return "\n".join([f"{head}, longest silence {self.longest_silence:.1f} s", *(f"    {line}" for line in self.lines)])


def listen(outlet: str, blocks: int, options: dict[str, object]) -> Heard:
    """Returns the output of the step in a process whose standard error is ``outlet``."""
    script = STEP.format(notebook=outlet == "notebook", blocks=blocks, options=options)
    with tempfile.TemporaryDirectory() as folder:
        caches = {"AUTOREMAT_CACHE_DIR": f"{folder}/autoremat", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        environment = {**os.environ, **caches, "TERM": "xterm", "COLUMNS": "160", "AUTOREMAT_PROGRESS": "1"}
        master, slave = pty.openpty() if outlet == "terminal" else os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=slave, env=environment, text=True
        )  # fmt: skip
        os.close(slave)
        chunks = chunks_of(master)
        assert process.stdout is not None
        marks = process.stdout.read().split()
        if process.wait() != 0:
            raise RuntimeError("".join(text for _, text in chunks))
    begin, end, ops = float(marks[1]), float(marks[3]), int(marks[4])
    inside = [(at, text) for at, text in chunks if begin <= at <= end]
    moments = [begin, *(at for at, _ in inside), end]
    silence = max(later - earlier for earlier, later in zip(moments, moments[1:], strict=False))
    return Heard(outlet, ops, end - begin, silence, len(inside), tuple(different_lines(inside, begin)))


def chunks_of(source: int) -> list[tuple[float, str]]:
    """Returns all text that arrives, with the time."""
    found = []
    with os.fdopen(source, "rb", buffering=0) as stream:
        while True:
            try:
                data = stream.read(1 << 16)
            except OSError:  # the other end of a pseudo-terminal is closed
                break
            if not data:
                break
            found.append((time.time(), data.decode(errors="replace")))
    return found


def different_lines(chunks: list[tuple[float, str]], begin: float) -> list[str]:
    """Returns the lines whose words differ from those of the line before."""
    found, last = [], ""
    for at, chunk in chunks:
        for piece in re.split(r"[\r\n]+", STEERING.sub("", chunk)):
            text = piece[piece.find("autoremat") :].strip() if "autoremat" in piece else piece.strip()
            words = re.sub(r"[\d.,]+", "", text.partition("about")[0])
            if text and words != last:
                found.append(f"{at - begin:5.1f} s  {text}")
                last = words
    return found[:LINES_SHOWN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=30, help="residual blocks; 30 make about 1,000 ops")
    parser.add_argument("--outlets", nargs="+", choices=OUTLETS, default=list(OUTLETS))
    parser.add_argument("--roofline", action="store_true", help="do not calibrate")
    parser.add_argument("--output", type=Path, help="also write what was heard to this file")
    chosen = parser.parse_args()
    options = {"cost_model": "roofline"} if chosen.roofline else {}
    found = []
    for outlet in chosen.outlets:
        found.append(listen(outlet, chosen.blocks, options))
        print(found[-1], flush=True)
    if chosen.output is not None:
        chosen.output.write_text("\n\n".join(map(str, found)) + "\n")


if __name__ == "__main__":
    main()
