"""Efficiencies of kernels by architecture: the shares of a data sheet's rates that kernels reach, and the time of a launch.

A card without measurements has those of its architecture. Sources, held against the rules in `benchmarks/card_rates.py`:

- Products, attention: NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator at 095f58a51, Apache-2.0), SGLang's tables
    `gemm` and `context_attention` in bfloat16; FlashAttention 3 on Hopper. Fitted on A100, H100, B200, B300, L40S and RTX PRO
    6000. The other cards of the tables only check the fit.
- Streams: microsoft/vidur at 7d47513 (MIT), the residual `add` of Llama-2-70B on A100, A40 and H100.
- Older attention kernels on Hopper: cuDNN takes 1 / 1.7 to 1 / 2.3 of the time of torch's flash attention
    (huggingface/transformers, pull request 48163), FlashAttention 3 1 / 1.5 to 1 / 2 (arXiv 2407.08608).
- Instinct cards: products in bfloat16 by torch reach 668 TFLOP/s on an MI300X, 785 on an MI325X and 1565 on an MI355X
    (stas00/ml-engineering at 744d01e, compute/accelerator). AMD's own best are 708 and 843, and 1273 and 1519 in float8
    (rocm.blogs.amd.com, "Measuring Max-Achievable FLOPs", part 2). Streams: AMD accepts an MI300X from 4.18 TB/s of copies and
    3.89 of triads (BabelStream). All else is that of a middling card: no kernel times by shape are published.
- Float32 and 8-bit products: xzwgit/gpu-flops-bench at 5ae32ae and dd51f99 (MIT), and aiconfigurator's vLLM tables.
- The backward of attention: FlashAttention 4 on a B200 reaches 0.80 to 0.88 of the forward's rate (Dao-AILab/flash-attention,
    issue 2280).
- cuDNN's attention on Hopper: torch 2.11 on an H100 (`benchmarks/results/gpu_rows.jsonl`). With a causal mask and few keys it
    is faster than FlashAttention 3 in SGLang's tables.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION_BACKWARD = 0.8
"""The rate of attention's backward as a share of the forward's."""


@dataclass(frozen=True)
class Efficiencies:
    """What the kernels of one architecture reach. Shares are those of the data sheet's rates."""

    product_seconds: float
    """Seconds of the smallest matrix product."""
    product: float
    """Share of the FLOPs in a full tile of a matrix product."""
    small_tile: float
    """A tile reaches the power ``small_tile`` of its share of the largest tile's elements."""
    operands: float
    """Share of the memory bandwidth at which products read and write."""
    stream: float
    """Share of the memory bandwidth of kernels that read and write in order."""
    attention: float
    """Share of the FLOPs of attention with heads of 128 elements and many keys."""
    keys: float
    """Number of keys per query at which attention reaches half of its share."""
    launch_seconds: float = 1.5e-6
    """Seconds of any other kernel that does nothing."""
    older_attention: float = 1.0
    """What attention kernels that were written for Ampere reach of that."""
    cudnn_keys: float | None = None
    """What ``keys`` is for cuDNN's attention; None if it is the same."""
    single: float = 0.78
    """Share of the FLOPs of float32 without TF32, which runs beside the tensor cores."""
    float8: float = 0.85
    """What products of 8-bit operands reach of ``product``. Power limits them first."""


MIDDLING = Efficiencies(3.0e-6, 0.80, 0.05, 0.72, 0.90, 0.62, 350)
"""Efficiencies of an architecture without measurements."""

AMPERE = Efficiencies(3.9e-6, 0.84, 0.10, 0.66, 0.90, 0.69, 320, single=0.84)
ADA = Efficiencies(1.7e-6, 0.80, 0.01, 0.79, 0.90, 0.77, 480, single=0.67)
HOPPER = Efficiencies(3.0e-6, 0.79, 0.01, 0.81, 0.95, 0.66, 460, older_attention=0.6, cudnn_keys=150)
BLACKWELL = Efficiencies(2.6e-6, 0.70, 0.02, 0.66, 0.90, 0.55, 350, older_attention=0.6)
BLACKWELL_ULTRA = Efficiencies(2.6e-6, 0.70, 0.02, 0.66, 0.90, 0.75, 540, older_attention=0.6)
BLACKWELL_WORKSTATION = Efficiencies(2.0e-6, 0.83, 0.13, 0.73, 0.90, 0.60, 250, single=0.72, float8=1.0)

CDNA_3 = Efficiencies(3.0e-6, 0.60, 0.05, 0.72, 0.79, 0.46, 350, single=0.60, float8=0.90)
CDNA_4 = Efficiencies(3.0e-6, 0.62, 0.05, 0.72, 0.79, 0.48, 350, single=0.62, float8=0.90)

EFFICIENCIES = {
    (8, 0): AMPERE, (8, 6): AMPERE, (8, 9): ADA, (9, 0): HOPPER, (10, 0): BLACKWELL, (10, 3): BLACKWELL_ULTRA,
    (12, 0): BLACKWELL_WORKSTATION, (9, 4): CDNA_3, (9, 5): CDNA_4,
}  # fmt: skip
"""Efficiencies by compute capability."""
