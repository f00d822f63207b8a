"""Data sheets of cards: dense rates, memory bandwidth, memory, and the shares of these that kernels reach.

A card without measurements has the efficiencies of its architecture, an unknown one those of a middling card. The sources of
efficiencies, held against the rules in `benchmarks/card_rates.py`:

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

import re
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Datasheet:
    """The data sheet of one GPU.

    Peak dense rates of 16-bit, TF32 and float32 matrix products are in FLOP/s. Where there is no TF32, its rate is that of
    float32. Bandwidth is in bytes/s, memory in bytes, of which :func:`device_memory` tells what torch may use; ``capability``
    is the compute capability that torch tells.
    ``multiprocessors`` counts the streaming multiprocessors, or the compute units of AMD's cards.
    """

    half_flops: float
    tf32_flops: float
    single_flops: float
    bandwidth: float
    memory: int
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def is_of_rocm(self) -> bool:
        """True for cards that torch's builds for ROCm drive."""
        return self.capability in ((9, 4), (9, 5))


GB, GIB = 10**9, 2**30

# Sources: NVIDIA's data sheets of the products, of the SXM form unless the name says another. Rates are dense: half of those
# "with sparsity". GeForce and RTX cards: the whitepapers of their architectures (GA102, Ada, RTX Blackwell); their 16-bit rates
# are those with 32-bit sums. B200 and B300: an eighth of the HGX data sheet, which is for eight GPUs. GB200 and
# GB300: a 72nd of the NVL72's. MI cards: AMD's data sheets of the OAM form. ROCm's torch names their architectures gfx942 and
# gfx950, with capabilities that no card of NVIDIA has. It rounds float32 products only where an environment variable says so.
# H800 and A800 differ from H100 and A100 in NVLink, and H800 in float64 too. A vendor's GB of memory are GiB, but for B300 and
# GB300: nvidia-smi shows 284,208 MiB of a GB300 and 189,471 of a GB200.
DATASHEETS = {
    "GB200": Datasheet(2500e12, 1250e12, 80e12, 8.0e12, 186 * GIB, (10, 0), 148),
    "GB300": Datasheet(2500e12, 1250e12, 80e12, 8.0e12, 288 * GB, (10, 3), 148),
    "B300": Datasheet(2250e12, 1125e12, 75e12, 8.0e12, 288 * GB, (10, 3), 148),
    "B200": Datasheet(2250e12, 1125e12, 75e12, 8.0e12, 180 * GIB, (10, 0), 148),
    "GH200 144GB": Datasheet(989e12, 494e12, 67e12, 4.9e12, 144 * GIB, (9, 0), 132),
    "GH200": Datasheet(989e12, 494e12, 67e12, 4.0e12, 96 * GIB, (9, 0), 132),
    "H200": Datasheet(989e12, 494e12, 67e12, 4.8e12, 141 * GIB, (9, 0), 132),
    "H200 NVL": Datasheet(835e12, 417e12, 60e12, 4.8e12, 141 * GIB, (9, 0), 132),
    "H100": Datasheet(989e12, 494e12, 67e12, 3.35e12, 80 * GIB, (9, 0), 132),
    "H100 NVL": Datasheet(835e12, 417e12, 60e12, 3.9e12, 94 * GIB, (9, 0), 132),
    "H100 PCIe": Datasheet(756e12, 378e12, 51e12, 2.0e12, 80 * GIB, (9, 0), 114),
    "H800": Datasheet(989e12, 494e12, 67e12, 3.35e12, 80 * GIB, (9, 0), 132),
    "H800 PCIe": Datasheet(756e12, 378e12, 51e12, 2.0e12, 80 * GIB, (9, 0), 114),
    "H20 3e": Datasheet(148e12, 74e12, 44e12, 4.8e12, 141 * GIB, (9, 0), 78),
    "H20": Datasheet(148e12, 74e12, 44e12, 4.0e12, 96 * GIB, (9, 0), 78),
    "A100": Datasheet(312e12, 156e12, 19.5e12, 2.0e12, 80 * GIB, (8, 0), 108),
    "A100 40GB": Datasheet(312e12, 156e12, 19.5e12, 1.555e12, 40 * GIB, (8, 0), 108),
    "A800": Datasheet(312e12, 156e12, 19.5e12, 2.0e12, 80 * GIB, (8, 0), 108),
    "A800 40GB": Datasheet(312e12, 156e12, 19.5e12, 1.555e12, 40 * GIB, (8, 0), 108),
    "A40": Datasheet(150e12, 75e12, 37.4e12, 0.696e12, 48 * GIB, (8, 6), 84),
    "A30": Datasheet(165e12, 82e12, 10.3e12, 0.933e12, 24 * GIB, (8, 0), 56),
    "A10": Datasheet(125e12, 62e12, 31.2e12, 0.6e12, 24 * GIB, (8, 6), 72),
    "A10G": Datasheet(70e12, 35e12, 35e12, 0.6e12, 24 * GIB, (8, 6), 80),
    "L40S": Datasheet(362e12, 183e12, 91.6e12, 0.864e12, 48 * GIB, (8, 9), 142),
    "L40": Datasheet(181e12, 90.5e12, 90.5e12, 0.864e12, 48 * GIB, (8, 9), 142),
    "L4": Datasheet(121e12, 60e12, 30.3e12, 0.3e12, 24 * GIB, (8, 9), 58),
    "V100S": Datasheet(130e12, 16.4e12, 16.4e12, 1.134e12, 32 * GIB, (7, 0), 80),
    "V100 PCIe": Datasheet(112e12, 14e12, 14e12, 0.9e12, 32 * GIB, (7, 0), 80),
    "V100": Datasheet(125e12, 15.7e12, 15.7e12, 0.9e12, 32 * GIB, (7, 0), 80),
    "T4": Datasheet(65e12, 8.1e12, 8.1e12, 0.32e12, 16 * GIB, (7, 5), 40),
    "RTX PRO 6000": Datasheet(500e12, 250e12, 125e12, 1.792e12, 96 * GIB, (12, 0), 188),
    "RTX 6000 Ada": Datasheet(364e12, 182e12, 91.1e12, 0.96e12, 48 * GIB, (8, 9), 142),
    "RTX A6000": Datasheet(155e12, 77e12, 38.7e12, 0.768e12, 48 * GIB, (8, 6), 84),
    "RTX A5000": Datasheet(111e12, 56e12, 27.8e12, 0.768e12, 24 * GIB, (8, 6), 64),
    "RTX 5090": Datasheet(209e12, 105e12, 105e12, 1.792e12, 32 * GIB, (12, 0), 170),
    "RTX 5080": Datasheet(113e12, 56e12, 56e12, 0.96e12, 16 * GIB, (12, 0), 84),
    "RTX 5070 Ti": Datasheet(88e12, 44e12, 44e12, 0.896e12, 16 * GIB, (12, 0), 70),
    "RTX 5070": Datasheet(62e12, 31e12, 31e12, 0.672e12, 12 * GIB, (12, 0), 48),
    "RTX 4090": Datasheet(165e12, 83e12, 83e12, 1.008e12, 24 * GIB, (8, 9), 128),
    "RTX 4080": Datasheet(97e12, 49e12, 49e12, 0.717e12, 16 * GIB, (8, 9), 76),
    "RTX 3090 Ti": Datasheet(80e12, 40e12, 40e12, 1.008e12, 24 * GIB, (8, 6), 84),
    "RTX 3090": Datasheet(71e12, 36e12, 36e12, 0.936e12, 24 * GIB, (8, 6), 82),
    "MI355X": Datasheet(2517e12, 157e12, 157e12, 8.0e12, 288 * GIB, (9, 5), 256),
    "MI325X": Datasheet(1307e12, 163e12, 163e12, 6.0e12, 256 * GIB, (9, 4), 304),
    "MI300X": Datasheet(1307e12, 163e12, 163e12, 5.3e12, 192 * GIB, (9, 4), 304),
}
UNKNOWN_GPU = Datasheet(150e12, 75e12, 25e12, 1.0e12, 0, (8, 0), 84)

