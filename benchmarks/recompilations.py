"""The growth of a process that compiles again and again, and of its cache folder.

    python benchmarks/recompilations.py [--count 1000] [--every 100]

Small functions of ever new sizes are compiled and differentiated, every eighth with Inductor and its caches, the others with
`compiler="aot_eager"`. Dynamo's compiled code is forgotten after every eighth, its own limit. For comparison, the same is
done in a process of its own with torch's backends alone. Each line: compilations, resident memory, reports that are kept, bytes
of the cache folder. Written to `benchmarks/results/recompilations.txt`.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURN = 8


def resident_bytes() -> int:
    """Returns the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_in(folder: Path) -> int:
    """Returns the bytes of all files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def recompile(count: int, every: int, ours: bool) -> None:
    """Compiles ``count`` functions and prints a line after each ``every``."""
    import torch

    import autoremat

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().exp().mean()

    for number in range(1, count + 1):
        x, weight = torch.ones(32 + number, 16), torch.ones(16, 16, requires_grad=True)
        inductor = number % TURN == 0
        if ours:
            options = {"memory_budget": "1GiB", "compiler": "inductor" if inductor else "aot_eager"}
            compiled = torch.compile(step, backend="autoremat", options=options, dynamic=False)
        else:
            compiled = torch.compile(step, backend="inductor" if inductor else "aot_eager", dynamic=False)
        compiled(x, weight).backward()
        if inductor:
            torch._dynamo.reset()
        if number % every == 0:
            gc.collect()
            kept, disk = len(autoremat.reports()), bytes_in(Path(os.environ["AUTOREMAT_CACHE_DIR"]))
            print(
                f"{number:6d}  {resident_bytes() / 2**20:8.1f} MiB  {kept:5d} reports  {disk / 2**20:8.2f} MiB on disk",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--of", choices=["autoremat", "torch"], help="only this, in this process, and write nothing")
    asked = parser.parse_args()
    if asked.of is not None:
        recompile(asked.count, asked.every, asked.of == "autoremat")
        return
    lines = []
    for of in ("autoremat", "torch"):
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                "AUTOREMAT_COST_MODEL": "roofline", "AUTOREMAT_CACHE_SIZE": "4MiB", **os.environ,
                "AUTOREMAT_CACHE_DIR": f"{folder}/autoremat", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }  # fmt: skip
            command = [sys.executable, __file__, "--count", str(asked.count), "--every", str(asked.every), "--of", of]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        lines += [f"{of}, limit of the cache {environment['AUTOREMAT_CACHE_SIZE']}", done.stdout]
        print("\n".join(lines[-2:]), flush=True)
    (ROOT / "benchmarks" / "results" / "recompilations.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
