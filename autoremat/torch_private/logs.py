"""Torch's private name for its structured trace, which `tlparse` reads."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds the JSON text of ``payload()`` to the trace of the graph that is being compiled.

    ``payload`` is called only if ``TORCH_TRACE`` or ``TORCH_TRACE_DIR`` asks for a trace.
    """
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)