TF32 = "tf32"
"""The type of float32 operands that may be rounded."""

FLOAT8_TYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FIRST_BFLOAT16, FIRST_FLOAT8 = (8, 0), (8, 9)
"""The capabilities from which tensor cores multiply these types. Their float8 rate is twice the 16-bit rate."""

DOUBLE_SHARE = {
    (7, 0): 1 / 2, (7, 5): 1 / 32, (8, 0): 1.0, (9, 0): 1.0, (10, 0): 1 / 2, (9, 4): 1.0, (9, 5): 1 / 2,
}  # fmt: skip
"""The rate of float64 products as a share of float32's, by capability, from the same data sheets. Where tensor cores multiply
float64, it is theirs."""

FEW_DOUBLES = 1 / 64
"""The share elsewhere: on GeForce and RTX cards, A10, A40, L4, L40 and B300. H20 and H800 have little more."""

FEW_DOUBLES_BY_NAME = ("H20", "H20 3e", "H800", "H800 PCIe")

MEMORY_SHARE = 0.98
"""The share of a card's memory that torch may use at least, as its messages about lack of memory tell: 23.5 of 24 GiB (RTX
4090), 79.2 of 80 (H100), 178.4 of 180 (B200)."""

LESS_MEMORY = {
    **dict.fromkeys(("A40", "A10", "A10G", "L40S", "L40", "L4", "T4"), 0.915),
    **dict.fromkeys(("RTX 5080", "RTX 5070 Ti", "RTX 5070"), 0.955),
}
"""The share of cards that leave less. Some keep the codes of error correction in the same memory: 44.4 of 48 GiB (L40) and 22.1
of 24 (A10G) are left. Small cards reserve a larger share: 15.5 of 16 GiB (RTX 5080) are left."""

