"""Modules that run the random programs of `strategies`. All tensors between steps have one shape: (BATCH, TOKENS, WIDTH)."""

import math
from collections.abc import Callable

import torch
from strategies import Program, Step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, WIDTH = 2, 4, 8
SHAPE = (BATCH, TOKENS, WIDTH)
VOCABULARY = 16


class RandomModule(nn.Module):
    """Returns a scalar loss that depends on every step, then the outputs. Steps share three layers of each sort."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index > 0) for index in range(3))
        self.linears[2].weight = self.linears[0].weight
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(TOKENS) for _ in range(2))
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(TOKENS, TOKENS, 3, padding=1)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x: Tensor, y: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        held = [x, y, self.embedding(tokens)]
        for step in self.program.steps:
            held.append(self.run(step, held[step.first % len(held)], held[step.second % len(held)], tokens))
        loss = torch.stack([t.square().mean() for t in held]).sum()
        return (loss, *(o for kind, index in self.program.outputs for o in self.output(kind, held[index], x, tokens)))

    def run(self, step: Step, a: Tensor, b: Tensor, tokens: Tensor) -> Tensor:
        """One step; the results of unary steps are scaled, to stay in range."""
        match step.kind:
            case "linear":
                return self.linears[step.choice](a)
            case "tied":
                return F.linear(a, self.linears[0].weight.t() if step.choice else self.embedding.weight[:WIDTH])
            case "embed":
                return F.embedding((tokens + step.choice) % VOCABULARY, self.embedding.weight) + a
            case "batch_norm":
                return self.batch_norms[step.choice % 2](a)
            case "layer_norm":
                return self.layer_norm(a)
            case "convolve":
                return self.convolution(a)
            case "average_":
                with torch.no_grad():
                    self.average.mul_(0.9).add_(a.mean((0, 1)), alpha=0.1)
                return a - self.average if step.choice else a * 0.5
            case "gather":
                return a[:, self.order] if step.choice else a.gather(1, tokens.remainder(TOKENS)[..., None].expand(SHAPE))
            case "checkpoint":
                return checkpoint(self.region, a, b, step.choice, use_reentrant=False)
            case _:
                return FUNCTIONS[step.kind](a, b, step.choice)

    def region(self, a: Tensor, b: Tensor, choice: int) -> Tensor:
        """What a user's checkpoint region holds."""
        inner = F.gelu(self.linears[1](a))
        if choice:
            inner = F.dropout(inner, 0.25, self.training)
        return inner * torch.sigmoid(b)

    def output(self, kind: str, tensor: Tensor, x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """What the program returns for one entry of its outputs."""
        match kind:
            case "view":
                return (tensor.transpose(0, 1),)
            case "input":
                return (x,)
            case "input_view":
                return (x.view(-1), x[0])
            case "same_twice":
                return (tensor, tensor, tensor[:1])
            case "detached":
                return (tensor.detach(),)
            case "integer":
                return (tensor.argmax(-1), tokens + 1)
            case "scalar":
                return (tensor.sum(),)
            case _:
                return (tensor,)


def write_slice_(a: Tensor, b: Tensor, choice: int) -> Tensor:
    copy = a.clone()
    copy[:, choice:].copy_(b[:, : TOKENS - choice])
    return copy


def view_then_add_(a: Tensor, b: Tensor, choice: int) -> Tensor:
    """The view sees what is written to its base afterwards, and the other way round."""
    base = a * 1.0
    view = base.view(-1)
    (view if choice else base).add_(0.5)
    return (base if choice else view.view(SHAPE)) + b


def transposed_mul_(a: Tensor, _: Tensor, choice: int) -> Tensor:
    base = a + 0.0
    base.transpose(1, 2)[:, choice:].mul_(0.5)
    return base


def attention(a: Tensor, b: Tensor, choice: int) -> Tensor:
    scores = a @ b.transpose(1, 2) / math.sqrt(WIDTH)
    if choice:
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ b


def sdpa(a: Tensor, b: Tensor, choice: int) -> Tensor:
    query, key = (t.view(BATCH, TOKENS, 2, WIDTH // 2).transpose(1, 2) for t in (a, b))
    result = F.scaled_dot_product_attention(query, key, key, dropout_p=0.1 * (choice == 2), is_causal=choice == 1)
    return result.transpose(1, 2).reshape(SHAPE)


def max_with_indices(a: Tensor, b: Tensor, _: int) -> Tensor:
    largest, index = a.max(-1, keepdim=True)
    return b.gather(-1, index).expand(SHAPE) + largest


def variance(a: Tensor, _: Tensor, choice: int) -> Tensor:
    spread, mean = torch.var_mean(a, -1, keepdim=True)
    return (a - mean) * torch.rsqrt(spread + 1e-3) if choice else a - mean


def reshape(a: Tensor, b: Tensor, choice: int) -> Tensor:
    if choice:
        return (a.reshape(-1, TOKENS) @ b.reshape(TOKENS, -1)[:, :TOKENS]).reshape(SHAPE)
    return a.reshape(BATCH, WIDTH, TOKENS).reshape(SHAPE)


def chunk(a: Tensor, b: Tensor, choice: int) -> Tensor:
    left, right = a.chunk(2, -1) if choice else b.split(WIDTH // 2, -1)
    return torch.cat([right, left * 2 if choice else left], -1)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda a, b, _: a + b,
    "mul": lambda a, b, _: a * b,
    "gelu": lambda a, _, choice: F.gelu(a, approximate="tanh" if choice else "none"),
    "tanh": lambda a, *_: a.tanh(),
    "relu": lambda a, *_: a.relu(),
    "silu": lambda a, *_: F.silu(a),
    "softmax": lambda a, _, choice: a.log_softmax(-1) if choice else a.softmax(-1),
    "where": lambda a, b, choice: torch.where(a > b, a, b * 0.5) if choice else a.masked_fill(b > 0, 0.25),
    "detach": lambda a, b, _: a * b.detach(),
    "relu_": lambda a, *_: (a + 0.1).relu_(),
    "add_": lambda a, b, _: (a * 0.5).add_(b),
    "mul_": lambda a, b, _: (a + 0.5).mul_(b),
    "write_slice_": write_slice_,
    "view_then_add_": view_then_add_,
    "transposed_mul_": transposed_mul_,
    "transpose": lambda a, *_: a.transpose(1, 2).contiguous().view(SHAPE),
    "reshape": reshape,
    "chunk": chunk,
    "expand": lambda a, _, choice: a.mean(1, keepdim=True).expand(SHAPE) if choice else a[:1, :1].expand(SHAPE),
    "slices": lambda a, b, choice: torch.cat([a[:, 2:], b[:, :2]], 1) if choice else a[..., ::2].repeat(1, 1, 2),
    "unbind": lambda a, *_: torch.stack(a.unbind(1)[::-1], 1),
    "flip": lambda a, _, choice: a.flip(choice),
    "sort": lambda a, _, choice: a.sort(-1).values if choice else a.topk(WIDTH, -1).values,
    "max_with_indices": max_with_indices,
    "variance": variance,
    "cumulate": lambda a, _, choice: a.cumsum(1) * 0.5 if choice else F.pad(a, (1, 0))[..., :-1],
    "double": lambda a, *_: a.double().exp().clamp(max=3).float(),
    "dropout": lambda a, _, choice: F.dropout(a, 0.1 + 0.2 * choice, training=True),
    "noise": lambda a, _, choice: a + torch.rand_like(a) if choice else a * torch.bernoulli(torch.full(SHAPE, 0.5)),
    "attention": attention,
    "sdpa": sdpa,
}  # fmt: skip


def fresh_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x, y = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE, requires_grad=True)
    return x, y, torch.randint(0, VOCABULARY, (BATCH, TOKENS))
