"""The memory that single expressions of generated code share or allocate, and an abstract heap for the replay of all of them:
storages, the names that refer to them, and the peaks of their bytes.
"""

import ast
from collections.abc import Callable

from autoremat.planner.memory.allocations import FREED, Event

WORKSPACE = "(workspace)"
"""Name of the workspace of the call that runs."""


class Heap:
    """Storages and the names that refer to them. A storage without names is freed.

    ``is_recorded(name)`` returns True for the variables whose storages lie in the pool of CUDA graphs.
    """

    def __init__(self, round_to: int, is_recorded: Callable[[str], bool]) -> None:
        self.names: dict[str, set[int]] = {}
        self.holders: dict[int, set[str]] = {}
        self.sizes: dict[int, int] = {}
        self.pooled: set[int] = set()
        """Storages in the pool. CUDA graphs read them where they are."""
        self.live = {False: 0, True: 0}
        """Live bytes outside of the pool (False) and in it (True)."""
        self.peak = {False: 0, True: 0}
        self.is_recorded = is_recorded
        self.planar: set[str] = set()
        """Names of images whose channels are not innermost."""
        self.events: list[Event] = []
        self.round_to = round_to

    @property
    def live_bytes(self) -> int:
        """Live bytes in the pool and outside."""
        return sum(self.live.values())

    def allocate(self, size: int, *names: str, in_pool: bool | None = None, round_to: int | None = None) -> None:
        """Allocates a storage of ``size`` bytes, rounded up, that ``names`` refer to.

        It lies in the pool if the first name is that of a recorded variable, unless ``in_pool`` says otherwise.
        """
        storage = len(self.sizes)
        in_pool = self.is_recorded(names[0]) if in_pool is None else in_pool
        round_to = round_to or self.round_to
        self.sizes[storage] = -(-size // round_to) * round_to
        if size:
            self.events.append((storage, self.sizes[storage]))
        self.holders[storage] = set(names)
        for name in names:
            self.names.setdefault(name, set()).add(storage)
        if in_pool:
            self.pooled.add(storage)
        self.live[in_pool] += self.sizes[storage]
        self.peak[in_pool] = max(self.peak[in_pool], self.live[in_pool])

    def release(self, name: str) -> None:
        """Removes ``name`` and frees the storages that no other name refers to, the last first, as Python frees a tuple."""
        for storage in sorted(self.names.pop(name, set()), reverse=True):
            self.holders[storage].discard(name)
            if not self.holders[storage]:
                self.live[storage in self.pooled] -= self.sizes[storage]
                if self.sizes[storage]:
                    self.events.append((storage, FREED))

    def copy(self, target: str, name: str, size: int) -> None:
        """Binds ``target`` to a copy of ``name``, or to its storages if all are in the pool.

        ``size`` is the size of an input that does not count as live.
        """
        known = self.names.get(name, set())
        if known <= self.pooled and (known or not size):
            self.alias(target, name)
        else:
            self.allocate(self.bytes_of(name) or size, target)

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of the storages that ``name`` refers to."""
        return sum(self.sizes[storage] for storage in self.names.get(name, ()))

    def alias(self, name: str, other: str) -> None:
        """Makes ``name`` refer to the storages of ``other``."""
        if name == other:
            return
        storages = set(self.names.get(other, set()))
        self.release(name)  # no storage is freed here that `other` refers to
        self.names[name] = storages
        for storage in storages:
            self.holders[storage].add(name)


DTYPE_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

ALIASING = ("reinterpret_tensor", "copy_if_misaligned")
"""Functions that return the storage of their first argument. The second one copies only slices of a larger tensor."""

VIEWS = frozenset(
    {
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "squeeze", "t", "transpose",
        "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
    }
)  # fmt: skip
"""ATen ops whose result is a view of their first argument. Generated code calls them for complex numbers."""


COPY_TO_HOST, COPY_FROM_HOST = "torch.ops.autoremat.copy_to_host.", "torch.ops.autoremat.copy_from_host."
WAIT_FOR_COPY = "torch.ops.autoremat.wait_for_copy_"
WAIT_FOR_COPY_TO_HOST = f"{WAIT_FOR_COPY}to_host."
"""The begins of calls of ops of :mod:`autoremat.host_memory.ops`."""


def aliased(value: ast.expr) -> str | None:
    """Returns the name whose storage ``value`` shares, or None.

    Such a value is a name, or a reinterpretation or view of one.
    """
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ALIASING:
        return aliased(value.args[0])
    if isinstance(value, ast.Call) and (called := ast.unparse(value.func)).startswith("torch.ops."):
        is_view = called.startswith("torch.ops.aten.") and called.split(".")[3] in VIEWS
        return aliased(value.args[0]) if is_view or called.startswith(WAIT_FOR_COPY) else None
    return None


def strided_bytes(value: ast.expr) -> int | None:
    """Returns the bytes of ``empty_strided_*(size, stride, dtype)``, or None for other calls and non-literal arguments."""
    if not (isinstance(value, ast.Call) and len(value.args) == 3 and called_function(value).startswith("empty_strided")):
        return None
    try:
        size, stride = ast.literal_eval(value.args[0]), ast.literal_eval(value.args[1])
    except ValueError:
        return None
    dtype = value.args[2].attr if isinstance(value.args[2], ast.Attribute) else ""
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return extent * DTYPE_BYTES.get(dtype, 8)


def is_planar(value: ast.expr) -> bool:
    """Returns True if ``value`` is a CPU buffer of images whose channels are not innermost, new or reinterpreted."""
    first = {"empty_strided_cpu": 0, "reinterpret_tensor": 1}.get(called_function(value))
    if first is None or not isinstance(value, ast.Call):
        return False
    try:
        size, stride = (ast.literal_eval(argument) for argument in value.args[first : first + 2])
    except ValueError:
        return False
    return len(size) == 4 and size[1] != 1 and stride[1] != 1


def called_function(value: ast.expr) -> str:
    """Returns the name of the function that ``value`` calls; an empty text for other expressions and for methods."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def calls_op(value: ast.expr, begin: str) -> bool:
    """Returns True if ``value`` is a call of an op whose name in the code begins with ``begin``."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(begin)
