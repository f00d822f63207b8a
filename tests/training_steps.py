"""Training steps in all the ways people write them. A step gets ``compile_``, trains, and returns numbers to compare."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[[Compile], list[Tensor]]

WIDTH, ROWS = 16, 64
STEPS: dict[str, Step] = {}
"""All steps by name."""


def step(function: Step) -> Step:
    """Adds ``function`` to the steps."""
    STEPS[function.__name__] = function
    return function


def rows(*shape: int, gradient: bool = False) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH))).requires_grad_(gradient)


def layers(count: int = 3) -> nn.Sequential:
    """Linear layers with nonlinearities between, so that there is something to recompute."""
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def numbers(*things: object) -> list[Tensor]:
    """Buffers of tensors, of the gradients of leaves among them, and of all that modules hold."""
    found: list[Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += numbers(*thing.parameters(), *thing.buffers())
        elif isinstance(thing, Tensor):
            found.append(thing.detach().clone())
            if thing.is_leaf and thing.grad is not None:
                found.append(thing.grad.clone())
    return found


def train(model: nn.Module, function: Callable[..., Tensor], *inputs: Any, rounds: int = 2) -> list[Tensor]:
    """Rounds of a loss and its backward, gradients added up; the seed is the same in each."""
    losses = []
    for _ in range(rounds):
        torch.manual_seed(1)
        loss = function(*inputs)
        loss.backward()
        losses.append(loss)
    return numbers(*losses, *inputs, model)


def simple(make: Callable[[], nn.Module], forward: Callable[[nn.Module, Tensor], Tensor], *shape: int) -> Step:
    """A step of a model whose ``forward`` gives what the loss is made of."""

    def run(compile_: Compile) -> list[Tensor]:
        model = make()
        return train(model, compile_(lambda x: forward(model, x).square().mean()), rows(*shape, gradient=True))

    return run


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "channel_dropout": lambda x: F.dropout1d(x[None], 0.3)[0],
    "attention_dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x * torch.randn(ROWS, WIDTH),
    "normal": lambda x: x + torch.normal(x.detach(), 0.1),
    "randperm": lambda x: x[torch.randperm(ROWS)],
    "multinomial": lambda x: x[torch.multinomial(x.detach().softmax(0)[:, 0], ROWS, replacement=True)],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True) * x,
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
}


@step
def random_numbers(compile_: Compile) -> list[Tensor]:
    """Layers with all these between them; the same seed gives the same numbers."""
    model = layers(len(RANDOM))

    def loss(x: Tensor) -> Tensor:
        for layer, draw in zip(model[::2], RANDOM.values(), strict=True):
            x = torch.tanh(draw(layer(x).exp().clamp(max=4)))
        return x.exp().mean()

    first, second, *others = train(model, compile_(loss), rows(gradient=True))
    assert torch.equal(first, second)
    return [first, *others]


STEPS |= {
    "batch_norm": simple(
        lambda: nn.Sequential(layers(), nn.BatchNorm1d(WIDTH), layers(), nn.BatchNorm1d(WIDTH, momentum=None), layers()),
        lambda m, x: m(x).exp(),
    ),
    "instance_norm": simple(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Conv1d(4, 4, 3)),
        lambda m, x: m(x).exp(), 4, 2, WIDTH,
    ),
    "spectral_norm": simple(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, 4)),
        lambda m, x: m(x),
    ),
    "weight_norm": simple(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), layers()),
        lambda m, x: m(x),
    ),
    "module_used_twice": simple(layers, lambda m, x: m(m(x) + x)),
    "embedding_as_output": simple(
        lambda: nn.Embedding(WIDTH, WIDTH),
        lambda m, x: F.linear(F.linear(m(x.detach().argmax(-1)) + x, m.weight).tanh().exp(), m.weight).log_softmax(-1),
    ),
}  # fmt: skip


@step
def writing_in_place(compile_: Compile) -> list[Tensor]:
    model, mask = layers(), torch.arange(WIDTH) % 3 == 0

    def loss(x: Tensor) -> Tensor:
        hidden = (model(x) + 1).mul_(2).add_(1)
        hidden = F.relu_(hidden) * 1.5
        hidden[:, mask] = hidden[:, :1].exp()
        hidden[0] = 1.0
        hidden.masked_fill_(hidden > 3, 0.5)
        view = hidden.view(-1)
        view[::2].mul_(0.5)
        return (model(hidden) + 1).index_add_(0, torch.tensor([1, 1]), hidden[:2]).exp().mean()

    return train(model, compile_(loss), rows(gradient=True))


@step
def writing_to_inputs(compile_: Compile) -> list[Tensor]:
    """To a tensor that a call gets, and to a module's own."""
    model, history = layers(), torch.zeros(WIDTH)
    model.register_buffer("count", torch.zeros(()))

    def forward(x: Tensor, history: Tensor) -> Tensor:
        hidden = model(x)
        history.mul_(0.9).add_(hidden.detach().mean(0))
        model.count += 1
        return (model(hidden + history) * hidden + history).exp().mean()

    compiled, leaf = compile_(forward), rows(gradient=True)
    losses = [compiled(leaf, history) for _ in range(3)]
    torch.stack(losses).sum().backward()
    return numbers(*losses, leaf, history, model)


