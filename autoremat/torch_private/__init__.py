"""The only importer of torch's private names. It decides nothing about plans.

The import raises ``UnsupportedTorchError`` unless the package supports the torch version. ``AUTOREMAT_NEWER_TORCH=1`` lets
later versions in, to see what they break.
"""

from __future__ import annotations

import re

import torch

from autoremat.basics.environment import NEWER_TORCH, said
from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError


def check_torch_version(version: str = torch.__version__) -> None:
    """Raises ``UnsupportedTorchError`` unless the package supports the torch version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    minor = int(match[2]) if match is not None and int(match[1]) == 2 else -1
    if minor not in SUPPORTED_MINORS and (minor < SUPPORTED_MINORS.stop or said(NEWER_TORCH) != "1"):
        raise UnsupportedTorchError(version)


check_torch_version()
