"""The only importer of torch's private names, which ``name_table.py`` lists. It decides nothing about plans.

The import raises ``UnsupportedTorchError`` unless the package supports the torch version.
"""

from __future__ import annotations

import re

import torch

from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError


def check_torch_version(version: str = torch.__version__) -> None:
    """Raises ``UnsupportedTorchError`` unless the package supports the torch version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or int(match[1]) != 2 or int(match[2]) not in SUPPORTED_MINORS:
        raise UnsupportedTorchError(version)


check_torch_version()
