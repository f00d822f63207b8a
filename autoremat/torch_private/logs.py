"""Torch's structured trace, which `tlparse` reads: a second, small adapter to torch's private names."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add the JSON text that ``payload`` returns to the trace of the graph that is being compiled; it is called only where
    ``TORCH_TRACE`` or ``TORCH_TRACE_DIR`` asks for a trace."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)
