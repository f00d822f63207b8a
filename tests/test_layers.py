"""Who may import whom, read from the sources: the pure half without torch, torch's private names in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400

PURE = (
    "errors", "units", "checking", "defaults", "environment",
    "options", "columns", "copies", "fusion", "graph", "memory", "schedule", "plans", "plan_files", "replay", "showing",
    "planning", "progress", "explanation", "moments", "report", "report_text", "report_diff", "store", "cli", "__main__",
    "wrapper_code", "cpp_wrapper_code", "traffic",
    "cost", "cost.basis", "cost.devices", "cost.rates", "cost.roofline", "solvers", "solvers.mincut", "solvers.search",
    "solvers.segments", "solvers.bounds", "solvers.fill", "solvers.dag", "solvers.baselines", "solvers.event_gap",
    "solvers.highs", "solvers.improve", "solvers.ilp", "solvers.sites", "solvers.moves",
    "solvers.polish", "solvers.anneal", "solvers.stages", "frontier",
    "orders", "stable", "patterns", "policies", "structure", "pictures", "html_report",
    "steps", "steps.fronts", "steps.ledger", "steps.surveyed",
)  # fmt: skip
"""Modules that must work without torch."""

TORCH = (
    "calls", "capture", "costing", "cuda_attention", "cuda_workspace",
    "closed_loop", "declarations", "dynamic_shapes", "dynamo_backend", "eager",
    "measure", "op_rules", "op_work", "partitioner", "partitions", "preview",
    "steps.metering", "steps.recording", "steps.survey",
    "steps.watch", "timing", "timing.calibration", "timing.profiling", "timing.recipes", "timing.stopwatch",
    "timing.workspaces",
    "torch_compat", "torch_dynamo", "torch_fake", "torch_higher_order", "torch_hooks", "torch_logs", "torch_lowering",
    "torch_memory", "torch_progress", "torch_sizes", "torch_steps", "tracing", "circumstances", "breaks",
    "workspace", "loss_parts", "passes", "rehearsal", "comparison", "sizing", "integrations", "naming", "origins",
)  # fmt: skip

ADAPTERS = (
    "torch_compat", "torch_dynamo", "torch_fake", "torch_higher_order", "torch_hooks", "torch_logs", "torch_lowering",
    "torch_memory", "torch_progress", "torch_sizes", "torch_steps",
)  # fmt: skip
"""The modules that may touch torch's private names."""

PUBLIC_ENOUGH = ("torch._ops", "torch.utils._pytree", "torch.utils._python_dispatch")
"""Private by name, stable in practice, used to tell ops apart and to walk nested arguments."""


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    parts = parts[1:] if parts[0] == "autoremat" else parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {module_of(path): path for folder in ("autoremat", "passes") for path in sorted((ROOT / folder).rglob("*.py"))
           if "autoremat/passes" not in path.as_posix()}  # fmt: skip


def imports(path: Path, package: str = "autoremat") -> set[str]:
    """Absolute names of all modules (and of names taken from them) that a file imports when it runs, at any depth."""
    tree = ast.parse(path.read_text())
    only_for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = [package, *path.relative_to(ROOT / package).parent.parts][
                    : None if node.level == 1 else 1 - node.level
                ]
                base = ".".join([*parents, base]).rstrip(".")
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return found


def private_names(path: Path) -> set[str]:
    """Dotted names under torch with a part that begins with one underscore, imported or used."""
    tree = ast.parse(path.read_text())
    names = {name for name in imports(path) if name.startswith("torch.")}
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == "torch":
            names.add(".".join(["torch", *reversed(parts)]))
    return {
        name
        for name in names
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[:3])
        and not name.startswith(PUBLIC_ENOUGH)
        and not name.startswith("torch.ops.")
    }


def test_every_module_belongs_to_one_half():
    unknown = [m for m in SOURCES if m not in (*PURE, *TORCH, "") and not m.startswith("passes")]
    assert not unknown, f"add {unknown} to PURE or TORCH above"
    assert not set(PURE) - set(SOURCES)


@pytest.mark.parametrize("module", PURE)
def test_the_pure_half_imports_neither_torch_nor_the_torch_half(module):
    forbidden = ("torch", *(f"autoremat.{name}" for name in TORCH))
    found = {name for name in imports(SOURCES[module]) for bad in forbidden if name == bad or name.startswith(f"{bad}.")}
    assert not found


@pytest.mark.parametrize("module", [m for m in SOURCES if m not in ADAPTERS])
def test_only_the_adapters_touch_private_names_of_torch(module):
    allowed = {
        "measure": {
            "torch.autograd._profiler_enabled",
            "torch.cuda.memory._record_memory_history",
            "torch.cuda.memory._snapshot",
            "torch._C",
            "torch._C._cuda_isHistoryEnabled",
        }
    }
    assert not private_names(SOURCES[module]) - allowed.get(module, set())


def test_the_check_for_private_names_sees_them(tmp_path):
    for line in ("import torch._inductor.config", "from torch._functorch import partitioners", "import torch\ntorch._C.x()",
                 "from torch.autograd import _engine", "def f():\n    from torch._dynamo import reset"):  # fmt: skip
        (tmp_path / "module.py").write_text(line)
        assert private_names(tmp_path / "module.py"), line
    (tmp_path / "module.py").write_text(
        "import torch\ntorch.utils._pytree.tree_map\ntorch._ops.OpOverload\ntorch.ops.aten._softmax"
    )
    assert not private_names(tmp_path / "module.py")


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_short(module):
    assert len(SOURCES[module].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_other_files_are_short_too(folder):
    long = {p.name: n for p in (ROOT / folder).rglob("*.py") if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_pure_modules_import_without_torch():
    names = [f"autoremat.{module}" for module in PURE]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_the_package_itself_imports_without_torch():
    code = "import sys, autoremat; autoremat.Options(memory_budget='1GiB'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
