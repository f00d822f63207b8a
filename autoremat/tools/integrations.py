"""What other libraries need to know of this backend."""

from __future__ import annotations

from typing import Any

NAME = "AUTOREMAT"


def accept_in_accelerate() -> None:
    """Let Accelerate, and with it Hugging Face's Trainer, take "autoremat" where they ask for the name of a backend.

    They look names up in the enumeration ``DynamoBackend``, which knows only some. From now on it has ours as well, in
    this process. Not needed for a model that you compile yourself (``model.compile(backend="autoremat")``).

    Raises ``ImportError`` if Accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    if any(NAME == str(getattr(backend, "value", "")) for backend in DynamoBackend):
        return  # a later version knows it
    ours: Any = str.__new__(DynamoBackend, NAME)
    ours._name_ = ours._value_ = NAME
    otherwise = DynamoBackend._missing_

    def look_up(value: object) -> Any:
        return ours if value == NAME else otherwise(value)

    DynamoBackend._member_map_[NAME] = ours  # where copies of members are looked up by name, before Python 3.11.4
    DynamoBackend._missing_ = look_up  # the hook that enumerations have for values that they do not know
