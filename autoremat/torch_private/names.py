"""Looks up the private names of torch in the table of :mod:`autoremat.torch_private.name_table`."""

from __future__ import annotations

from typing import Any

import torch

from autoremat.basics.errors import UnsupportedTorchError
from autoremat.torch_private.name_table import NAMES

BY_PLACE = {row.where: row for row in NAMES}


def resolve(where: str) -> Any:
    """Returns the object at a place of the table; None if the table says that this torch lacks it.

    The result is the name itself for a parameter, and the text for text. Raises ``UnsupportedTorchError`` if this torch should
    have the name and lacks it.
    """
    row = BY_PLACE[where]
    if not row.is_expected:
        return None
    try:
        return row.look_up()
    except (ImportError, AttributeError, LookupError) as error:
        raise UnsupportedTorchError(torch.__version__, f"{row.where} (for {row.lost})") from error


def read(owner: object, where: str, default: Any = None) -> Any:
    """Returns the attribute of ``owner`` whose name is the last part of a place of the table; ``default`` if it has none.

    The attribute may be missing because ``owner`` is of another kind. Raises the errors of :func:`resolve`.
    """
    resolve(where)
    return getattr(owner, where.replace("!", ".").rpartition(".")[2], default)
