"""One step of a rank, with its plan, its figures and the rounds of its agreement."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import nn

import autoremat
from autoremat.agreement.session import Session
from autoremat.basics.errors import find_cause
from autoremat.compiler import dynamo_backend

EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline"}
SHARE = EAGER | {"memory_budget": 0.6}


def blocks(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def step(options: dict[str, Any], width: int = 64, depth: int = 6, rows: int = 256) -> dict[str, Any]:
    """The plan and the figures of a step, with the rounds of its agreement, or its error. Its graph counts as communicating."""
    torch._dynamo.reset()
    model = blocks(width, depth)
    compiled = torch.compile(model, backend="autoremat", options=options)
    begin, rounds, true = time.monotonic(), [], Session.round
    noting = mock.patch.object(Session, "round", lambda self, topic, *given: rounds.append(topic) or true(self, topic, *given))
    try:
        with noting, mock.patch.object(dynamo_backend, "may_communicate", return_value=True):
            compiled(torch.randn(rows, width)).square().mean().backward()
    except Exception as error:
        cause = find_cause(error, autoremat.AutorematError) or error
        return {"error": type(cause).__name__, "text": str(cause), "rank": getattr(cause, "rank", None)}
    report = autoremat.reports()[-1]
    return {
        "schedule": report.plan.schedule,
        "budget": report.budget_bytes,
        "added": (report.recompute_seconds, report.step_seconds),
        "peak": report.peak_bytes,
        "seconds": time.monotonic() - begin,
        "rounds": rounds,
        "replans": report.replans,
        "gradients": [p.grad for p in model.parameters()],
    }
