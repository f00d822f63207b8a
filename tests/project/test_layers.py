"""Each package imports only from those before it, and one reads torch's private names, the environment, or warns users."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
from folders import ROOT
from layers import LAYERS, SOURCES

WITHOUT_TORCH = (*LAYERS[: LAYERS.index("torch_private")], "policies", "cli", "__main__")

PUBLIC_ENOUGH = ("torch._ops", "torch.utils._pytree", "torch.utils._python_dispatch")
"""Private by name, stable in practice, used to tell ops apart and to walk nested arguments."""


@cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of all modules, and of names taken from them, that a file imports at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the layer"
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(found)


def own_imports(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, without the prefix of the package."""
    names = {
        name.removeprefix("autoremat").removeprefix(".") for name in imports(SOURCES[module]) if name.startswith("autoremat")
    }
    return {name for name in names if name in SOURCES and name not in ("", module)}


def layer_of(module: str) -> int:
    """The number of the innermost layer that holds ``module``."""
    holding = [layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.") or not layer]
    return LAYERS.index(max(holding, key=len))


def private_names(path: Path) -> set[str]:
    """Dotted names under torch with a part that begins with one underscore, imported or used."""
    names = {name for name in imports(path) if name.startswith("torch.")}
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_a_package_imports_only_from_those_before_it():
    inner = [module for module in SOURCES if module != ""]  # the public interface, for type checkers
    assert [(module, name) for module in inner for name in own_imports(module) if layer_of(name) > layer_of(module)] == []


def test_no_modules_import_each_other_in_a_circle():
    arrows = networkx.DiGraph((module, name) for module in SOURCES if module for name in own_imports(module))
    assert list(networkx.simple_cycles(arrows)) == []


def test_only_one_package_touches_private_names_of_torch():
    allowed = {
        "torch.autograd._profiler_enabled",
        "torch.cuda.memory._record_memory_history",
        "torch.cuda.memory._snapshot",
        "torch._C",
        "torch._C._cuda_isHistoryEnabled",
    }
    others = [module for module in SOURCES if LAYERS[layer_of(module)] != "torch_private"]
    found = {module: names for module in others if (names := private_names(SOURCES[module]))}
    assert found.pop("measure.peak") <= allowed
    assert not found


def test_modules_without_torch_import_without_it():
    names = [f"autoremat.{module}" for module in SOURCES if LAYERS[layer_of(module)] in WITHOUT_TORCH and module]
    names.remove("autoremat.__main__")
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def names_in(path: Path) -> Iterator[str]:
    """Dotted names that a file uses or imports, and its texts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield repr(node.value)


def test_production_code_uses_no_mocks():
    found = {path.name for path in SOURCES.values() for name in names_in(path) if name.split(".")[0] == "unittest"}
    assert not found, "mocks are for tests"


def test_one_module_names_the_variables_of_the_environment():
    found = {path.name for path in SOURCES.values() for name in names_in(path) if name.startswith("'AUTOREMAT_")}
    assert found == {"environment.py"}, "it strips their values, and lists them for the warning of unknown ones"


def test_one_function_warns_users():
    found = {path.name for path in SOURCES.values() for name in names_in(path) if name.startswith("warnings.warn")}
    assert found == {"warn.py"}, "it finds the user's line"
