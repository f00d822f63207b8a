"""Translates Inductor's C++ wrapper (``cpp_wrapper=True``) to a Python wrapper with the same allocations, aliases and frees.

The C++ function has one statement per line, in few forms. ``aoti_torch_empty_strided``, or a kernel that writes a handle,
allocates a tensor. ``reinterpret_tensor_wrapper`` and ``std::move`` share its storage, and ``reset`` frees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BODY = re.compile(r"void inductor_entry_impl\((.*?)\n} // inductor_entry_impl", re.DOTALL)
BRANCHES = re.compile(r"^\s*(while|for) \(|^\s*} else \{|alloc_from_pool", re.MULTILINE)
"""Branches and memory pools. With them, the sequence of lines is not the sequence of allocations."""

NUMBERS = re.compile(r"int64_t (int_array_\w+)\[\] = \{(.*)\};")
EMPTY = re.compile(
    r"aoti_torch_empty_strided\w*\(\d+, (\w+), (\w+), "
    r"cached_torch_dtype_(\w+), cached_torch_device_type_(\w+), .*&(\w+)_handle\)"
)
SHARED = re.compile(r"auto (\w+) = .*?reinterpret_tensor_wrapper\((\w+), \d+, (\w+), (\w+), .*?(?:; (\w+)\.reset\(\);.*)?$")
MOVED = re.compile(r"auto (\w+) = std::move\((\w+)\);")
FREED = re.compile(r"(\w+)\.reset\(\);")
NAMED_TWICE = re.compile(r"aoti_torch_new_tensor_handle\((\w+), &(\w+)\)")
KERNEL = re.compile(r"aoti_torch_(?:cpu|cuda|xpu|mps|mkldnn)_(\w+?)(_out)?\((.*)\)\);")
BY_NAME = re.compile(
    r'(?:aoti_torch_call_dispatcher|findSchemaOrThrow)\("\w+::(\w+)"|PyUnicode_FromString\("torch\.ops\.\w+\.(\w+)'
)
HANDLE = re.compile(r"&(\w+)_handle\b")
DECLARED = re.compile(r"RAIIAtenTensorHandle (\w+);")
HELD = re.compile(r"RAIIAtenTensorHandle (\w+)\((\w+)_handle\);")
UNKNOWN = "unknown"
ARGUMENT = re.compile(r"(?:RAIIAtenTensorHandle\()?([A-Za-z_]\w*)\)?(?:, |$)")


def as_python(source: str) -> str | None:
    """Returns a Python function ``call`` with the same allocations as the C++ function in ``source``.

    Returns None if that function is missing, branches or uses memory pools.
    """
    body = BODY.search(source)
    if body is None or BRANCHES.search(body[1]):
        return None
    return "\n    ".join(["def call(args):", *_statements(body[1].splitlines()), "return ()\n"])


def _statements(lines: list[str]) -> Iterator[str]:
    """Yields Python statements for the lines that allocate, share or free tensors."""
    arrays: dict[str, str] = {}
    """Sizes and strides by name, as text of tuples."""
    others: dict[str, str] = {}
    """For each second handle of a tensor, the name of the tensor. Such handles serve one call."""
    made: set[str] = set()
    pending: list[str] = []
    """Results that are declared before the call, by name, of the op that computes them."""
    for line in lines:
        if numbers := NUMBERS.search(line):
            arrays[numbers[1]] = _tuple(numbers[2])
        elif empty := EMPTY.search(line):
            size, stride, dtype, device, name = empty.groups()
            yield f"{name} = empty_strided_{device}({arrays.get(size, UNKNOWN)}, {arrays.get(stride, UNKNOWN)}, torch.{dtype})"
            made.add(name)
        elif shared := SHARED.search(line):
            name, other, size, stride, freed = shared.groups()
            yield f"{name} = reinterpret_tensor({other}, {arrays.get(size, UNKNOWN)}, {arrays.get(stride, UNKNOWN)}, 0)"
            yield from [f"del {freed}"] if freed else []
        elif moved := MOVED.search(line):
            yield f"{moved[1]} = {moved[2]}"
            yield f"del {moved[2]}"
        elif again := NAMED_TWICE.search(line):
            others[again[2]] = again[1]
        elif kernel := KERNEL.search(line):
            results = HANDLE.findall(kernel[3])
            made.update(results)
            first = [others.get(name, name) for name in _first_names(kernel[3])]
            yield from _call(kernel[1], results, [f"out={name}" for name in first[:1]] if kernel[2] else first)
        elif declared := DECLARED.search(line):
            pending.append(declared[1])
        elif by_name := BY_NAME.search(line):
            yield from _call(by_name[1] or by_name[2], pending, [])
            pending = []
        elif (held := HELD.search(line)) and held[2] not in made:
            yield f"{held[1]} = handed_over()"
        elif freed := FREED.findall(line):
            yield f"del {', '.join(freed)}"


def _tuple(numbers: str) -> str:
    """Returns the numbers of an array as text of a tuple, or ``UNKNOWN`` if they are not constants."""
    constants = [number.strip().rstrip("L") for number in numbers.split(",") if number.strip()]
    return f"({''.join(f'{number}, ' for number in constants)})" if all(map(str.isdecimal, constants)) else UNKNOWN


def _first_names(arguments: str) -> list[str]:
    found: list[str] = []
    rest = arguments
    while len(found) < 2 and (argument := ARGUMENT.match(rest)):
        found.append(argument[1])
        rest = rest[argument.end() :]
    return found


def _call(name: str, results: list[str], arguments: list[str]) -> Iterator[str]:
    """Yields a call of the op and the unpacking of its results."""
    call = f"torch.ops.aten.{name}({', '.join(arguments)})"
    if not results:
        yield call
        return
    whole = f"of_{results[0]}"
    yield f"{whole} = {call}"
    for number, result in enumerate(results):
        yield f"{result} = {whole}[{number}]"
    yield f"del {whole}"
