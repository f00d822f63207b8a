"""Small models with random weights: ``build(name, **sizes)`` gives a module, whose call is a scalar loss, and its inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autoremat

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]

VOCABULARY = 512


class Named(nn.Module):
    """A layer that gives names to two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = autoremat.name(self.qkv(x), "qkv").chunk(3, -1)
        hidden = torch.ops.autoremat.named(F.gelu(q * k + v), name="hidden")
        return (x + self.out(hidden)).square().mean()


class LanguageModelLoss(nn.Module):
    """A Hugging Face model whose only output is the loss of predicting the next token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def gpt2(layers: int = 4) -> Built:
    """GPT-2 with its default dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, n_embd=128, n_layer=layers, n_head=4, n_positions=128,
        use_cache=False,
    )  # fmt: skip
    return LanguageModelLoss(GPT2LMHeadModel(config)), (_tokens(4, 128),)


def llama(layers: int = 4, key_value_heads: int = 2) -> Built:
    """Llama: rotary embeddings, RMS norm, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=key_value_heads, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LanguageModelLoss(LlamaForCausalLM(config)), (_tokens(4, 128),)


def bert(layers: int = 4) -> Built:
    """BERT for masked language modelling, with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=128,
    )  # fmt: skip
    return LanguageModelLoss(BertForMaskedLM(config)), (_tokens(4, 128),)


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first_norm(self.first(image)), inplace=True)
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(image))


class ResNet(nn.Module):
    """Three stages of residual blocks and a classifier."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        stages = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        widths = [w for before, after, stride in stages for w in ((before, after, stride), *(blocks - 1) * [(after, after, 1)])]
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(*(Residual(*w) for w in widths))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(image)).mean((2, 3))), label)


def resnet(blocks: int = 2) -> Built:
    """A residual network with batch norm in training mode, and that many blocks in each stage."""
    return ResNet(blocks), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


class UNet(nn.Module):
    """Levels down and up with skips across."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(Residual(a, b, 1) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.up = nn.ModuleList(Residual(a + b, b, 1) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            image = block(F.avg_pool2d(image, 2) if level else image)
            skips.append(image)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            image = block(torch.cat([F.interpolate(image, scale_factor=2.0), skip], 1))
        return F.mse_loss(self.head(image), target)


def unet(levels: int = 3) -> Built:
    """A U-Net: values that live from the first layers to the last."""
    return UNet((16, 32, 64)[:levels]), (torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32))


class UnrolledLSTM(nn.Module):
    """An LSTM cell over a sequence, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.cell = nn.LSTMCell(64, 128)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(tokens)
        hidden = cell = inputs.new_zeros(tokens.shape[0], 128)
        outputs = []
        for step in range(tokens.shape[1]):
            hidden, cell = self.cell(inputs[:, step], (hidden, cell))
            outputs.append(hidden)
        return F.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), tokens.flatten())


def lstm(steps: int = 12) -> Built:
    """A recurrent cell unrolled over the steps, its weights shared by all."""
    return UnrolledLSTM(), (_tokens(64, steps),)


MODELS: dict[str, Callable[..., Built]] = {f.__name__: f for f in (gpt2, llama, bert, resnet, unet, lstm)}


def build(name: str, **sizes: int) -> Built:
    """The model in training mode and its inputs, always with the same weights and batch."""
    torch.manual_seed(0)
    module, inputs = MODELS[name](**sizes)
    return module.train(), inputs
