"""A Llama with random weights and random tokens, small enough for a demonstration on any machine."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def tiny_llama(layers: int = 2) -> LlamaForCausalLM:
    """With its usual settings, `use_cache` among them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset):
    """Sequences of random tokens that are their own labels."""

    def __init__(self, count: int = 16, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}
