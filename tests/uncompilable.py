"""Ways in which Dynamo does not compile a part of a step. Each is a function of a layer and its input."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

WIDTH, ROWS, TIMES = 8, 32, 2

PLACES = ("first", "middle", "loss")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


def in_a_loop(act: Callable[[Tensor], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def way(layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(TIMES):
            x = layer(x).tanh()
            act(x)
        return x

    return way


def around(context: Callable[[], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def way(layer: nn.Module, x: Tensor) -> Tensor:
        with context():
            return layer(x).tanh()

    return way


def tried(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        x = layer(x).tanh()
        torch._dynamo.graph_break()
    except ValueError:
        pass
    return x.tanh()


def branches(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x).tanh()
        if x.sum() > 1e9:
            x = x * 2
    return x


def chosen(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x).tanh()
        x = x + x[x > 0].sum()
    return x


def one_twice(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(TIMES):
        x = layer(x)
        x = Product.apply(x, x)
    return x


def averaged(layer: nn.Module, x: Tensor) -> Tensor:
    norm = averaged.norms[id(layer)]
    for _ in range(TIMES):
        x = norm(layer(x))
    return x


averaged.norms = {}  # type: ignore[attr-defined]


def recurrent(layer: nn.Module, x: Tensor) -> Tensor:
    return NETWORK(layer(x)[None])[0][0]


NETWORK = nn.LSTM(WIDTH, WIDTH)


def repeated(layer: nn.Module, x: Tensor) -> Tensor:
    return while_loop(lambda i, x: i < TIMES, lambda i, x: (i + 1, layer(x).tanh()), (torch.tensor(0), x))[1]


@torch.compiler.disable
def left(x: Tensor) -> Tensor:
    return x


KINDS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "print": (in_a_loop(lambda x: print(end="")), "print"),
    "item": (in_a_loop(lambda x: x.sum().item()), "item"),
    "graph_break": (in_a_loop(lambda x: torch._dynamo.graph_break()), "graph_break"),
    "disabled": (in_a_loop(left), "disable"),
    "retain_grad": (in_a_loop(lambda x: x.retain_grad()), "retain_grad"),
    "save_on_cpu": (around(torch.autograd.graph.save_on_cpu), "save_on_cpu|marked as skipped"),
    "file": (around(lambda: open(os.devnull)), "open|TextIOWrapper"),  # noqa: SIM115
    "try": (tried, "graph_break"),
    "branch": (branches, "[Dd]ata-dependent"),
    "chosen rows": (chosen, "shape"),
    "one tensor twice": (one_twice, "duplicate"),
    "BatchNorm(momentum=None)": (averaged, "item"),
    "LSTM": (recurrent, "LSTM"),
    "while_loop": (repeated, "compiler"),
}
"""The ways by name, each with a pattern that Dynamo's reason matches."""


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).tanh()


def step_with(kind: str, place: str) -> Callable[[Tensor], Tensor]:
    """Returns a training step of three layers whose layer at ``place`` is not compiled."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in PLACES]
    averaged.norms.update({id(layer): nn.BatchNorm1d(WIDTH, momentum=None) for layer in layers})  # type: ignore[attr-defined]
    first, middle, last = (KINDS[kind][0] if at == place else plain for at in PLACES)

    def step(x: Tensor) -> Tensor:
        x = first(layers[0], x)
        x = middle(layers[1], x)
        return last(layers[2], x).square().mean()

    return step
