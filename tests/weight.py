"""The weight of the project: lines by package, bytes of pages, and how far ``options`` go before the first minimum cut.

    python tests/weight.py             # the table
    python tests/weight.py --frames    # with the functions on the stack at the first minimum cut

``BUDGETS`` are what `tests/project/test_weight.py` holds. A step that deletes lowers them.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

from folders import ROOT
from layers import LAYERS, SOURCES

BUDGETS = {
    "basics": 1263,
    "capture": 1385,
    "compiler": 4188,
    "device_memory": 442,
    "host_memory": 338,
    "measure": 586,
    "ops": 735,
    "options": 361,
    "passes": 2371,
    "planner": 8948,
    "report": 1525,
    "request": 521,
    "step_profile": 825,
    "tools": 1752,
    "torch_private": 3449,
    "workspaces": 669,
    "top": 403,
    "core": 29761,
    "tests": 25000,
    "benchmarks": 7733,
}
"""Most lines of each package, of the modules beside them, of all of them, of the tests, and of the benchmarks."""


def count_lines() -> Counter[str]:
    lines: Counter[str] = Counter()
    for module, path in SOURCES.items():
        package = module.partition(".")[0] if path.parent.resolve() != ROOT / "autoremat" else "top"
        for entry in (package, "core"):
            lines[entry] += len(path.read_text().splitlines())
    for folder in ("tests", "benchmarks"):
        lines[folder] = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    return lines


def page_bytes() -> int:
    folders = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sum(page.stat().st_size for page in {page.resolve() for page in pages})


def options_way() -> tuple[list[str], list[str]]:
    """Returns the functions on the stack at the first minimum cut, and the modules that options pass until then."""
    os.environ["AUTOREMAT_CACHE_DIR"] = tempfile.mkdtemp()  # an earlier process may know the compilation
    import torch

    from autoremat.options.options import Options
    from autoremat.request.request import Request

    @cache
    def module_at(file: str) -> str | None:
        return modules.get(os.path.realpath(file))

    modules = {str(path.resolve()): module for module, path in SOURCES.items()}
    stack: list[str] = []
    visited: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        module = module_at(frame.f_code.co_filename) if event == "call" and not stack else None
        if module is None:
            return
        if module.endswith("min_cut"):
            stack.extend(own_stack(frame, module_at))
        carries = any(isinstance(value, Options | Request) or value is options for value in frame.f_locals.values())
        if carries and visited[-1:] != [module]:
            visited.append(module)

    options: dict[str, Any] = {"memory_budget": 0.7, "cost_model": "roofline", "compiler": "aot_eager"}
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)))
    compiled = torch.compile(model, backend="autoremat", options=options)
    sys.setprofile(watch)
    try:
        compiled(torch.randn(256, 32)).sum().backward()
    finally:
        sys.setprofile(None)
    return stack, visited


def own_stack(frame: FrameType | None, module_at: Callable[[str], str | None]) -> list[str]:
    names: list[str] = []
    while frame is not None:
        module = module_at(frame.f_code.co_filename)
        if module is not None:
            names.append(f"{module}:{frame.f_code.co_name}")
            if frame.f_code.co_name == "backend":
                break
        frame = frame.f_back
    return names[::-1]


def floor(module: str) -> int:
    return max(
        (place for place, layer in enumerate(LAYERS) if layer and f"{module}.".startswith(f"{layer}.")), default=len(LAYERS)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", action="store_true", help="print the stack at the first minimum cut too")
    arguments = parser.parse_args()
    lines = count_lines()
    for entry, most in BUDGETS.items():
        print(f"{entry:<16} {lines[entry]:>7,} lines of at most {most:>7,}")
    print(f"{'files':<16} {len(SOURCES):>7,}")
    print(f"{'pages':<16} {page_bytes():>7,} bytes")
    stack, visited = options_way()
    climbs = sum(floor(after) > floor(before) for before, after in zip(visited, visited[1:], strict=False))
    print(f"{'frames':<16} {len(stack):>7,} from backend to the first minimum cut")
    print(f"{'options':<16} {len(visited):>7,} places in {len(set(visited))} modules, {climbs} climbs")
    if arguments.frames:
        print("\n".join(f"  {name}" for name in stack))


if __name__ == "__main__":
    main()
