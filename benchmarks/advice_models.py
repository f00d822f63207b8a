"""Models of real jobs on the meta device: language models with adapters, a vision transformer, and the U-Net of SDXL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ADAPTED = ("q_proj", "v_proj", "to_q", "to_v")
"""Names of the projections that get adapters."""

RANK = 16


@dataclass(frozen=True)
class Step:
    """A model, its inputs, and the function of these that returns the loss."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Any]


class Adapter(nn.Module):
    """A frozen projection with a trained product of two narrow ones beside it (LoRA)."""

    def __init__(self, frozen: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(inner, RANK, bias=False), nn.Linear(RANK, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class EightBit(nn.Module):
    """A frozen projection whose weight has eight bits and a scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.empty((linear.out_features, 1), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def with_adapters(step: Step, bits: int = 16) -> Step:
    """Returns ``step`` with frozen weights and adapters; with 8 ``bits``, the frozen projections have smaller weights."""
    step.model.requires_grad_(False)
    for module in list(step.model.modules()):
        for name, linear in list(module.named_children()):
            if not isinstance(linear, nn.Linear) or name == "lm_head":
                continue
            frozen = EightBit(linear) if bits == 8 else linear
            adapted = Adapter(frozen, linear.in_features, linear.out_features) if name in ADAPTED else frozen
            setattr(module, name, adapted.to(torch.bfloat16))
    return step


def _of_tokens(model: nn.Module, batch: int, tokens: int) -> Step:
    model = model.to(torch.bfloat16).train()
    inputs = (torch.zeros((batch, tokens), dtype=torch.int64),)
    return Step(model, inputs, lambda ids: model(input_ids=ids, labels=ids).loss)


def causal(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Returns attention to earlier tokens without a mask, which transformers makes of all pairs of tokens while tracing."""
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    return mixed.transpose(1, 2), None


def llama(layers: int, batch: int, tokens: int, masked: bool = True, **sizes: int) -> Step:
    """Returns a Llama, whose attention is that of transformers or, if not ``masked``, :func:`causal`."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("causal", causal)
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=tokens, use_cache=False,
                         attn_implementation="sdpa" if masked else "causal", **sizes)  # fmt: skip
    return _of_tokens(LlamaForCausalLM(config), batch, tokens)


def olmoe(layers: int, batch: int, tokens: int) -> Step:
    """Returns OLMoE: 64 experts per layer, of which a token takes eight."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(intermediate_size=1024, num_hidden_layers=layers, use_cache=False)
    config._experts_implementation = "grouped_mm"
    return _of_tokens(OlmoeForCausalLM(config), batch, tokens)


def vit_huge(layers: int, batch: int) -> Step:
    """Returns ViT-H/14 on images of 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1280, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=5120,
                       patch_size=14, num_labels=1000)  # fmt: skip
    model = ViTForImageClassification(config).to(torch.bfloat16).train()
    inputs = torch.zeros((batch, 3, 224, 224), dtype=torch.bfloat16), torch.zeros((batch,), dtype=torch.int64)
    return Step(model, inputs, lambda x, y: F.cross_entropy(model(pixel_values=x).logits.float(), y))


class Attention(nn.Module):
    """Attention over an image's positions, or of these to a text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = (self.to_q(x), self.to_k(context), self.to_v(context))
        mixed = F.scaled_dot_product_attention(*(part.unflatten(-1, (self.heads, 64)).transpose(1, 2) for part in parts))
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text, and a gated MLP."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = Attention(width, width), Attention(width, context)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed)
        x = x + self.text(self.norms[1](x), context)
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


class Transformer(nn.Module):
    """Transformer blocks over the positions of an image."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.norm, self.inwards, self.outwards = nn.GroupNorm(32, width), nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, context) for _ in range(depth))

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        x = self.inwards(self.norm(image).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, context)
        return image + self.outwards(x).transpose(1, 2).unflatten(2, image.shape[2:])


class Residual(nn.Module):
    """Two convolutions with the time step between them, and transformer blocks if the level has any."""

    def __init__(self, before: int, after: int, depth: int, time: int, context: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.time, self.other_norm = nn.Linear(time, after), nn.GroupNorm(32, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.transformer = Transformer(after, depth, context) if depth else None

    def forward(self, image: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.first(F.silu(self.norm(image))) + self.time(F.silu(time))[:, :, None, None]
        x = self.shortcut(image) + self.second(F.silu(self.other_norm(x)))
        return x if self.transformer is None else self.transformer(x, context)


class SdxlUNet(nn.Module):
    """The U-Net of SDXL (Podell et al., 2023): three levels, of which the inner two have transformer blocks."""

    def __init__(self, depths: tuple[int, ...] = (0, 2, 10), widths: tuple[int, ...] = (320, 640, 1280)) -> None:
        super().__init__()
        time, context, width = 1280, 2048, widths[0]
        self.inwards, self.time = (
            nn.Conv2d(4, width, 3, padding=1),
            nn.Sequential(nn.Linear(320, time), nn.SiLU(), nn.Linear(time, time)),
        )
        self.condition = nn.Sequential(nn.Linear(2816, time), nn.SiLU(), nn.Linear(time, time))
        self.down, self.shrink, skips = nn.ModuleList(), nn.ModuleList(), [width]
        for level, (after, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(Residual(width, after, depth, time, context))
                width = after
                skips.append(width)
            if level < len(widths) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList(Residual(width, width, depth, time, context) for depth in (depths[-1], 0))
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, (after, depth) in enumerate(zip(widths[::-1], depths[::-1], strict=True)):
            for _ in range(3):
                self.up.append(Residual(width + skips.pop(), after, depth, time, context))
                width = after
            if level < len(widths) - 1:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.outwards = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        time, x = self.time(time) + self.condition(pooled), self.inwards(image)
        skips = [x]
        for number, block in enumerate(self.down):
            x = block(x, time, context)
            skips.append(x)
            if number % 2 and number // 2 < len(self.shrink):
                x = self.shrink[number // 2](x)
                skips.append(x)
        for block in self.middle:
            x = block(x, time, context)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1), time, context)
            if number % 3 == 2 and number // 3 < len(self.grow):
                x = self.grow[number // 3](F.interpolate(x, scale_factor=2.0))
        return self.outwards(F.silu(self.norm(x)))


def sdxl(layers: int, batch: int) -> Step:
    """Returns the U-Net of SDXL on images of 1024 pixels (latents of 128); its inmost blocks have ``layers`` layers, of 10."""
    model = SdxlUNet((0, min(2, layers), layers)).to(torch.bfloat16).train()
    shapes = ((batch, 4, 128, 128), (batch, 320), (batch, 77, 2048), (batch, 2816), (batch, 4, 128, 128))
    inputs = tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    return Step(model, inputs, lambda *given: F.mse_loss(model(*given[:4]).float(), given[4].float()))
