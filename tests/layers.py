"""The packages in the sequence of their layers, and the files of all modules."""

from pathlib import Path

from folders import ROOT

LAYERS = (
    "basics", "planner.settings", "planner.mip", "planner.graph", "planner.memory", "planner.cost", "planner.plans",
    "planner.constraints", "planner.search", "planner.exact", "planner.multigraph", "planner", "options", "report",
    # torch from here on
    "torch_private", "host_memory", "ops", "measure", "workspaces", "capture", "device_memory", "passes",
    "request", "compiler", "step_profile", "tools", "policies", "cli", "__main__", "",
)  # fmt: skip
"""A package imports from itself and from those before it."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "autoremat" else parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {
    module_of(path): path
    for folder in ("autoremat", "passes")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] != ("autoremat", "passes")  # the link to `passes/`
}
