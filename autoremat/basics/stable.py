"""Converts values to data that is equal in every process, for cache keys."""

import json
import re


def stable(value: object) -> object:
    """Returns ``value`` as JSON data that is equal in every process: without addresses and hash order."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [stable(one) for one in value]
        case set() | frozenset():
            return sorted(json.dumps(stable(one), sort_keys=True) for one in value)
        case dict():
            return {str(key): stable(one) for key, one in value.items()}
    if callable(uuid := getattr(value, "uuid", None)) and not isinstance(value, type):
        return [_qualified_name(type(value)), stable(uuid())]  # torch's custom passes declare their version by `uuid`
    if callable(value) and hasattr(value, "__qualname__"):
        return _qualified_name(value)
    return [_qualified_name(type(value)), re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))]


def _qualified_name(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
