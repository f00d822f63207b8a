"""Small sources in the form that Inductor generates, and the peak of their replay."""

import textwrap
from collections.abc import Mapping
from typing import Any

from autoremat.planner.memory.wrapper_replay import replay

FLOAT = "torch.float32"


def replay_peak(*arguments: Any, **options: Any) -> int | None:
    """The bytes that the code needs."""
    replayed = replay(*arguments, **options)
    return None if replayed is None else replayed.pool_bytes + replayed.other_bytes


def peak(body: str, inputs: Mapping[str, int] = {}, sizes: Mapping[str, int] = {}, held=(), round_to: int = 1) -> int | None:
    """The peak of `def call(args)` with `body`; `inputs` are the bytes of what counts, `sizes` those of extern results."""
    source = "def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return replay_peak(source, inputs, lambda name: sizes.get(name, 0), held, round_to)


def empty(elements: int, dtype: str = FLOAT) -> str:
    return f"empty_strided_cpu(({elements},), (1,), {dtype})"
