"""Models for the planner's benchmark: their depth and structure are real, their widths small, their weights random.

Without dropout: its masks would have to be saved, while torch's partitioner draws them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, HEADS, BATCH, LENGTH = 512, 64, 4, 2, 128
IMAGES = 16

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class TokenLoss(nn.Module):
    """A Hugging Face model with a loss of its own on the tokens, and nothing else returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        decoder = {"decoder_input_ids": tokens} if self.model.config.is_encoder_decoder else {}
        logits = self.model(input_ids=tokens, **decoder).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class ImageLoss(nn.Module):
    """A Hugging Face image classifier that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.model(pixel_values=images).logits.float(), labels)


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (BATCH, LENGTH)),)


def images(size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(IMAGES, 3, size, size), torch.randint(0, 10, (IMAGES,))


def gpt2(layers: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, n_embd=HIDDEN, n_layer=layers, n_head=HEADS,
        n_positions=LENGTH, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return TokenLoss(GPT2LMHeadModel(config)), _tokens()


def llama(layers: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return TokenLoss(LlamaForCausalLM(config)), _tokens()


def bert(layers: int) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return TokenLoss(BertForMaskedLM(config)), _tokens()


def t5(layers: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=4 * HIDDEN, num_layers=layers, num_heads=HEADS,
        decoder_start_token_id=0, use_cache=False, dropout_rate=0.0,
    )  # fmt: skip
    return TokenLoss(T5ForConditionalGeneration(config)), _tokens()


def vit(layers: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN,
        image_size=64, patch_size=8, num_labels=10,
    )  # fmt: skip
    return ImageLoss(ViTForImageClassification(config)), images(64)


def resnet(kind: str, depths: list[int]) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    expansion = 4 if kind == "bottleneck" else 1
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16 * expansion * 2**i for i in range(4)], depths=depths, layer_type=kind, num_labels=10
    )
    return ImageLoss(ResNetForImageClassification(config)), images(128)


class Classifier(nn.Module):
    """Features, their mean over the image, and a loss."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), labels)


def convolve(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def vgg11() -> Built:
    """Returns Simonyan and Zisserman's configuration A, an eighth as wide."""
    layers: list[nn.Module] = []
    before = 3
    for after in (8, 0, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0):
        layers.append(convolve(before, after) if after else nn.MaxPool2d(2))
        before = after or before
    return Classifier(nn.Sequential(*layers), before), images(64)


class DenseBlock(nn.Module):
    """Every layer reads the results of all before it (Huang et al., 2017)."""

    def __init__(self, before: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(convolve(before + i * growth, growth) for i in range(layers))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            image = torch.cat([image, layer(image)], 1)
        return image


def densenet() -> Built:
    """Returns a model of three dense blocks of eight layers."""
    layers: list[nn.Module] = [convolve(3, 16)]
    width = 16
    for _ in range(3):
        layers += [DenseBlock(width, 8, 8), nn.Conv2d(width + 64, (width + 64) // 2, 1), nn.AvgPool2d(2)]
        width = (width + 64) // 2
    return Classifier(nn.Sequential(*layers), width), images(32)


class ConvNextBlock(nn.Module):
    """A depthwise convolution, and two products over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """Four levels down and up with skips across (Ronneberger et al., 2015)."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(nn.Sequential(convolve(a, b), convolve(b, b)) for a, b in pairs)
        turns = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.Sequential(convolve(a + b, b), convolve(b, b)) for a, b in turns)
        self.head = nn.Conv2d(widths[0], 10, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            images = block(F.max_pool2d(images, 2) if level else images)
            skips.append(images)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            images = block(torch.cat([F.interpolate(images, scale_factor=2.0), skip], 1))
        return F.cross_entropy(self.head(images).mean((2, 3)), labels)


class Attended(nn.Module):
    """Attention over tokens, and its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.outwards = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns queries, keys and values."""
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inwards(x).chunk(3, -1)]

    def mixed(self, heads: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns a layer norm whose shift and scale the time step decides (Peebles and Xie, 2023)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


class Stream(nn.Module):
    """One of the two streams of a joint block."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.attention = nn.Linear(HIDDEN, 6 * HIDDEN), Attended()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU("tanh"), nn.Linear(4 * HIDDEN, HIDDEN))

    def finish(self, x: torch.Tensor, mixed: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = x + parts[2][:, None] * self.attention.outwards(mixed)
        return x + parts[5][:, None] * self.mlp(modulated(x, parts[3], parts[4]))


class JointBlock(nn.Module):
    """Image and text tokens in two streams with one attention (Esser et al., 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Stream(), Stream()

    def forward(self, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [stream.modulation(F.silu(time)).chunk(6, -1) for stream in (self.image, self.text)]
        both = [
            stream.attention.heads(modulated(x, part[0], part[1]))
            for stream, x, part in zip((self.image, self.text), (image, text), parts, strict=True)
        ]
        mixed = self.image.attention.mixed([torch.cat(pair, 2) for pair in zip(*both, strict=True)])
        count = image.shape[1]
        return self.image.finish(image, mixed[:, :count], parts[0]), self.text.finish(text, mixed[:, count:], parts[1])


class SingleBlock(nn.Module):
    """All tokens in one stream, with attention and product side by side (Dehghani et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.attention = nn.Linear(HIDDEN, 3 * HIDDEN), Attended()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(5 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(F.silu(time)).chunk(3, -1)
        normed = modulated(x, shift, scale)
        mixed = self.attention.mixed(self.attention.heads(normed))
        return x + gate[:, None] * self.down(torch.cat([mixed, F.gelu(self.up(normed), approximate="tanh")], -1))


class DiffusionTransformer(nn.Module):
    """Joint blocks, then three times as many single blocks; the loss of a velocity."""

    def __init__(self, joint: int) -> None:
        super().__init__()
        self.patches, self.words, self.time = nn.Linear(16, HIDDEN), nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(1, HIDDEN)
        self.joint = nn.ModuleList(JointBlock() for _ in range(joint))
        self.single = nn.ModuleList(SingleBlock() for _ in range(3 * joint))
        self.head = nn.Linear(HIDDEN, 16)

    def forward(self, patches: torch.Tensor, words: torch.Tensor, times: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        image, text, time = self.patches(patches), self.words(words), self.time(times)
        for block in self.joint:
            image, text = block(image, text, time)
        x = torch.cat([text, image], 1)
        for block in self.single:
            x = block(x, time)
        return F.mse_loss(self.head(x[:, text.shape[1] :]), target)


def diffusion_transformer(joint: int) -> Built:
    """Returns a diffusion transformer with two kinds of blocks."""
    patches = torch.randn(2 * BATCH, LENGTH, 16)
    words = torch.randint(0, VOCABULARY, (2 * BATCH, LENGTH // 4))
    return DiffusionTransformer(joint), (patches, words, torch.rand(2 * BATCH, 1), torch.randn_like(patches))


MODELS: dict[str, Callable[[], Built]] = {
    **{f"gpt2-{n}": lambda n=n: gpt2(n) for n in (4, 12, 32, 80)},  # type: ignore[misc]
    **{f"llama-{n}": lambda n=n: llama(n) for n in (4, 12, 32, 80)},  # type: ignore[misc]
    "bert-12": lambda: bert(12),
    "t5-6": lambda: t5(6),
    "vit-12": lambda: vit(12),
    "resnet-18": lambda: resnet("basic", [2, 2, 2, 2]),
    "resnet-50": lambda: resnet("bottleneck", [3, 4, 6, 3]),
    "vgg-11": vgg11,
    "densenet": densenet,
    "unet": lambda: (UNet(), images(64)),
}
