"""The table of torch's private names: each row holds on the torch that runs, and the package uses no other private name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest
import torch
import torch._higher_order_ops  # registers the higher-order ops
import torch.distributed.tensor  # noqa: F401  # imported here, because its first use warns of other packages
from layers import SOURCES

from autoremat.basics.errors import UnsupportedTorchError
from autoremat.torch_private import names
from autoremat.torch_private.name_table import NAMES
from autoremat.torch_private.names import read, resolve
from autoremat.torch_private.private_name import MINOR, PrivateName

TABLE = SOURCES["torch_private.name_table"]

DOTTED = {re.sub(r"[:!]", ".", row.where.partition("(")[0]) for row in NAMES}
PARTS = {part for row in NAMES for part in re.findall(r"\w+", row.where)}

BY_NAME = ("getattr", "hasattr", "hooked", "substituted", "unsubstituted", "mock.patch.object")
"""Functions that take an object and the name of its attribute."""

OTHERS = frozenset({"_getframe", "_member_map_", "_missing_", "_name_", "_repr_html_", "_value_"})
"""Attributes that begin with an underscore, of Python and of other packages."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_op(expression: str) -> bool:
    return expression.startswith(("torch.ops.", "aten.", "prims."))


# -- rows ----------------------------------------------------------------------------------------------------------------


def is_there(row: PrivateName) -> bool:
    try:
        row.look_up()
    except (ImportError, AttributeError, LookupError):
        return False
    return True


def refusal_of(row: PrivateName) -> str:
    """Returns why torch's function does not take what the row passes to it; empty if it does."""
    signature, passed = inspect.signature(row.look_up()), row.signature.removesuffix("...").strip("(), ").split(", ")
    by_keyword = {name.rstrip("="): None for name in passed if name.endswith("=")}
    try:
        signature.bind(*(name for name in passed if name and not name.endswith("=")), **by_keyword)
    except TypeError as error:
        return f"{row.where}: {error}"
    is_whole = row.signature.endswith("...") or len(signature.parameters) == len(list(filter(None, passed)))
    return "" if is_whole else f"{row.where}: has other parameters than {row.signature}: {signature}"


def test_torch_has_each_name_in_the_versions_of_its_row():
    assert [row.where for row in NAMES if is_there(row) != row.is_expected] == []


def test_functions_of_torch_take_what_the_rows_pass():
    assert list(filter(None, (refusal_of(row) for row in NAMES if row.signature and row.is_expected))) == []


def test_each_place_has_one_row():
    assert len({row.where for row in NAMES}) == len(NAMES)


