"""Rounds and seconds of the agreement of ranks in one compilation: ``python benchmarks/agreement_rounds.py``.

Processes on this machine form a gloo group and compile one step. The rounds of a compilation and their messages are noted. In a
compilation a rank also waits for the others to plan, so the messages are sent once more while all ranks are at one point.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from processes import run_ranks, values  # noqa: E402

from autoremat.agreement.joining import session_at  # noqa: E402
from autoremat.agreement.session import Session  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "agreement_rounds"
REPETITIONS = 9

Round = tuple[str, Any, Any]
"""The topic of a round, the part of this rank and the result."""


def compile_once(options: dict[str, Any]) -> tuple[float, list[Round]]:
    """Returns the seconds of the compilation of a step, and its rounds."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)])
    rounds, true = list[Round](), Session.round

    def noting(session: Session, topic: str, part: Any, decide: Any) -> Any:
        result = true(session, topic, part, decide)
        rounds.append((topic, part, result))
        return result

    with mock.patch.object(Session, "round", noting):
        distributed.barrier()
        begin = time.perf_counter()
        torch.compile(model, backend="autoremat", options=options)(torch.randn(256, 64)).sum().backward()
    return time.perf_counter() - begin, rounds


def send_again(rounds: list[Round]) -> float:
    """Returns the median seconds in which all ranks meet and send the messages of ``rounds``."""
    found = []
    for _ in range(REPETITIONS + 1):
        distributed.barrier()
        begin = time.perf_counter()
        with session_at("a place", "auto") as session:
            for topic, part, result in rounds:
                session.round(topic, part, lambda parts, result=result: result)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def one_rank(rank: int, compiler: str, folder: str) -> dict[str, Any]:
    """Returns the rounds and the seconds of one rank, whose caches are in a folder of its own."""
    for name in ("AUTOREMAT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = str(Path(folder) / f"{name}-{rank}")
    options = {"memory_budget": 0.6, "compiler": compiler, "cost_model": "roofline"}
    seconds, rounds = compile_once(options)
    return {
        "rounds": [topic for topic, *_ in rounds],
        "bytes": sum(len(json.dumps(one)) for _, *messages in rounds for one in messages),
        "messages": send_again(rounds),
        "compilation": seconds,
    }


def main() -> None:
    table, rows = list[str](), list[dict[str, Any]]()
    table += ["Agreement of ranks in one compilation: the slowest rank", ""]
    table.append(f"{'ranks':>5}  {'compilation':<14}{'seconds':>8}  {'rounds':>6}  {'messages, s':>11}  {'bytes':>7}  topics")
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            for name, compiler in (("uncompiled", "aot_eager"), ("Inductor", "inductor"), ("Inductor again", "inductor")):
                found = values(run_ranks(one_rank, ranks, args=(compiler, folder), timeout=600))
                row = {key: max(one[key] for one in found) for key in ("compilation", "messages", "bytes")}
                row |= {"ranks": ranks, "case": name, "rounds": found[0]["rounds"]}
                rows.append(row)
                figures = f"{row['compilation']:>8.2f}  {len(row['rounds']):>6}  {row['messages']:>11.4f}  {row['bytes']:>7,}"
                table.append(f"{ranks:>5}  {name:<14}{figures}  {', '.join(row['rounds'])}")
    text = "\n".join(table) + "\n"
    RESULTS.with_suffix(".txt").write_text(text)
    RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=200).print(text, markup=False, highlight=False)


if __name__ == "__main__":
    from agreement_rounds import main as by_name  # the processes import the functions under the module's name

    by_name()
