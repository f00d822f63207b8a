"""The model and the text of the demo and of the benchmarks: a small Llama on the Python standard library's sources."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch import nn

import autoremat

TEXT_BYTES = 2_000_000


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model and of one batch. Activations outweigh the parameters many times over."""

    layers: int
    hidden: int
    batch: int
    sequence: int
    vocabulary: int
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.hidden // 64


FULL = ModelSize(layers=10, hidden=192, batch=4, sequence=512, vocabulary=2048)
"""Of the benchmarks."""
DEMO = replace(FULL, layers=2)
QUICK = replace(FULL, layers=2, vocabulary=1024)
CUDA = ModelSize(layers=10, hidden=2048, batch=4, sequence=4096, vocabulary=8192, dtype=torch.bfloat16)


class TrainingLoss(nn.Module):
    """A language model whose only output is the loss. Logits that a compiled function returns belong to its caller, who
    may hold them through the backward; what is not returned can be freed or recomputed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def build_model(size: ModelSize, *, device: str = "cpu", dropout: float = 0.0) -> TrainingLoss:
    """The loss of a Llama with random weights, the same at each call, in training mode."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SystemExit("This needs transformers: pip install 'autoremat[examples]'") from error
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.sequence,
        attention_dropout=dropout,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if dropout:
        _add_residual_dropout(model, dropout)
    return TrainingLoss(model.to(device=device, dtype=size.dtype)).train()


def smallest_peak(size: ModelSize, batch: torch.Tensor, dropout: float = 0.0) -> int:
    """The smallest feasible peak in bytes: what a budget of one byte is answered with, as well as it goes."""
    model = build_model(size, device=batch.device.type, dropout=dropout)
    options = {"memory_budget": 1, "on_infeasible": "best_effort"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        report = autoremat.explain(model, batch, options=options, lower=True)
    return report.compiled_peak_bytes or report.predicted_peak_bytes


def _add_residual_dropout(model: nn.Module, probability: float) -> None:
    """Dropout on what each attention and each feed-forward block adds to the residual stream; Llama itself has none."""
    for layer in model.model.layers:
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj, nn.Dropout(probability))
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(probability))


def standard_library_text() -> bytes:
    """The first bytes of the sources of the Python standard library, in the order of their names."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(source.read_bytes() for source in sources)[:TEXT_BYTES]
    if len(text) < TEXT_BYTES // 10:
        raise SystemExit(f"This trains on the sources of the standard library, and found only {len(text)} bytes.")
    return text


def tokenize(text: bytes, vocabulary: int) -> torch.Tensor:
    """Tokens of `text`, int64: the 256 bytes, and the most frequent pairs of bytes as the rest of the vocabulary."""
    data = numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.int64)
    pairs = data[:-1] * 256 + data[1:]
    counts = numpy.bincount(pairs, minlength=2**16)
    frequent = numpy.argsort(-counts, kind="stable")[: vocabulary - 256]
    token_of_pair = numpy.full(2**16, -1)
    token_of_pair[frequent] = numpy.arange(256, 256 + len(frequent))
    candidates = token_of_pair[pairs]
    # Greedy from the left: in a run of positions that all start a frequent pair, take every second one.
    positions = numpy.arange(len(pairs))
    run_starts = numpy.maximum.accumulate(numpy.where(candidates < 0, positions + 1, 0))
    paired = numpy.append((candidates >= 0) & ((positions - run_starts) % 2 == 0), False)
    tokens = numpy.where(paired, numpy.append(candidates, 0), data)
    second_of_pair = numpy.concatenate([[False], paired[:-1]])
    return torch.from_numpy(tokens[~second_of_pair])


def token_batches(size: ModelSize, count: int, device: str = "cpu") -> Sequence[torch.Tensor]:
    """`count` batches of int64 [batch, sequence], taken at random places of the text; the same at each call."""
    tokens = tokenize(standard_library_text(), size.vocabulary)
    places = torch.randint(len(tokens) - size.sequence, (count, size.batch), generator=torch.Generator().manual_seed(0))
    windows = tokens.unfold(0, size.sequence, 1)
    return [windows[row].to(device) for row in places]