# -- completeness --------------------------------------------------------------------------------------------------------


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted names under torch that a file imports or uses, also under other names of its own."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"

    def full(node: ast.AST) -> str:
        first, _, rest = ast.unparse(node).partition(".")
        return ".".join(filter(None, (known.get(first, first), rest)))

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield full(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME and isinstance(node.args[1], ast.Constant):
            yield f"{full(node.args[0])}.{node.args[1].value}"


def unlisted(tree: ast.AST) -> set[str]:
    """Returns the private names of torch that a file uses and the table lacks. A row covers the whole of its object."""
    used = {name for name in torch_names(tree) if name.startswith("torch.") and re.fullmatch(r"[\w.]+", name)}
    private = {name for name in used if any(map(is_private, name.split("."))) and not is_op(name)}
    holding = {name.rsplit(".", number)[0] for name in DOTTED for number in range(1, name.count(".") + 1)}
    return {name for name in private - holding if not any(f"{name}.".startswith(f"{row}.") for row in DOTTED)}


def texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def private_attributes(tree: ast.AST) -> set[str]:
    """Returns the private attributes of objects that are not the file's own."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)]
    return {node.attr for node in found if ast.unparse(node.value) not in ("self", "cls") and not is_op(ast.unparse(node))}


def functions(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    return {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def test_the_table_has_all_private_names_of_torch(trees):
    assert {module: found for module, tree in trees.items() if (found := unlisted(tree))} == {}


def test_the_table_has_all_private_attributes_of_torchs_objects(trees):
    own = set().union(*map(functions, trees.values()))
    assert set().union(*map(private_attributes, trees.values())) - own - OTHERS - PARTS == set()


def test_the_table_has_all_places_that_the_package_asks_for(trees):
    places = {text for tree in trees.values() for text in texts(tree) if re.match(r"torch(\.\w+)*[:!]\S", text)}
    assert places <= set(names.BY_PLACE)


def test_the_table_has_all_private_names_that_are_written_as_text(trees):
    written = set().union(*(texts(tree) for module, tree in trees.items() if module.startswith("torch_private.")))
    assert {text for text in written if re.fullmatch(r"_[a-z]\w*", text)} <= PARTS


def test_the_table_has_no_name_that_the_package_does_not_use():
    words = {word for path in SOURCES.values() if path != TABLE for word in re.findall(r"\w+", path.read_text())}
    assert [row.where for row in NAMES if re.findall(r"\w+", row.where)[-1] not in words] == []


def test_no_default_hides_that_torch_lacks_a_name(trees):
    for module, tree in trees.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and module.startswith("torch_private.")]
        defaults = [node.args[1] for node in calls if ast.unparse(node.func) == "getattr" and len(node.args) == 3]
        hidden = [name.value for name in defaults if isinstance(name, ast.Constant) and not name.value.startswith("__")]
        suppressed = [ast.unparse(node) for node in calls if ast.unparse(node.func).endswith("suppress")]
        assert hidden + [text for text in suppressed if "AttributeError" in text] == [], module


@pytest.mark.parametrize("line", [
    "import torch._inductor.no_such", "from torch._functorch import no_such", "import torch\ntorch._C._no_such()",
    "def f():\n    from torch._functorch import config as settings\n    settings.no_such",
    "from torch._inductor import scheduler\nsubstituted(scheduler, 'no_such', print)",
])  # fmt: skip
def test_the_check_of_the_table_sees_a_name_that_it_lacks(line):
    assert unlisted(ast.parse(line))


# -- the resolver --------------------------------------------------------------------------------------------------------

GONE = (
    "torch._no_such", "torch._C:_no_such", "torch._inductor.graph:GraphLowering.no_such",
    "torch._dynamo.output_graph!no such text", "torch._functorch.compile_utils:fx_graph_cse(no_such)",
)  # fmt: skip


@pytest.mark.parametrize("where", GONE)
def test_a_name_that_torch_lacks_is_an_error_unless_its_row_says_so(where, monkeypatch):
    monkeypatch.setitem(names.BY_PLACE, where, PrivateName(where, "tests"))
    for look_up in (resolve, lambda place: read(torch, place)):
        with pytest.raises(UnsupportedTorchError, match=re.escape(f"{torch.__version__}, which has no {where} (for tests)")):
            look_up(where)
    for limits in ({"first": MINOR + 1}, {"last": MINOR - 1}):
        row = PrivateName(where, "tests", **limits)
        monkeypatch.setitem(names.BY_PLACE, where, row)
        assert not row.is_required
        assert resolve(where) is None


def test_a_place_without_a_row_is_an_error():
    with pytest.raises(KeyError):
        resolve("torch:Tensor")


def test_names_are_resolved_to_what_they_stand_for():
    assert resolve("torch._C:_functions.AccumulateGrad.variable") is torch._C._functions.AccumulateGrad.variable
    assert resolve("torch._inductor.graph:GraphLowering.graph_inputs") == "graph_inputs"
    assert resolve("torch._dynamo.output_graph!_dynamo_source") == "_dynamo_source"
    assert resolve("torch.distributed.pipelining.schedules:PipelineScheduleMulti.step(return_outputs)") == "return_outputs"


def test_an_attribute_is_read_from_objects_that_have_it():
    place = "torch._library.custom_ops:CustomOpDef._opoverload"
    assert read(torch.library.custom_op("names::read", print, mutates_args=(), schema="() -> ()"), place) is not None
    assert read(torch.ops.aten.add, place, "no custom op") == "no custom op"


class Caller:
    """A class whose method calls one that is renamed, and reads an attribute of instances."""

    def call(self) -> None:
        self.renamed(self.attribute)


def test_a_function_that_code_only_calls_is_not_there():
    assert PrivateName(f"{__name__}:Caller.attribute", "tests").look_up() == "attribute"
    with pytest.raises(AttributeError):
        PrivateName(f"{__name__}:Caller.renamed", "tests", "self").look_up()