@step
def writing_to_inputs_with_gradients(compile_: Compile) -> list[Tensor]:
    """To a result of ops before, through which gradients go: torch writes to it only after the forward."""
    model, root = layers(), rows(gradient=True)

    def forward(x: Tensor, state: Tensor) -> Tensor:
        hidden = torch.exp(model(x) + state)
        state.mul_(0.5)
        return (model(hidden) + state).exp().mean()

    compiled, x, state = compile_(forward), rows(gradient=True), root * 1.0
    losses = [compiled(x, state) for _ in range(2)]
    (torch.stack(losses).sum() + state.sum()).backward()
    return numbers(*losses, x, root, state, model)


@step
def writing_to_an_output(compile_: Compile) -> list[Tensor]:
    """What a compiled function returned is the caller's to write to, where autograd lets it."""
    model = layers()
    loss, hidden = compile_(lambda x: ((h := model(x)).exp().mean(), h.detach().clone()))(rows())
    hidden.zero_()
    loss.backward()
    return numbers(loss, hidden, model)


class Cube(torch.autograd.Function):
    """Saves an input, an output and a number; one result has no gradient."""

    @staticmethod
    def forward(context, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        result, sign = x**3 * scale, x.sign()
        context.save_for_backward(x, result)
        context.mark_non_differentiable(sign)
        context.scale = scale
        return result, sign

    @staticmethod
    def backward(context, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        x, result = context.saved_tensors
        return gradient * (3 * x.square() * context.scale + 0.1 * result), None


@step
def functions_of_the_user(compile_: Compile) -> list[Tensor]:
    model = layers()

    def loss(x: Tensor) -> Tensor:
        result, sign = Cube.apply(model(x), 0.5)
        return (model(result) * sign).exp().mean()

    return train(model, compile_(loss), rows(gradient=True))


@step
def without_gradient_in_between(compile_: Compile) -> list[Tensor]:
    """A frozen teacher, a straight-through estimator and an average of weights inside one step."""
    model = layers()
    teacher = copy.deepcopy(model)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
            for mine, average in zip(model.parameters(), teacher.parameters(), strict=True):
                average.lerp_(mine, 0.1)
        hidden = model(x)
        rounded = hidden + (hidden.round() - hidden).detach()
        return F.mse_loss(model(rounded), target) + hidden.exp().mean()

    return [*train(model, compile_(loss), rows(gradient=True)), *numbers(teacher)]


@step
def results_that_are_no_tensors(compile_: Compile) -> list[Tensor]:
    model = layers()

    def forward(x: Tensor) -> dict[str, Any]:
        hidden = model(x)
        return {
            "loss": model(hidden).exp().mean(),
            "nothing": None,
            "count": 3,
            "name": "x",
            "more": [hidden.argmax(-1), (None,)],
        }

    found = compile_(forward)(rows())
    found["loss"].backward()
    assert (found["nothing"], found["count"], found["name"], found["more"][1]) == (None, 3, "x", (None,))
    return numbers(found["loss"], found["more"][0], model)


@step
def gradients_of_some_outputs(compile_: Compile) -> list[Tensor]:
    """Only one of two results is used, and only some gradients are asked for."""
    model, x = layers(), rows(gradient=True)
    first, _ = compile_(lambda x: ((h := model(x)).exp().mean(), model(h).exp()))(x)
    wanted = [x, model[0].weight]
    return numbers(first, *torch.autograd.grad(first, wanted, retain_graph=True), *torch.autograd.grad(first * 2, wanted))


@step
def loss_outside(compile_: Compile) -> list[Tensor]:
    model, x = layers(), rows(gradient=True)
    hidden = compile_(lambda x: model(x).exp())(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    loss = F.cross_entropy(hidden, torch.arange(ROWS) % WIDTH)
    loss.backward()
    return numbers(hidden, loss, x, model)


@step
def called_several_times(compile_: Compile) -> list[Tensor]:
    """One compiled model on several inputs, and on its own result, before the one backward."""
    model = layers()
    compiled = compile_(lambda x: model(x).exp())
    first, second = compiled(rows()), compiled(rows())
    loss = (first * second).mean() + compiled(first).log().mean()
    loss.backward()
    return numbers(loss, model)


@step
def low_rank_adapters(compile_: Compile) -> list[Tensor]:
    """A frozen base whose inputs need no gradient, and trained matrices beside it."""
    base = layers().requires_grad_(False)
    down, up = (nn.ParameterList(rows(*shape) for _ in range(3)) for shape in ((WIDTH, 2), (2, WIDTH)))

    def loss(x: Tensor) -> Tensor:
        for index in range(3):
            x = torch.tanh(base[2 * index](x) + x @ down[index] @ up[index])
        return x.exp().mean()

    found = train(nn.ModuleList([base, down, up]), compile_(loss), rows())
    assert all(p.grad is None for p in base.parameters())
    return found


@step
def nothing_in_the_batch(compile_: Compile) -> list[Tensor]:
    model = layers()
    return train(model, compile_(lambda x: model(x).exp().sum()), torch.zeros(0, WIDTH, requires_grad=True))
