"""Losses that torch computes in chunks itself are recognised, counted, and not chunked again."""

from __future__ import annotations

import pytest
from chunkable import Model, tokens_of, train
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.errors import OptionWarning
from autoremat.torch_private.names import MINOR

LARGE = 8192


def whole(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ChunkedByTorch(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
        rows = self.hidden(tokens).flatten(0, 1)
        return F.linear_cross_entropy(rows, self.head.weight, tokens.flatten(), options=options)


@pytest.mark.skipif(MINOR < 13, reason="torch has no F.linear_cross_entropy")
def test_a_loss_that_torch_chunks_is_not_chunked_again():
    model, tokens = ChunkedByTorch(whole, words=LARGE), tokens_of(8, 128)
    with pytest.warns(OptionWarning, match="linear_cross_entropy computes the loss in chunks already"):
        _, report = train(model, tokens, chunk_loss=8, cost_model="roofline")
    assert report.loss_chunks == 1
    assert report.loss_chunked_by == "torch.nn.functional.linear_cross_entropy"


@pytest.mark.slow
def test_a_loss_that_inductor_chunks_is_not_chunked_again():
    model, tokens = Model(whole, words=LARGE), tokens_of(16, 128)
    options = {"auto_chunker.enable": True, "auto_chunker.num_chunk": 4, "chunk_loss": 8, "cost_model": "roofline"}
    with pytest.warns(OptionWarning, match="Inductor .* computes the loss in chunks already"):
        report = autoremat.explain(model, tokens, options=options, lower=True)
    assert report.loss_chunked_by == "Inductor (auto_chunker.enable)"
    logits_of_a_chunk = tokens.numel() // 4 * LARGE * 4
    assert 2 * logits_of_a_chunk < report.compiled_peak_bytes, "with their gradient, inside of the region of a chunk"