SPECIAL_UNITS = 16
"""Units of a multiprocessor for exponentials and the like since Volta (CUDA C++ Programming Guide, arithmetic instructions).
AMD's compute units have as many."""

FEW_LANES, LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}, 128
"""Multiplications and additions of float32 that a multiprocessor does in a clock cycle, by capability, and elsewhere."""

POWER_LIMITED = {"L40S": 0.59, "MI300X": 0.51}
"""Shares of the FLOPs that products reach on cards whose power limits them further than others of their architecture."""

OTHER_CARDS = ("Ti", "SUPER", "Laptop", "Max-Q", "D", "MIG")
"""Words that distinguish a card from one with the same name without them, unless a row of the table contains them."""

SIZE = re.compile(r"(?<![A-Za-z\d])(\d+) ?Gi?B?\b", re.IGNORECASE)
"""A size of memory in a card's name: "40G", "40 GB" and "40GiB" are one."""

CPU_MEMORY_IN_NAME = ("GH200", "GB200", "GB300")
"""Cards on one board with a CPU. The size at the end of their name is the CPU's memory: "GH200 480GB"."""


def contains_word(word: str, name: str) -> bool:
    """Returns True if ``name`` contains ``word`` as a whole.

    "T400" does not contain "T4", "L40G" does not contain "L40", and "GH200" does not contain "H200".
    """
    before = r"(?<![A-Za-z\d])" if word[0].isalpha() else r"(?<!\d)"
    return re.search(before + re.escape(word) + r"(?![A-Za-z\d])", name, re.IGNORECASE) is not None


def datasheet(name: str) -> Datasheet | None:
    """Returns the data sheet of the CUDA device ``name``, such as "NVIDIA A100-SXM4-40GB", or None if it is unknown."""
    found = datasheet_name(name)
    return None if found is None else DATASHEETS[found]


def datasheet_name(name: str) -> str | None:
    """Returns the row of the table for the CUDA device ``name``, or None if it is unknown."""
    name = SIZE.sub(r"\1GB", name)
    others = {word for word in OTHER_CARDS if contains_word(word, name)}
    matches = [key for key in DATASHEETS if others <= {*key.split()} and all(contains_word(word, name) for word in key.split())]
    # The longest match wins: an "H100 PCIe" is not an "H100".
    return max(matches, key=len) if matches else None


def known_cards(name: str) -> str:
    """Returns all names of cards, after a question about those that contain ``name``; a text for errors."""
    wanted = name.replace(" ", "").lower()
    near = [key for key in DATASHEETS if len(wanted) > 2 and wanted in key.replace(" ", "").lower()]
    question = f"Did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
    return f"{question}Known cards: {', '.join(DATASHEETS)}"


def device_memory(name: str) -> int | None:
    """Returns the bytes of the CUDA device ``name`` that torch may use, or None if the device is unknown.

    A size at the end of the name ("V100-16GB") takes precedence over the data sheet. A card that is present tells its own.
    """
    found = datasheet_name(name)
    if found is None:
        return None
    size = re.search(SIZE.pattern + "$", name, SIZE.flags)
    of_cpu = any(contains_word(word, name) for word in CPU_MEMORY_IN_NAME)
    whole = int(size[1]) * GIB if size and not of_cpu else DATASHEETS[found].memory
    return int(whole * LESS_MEMORY.get(found, MEMORY_SHARE))


def efficiencies(name: str) -> Efficiencies:
    """Returns what kernels reach on the CUDA device ``name``, by its architecture."""
    sheet = datasheet(name)
    reached = MIDDLING if sheet is None else EFFICIENCIES.get(sheet.capability, MIDDLING)
    limit = POWER_LIMITED.get(datasheet_name(name) or "")
    if limit is None:
        return reached
    return replace(reached, product=limit, attention=reached.attention * limit / reached.product)
