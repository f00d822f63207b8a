"""Rates of devices by the vendors' data sheets: dense matrix FLOPs and memory bandwidth.

Attainable rates are lower than peaks, by the efficiencies of the card's architecture
(:mod:`autoremat.planner.cost.efficiencies`). An unknown device gets the rates of a middling card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoremat.planner.cost.efficiencies import EFFICIENCIES, MIDDLING, Efficiencies

CPU = "cpu"
"""The name of a CPU's rates."""

CPU_FLOPS_PER_CORE = 48e9
"""float32 FLOP/s: two 8-wide fused multiply-add units at about 3 GHz, halved for the rate of real kernels."""

CPU_BYTES_PER_SECOND_PER_CORE = 6e9
CPU_MAX_BYTES_PER_SECOND = 100e9


@dataclass(frozen=True)
class Device:
    """The attainable rates of one device, per second."""

    name: str
    flops_per_second: float
    """FLOP/s of matrix products, in float32 unless :meth:`of_type` names another type."""
    bytes_per_second: float
    allocation_bytes: int = 1
    """Granularity of the allocator in bytes (512 for CUDA's caching allocator)."""
    multiprocessors: int = 1
    efficiencies: Efficiencies | None = None
    """What kernels reach of a card by name. None where large kernels' rates are all that is known."""
    flops_by_type: Mapping[str, float] = field(default_factory=dict, hash=False)
    """FLOP/s of matrix products by the element type of their operands, where the rates differ."""
    specials_per_second: float = 0.0
    """Results of the units for exponentials, reciprocals and the like; 0 if unknown."""
    write_share: float = 0.5
    """Share of the seconds to write and read a byte that the write takes."""
    overlaps_wholly: bool = True
    """True if a fused kernel takes only the longer of its arithmetic and its traffic."""

    def of_type(self, dtype: str) -> Device:
        """Returns the device with the rate of matrix products of ``dtype``: a name of torch's, or :data:`TF32`."""
        return replace(self, flops_per_second=self.flops_by_type.get(dtype, self.flops_per_second))

    @property
    def launch_seconds(self) -> float:
        """Seconds of a kernel that does nothing."""
        return 0.0 if self.efficiencies is None else self.efficiencies.launch_seconds


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


def cuda_device(name: str) -> Device:
    """Returns the rates of the CUDA device ``name``.

    An unknown device gets the rates of a middling card.
    """
    sheet, reached = datasheet(name) or UNKNOWN_GPU, efficiencies(name)
    single, half = sheet.single_flops * reached.single, sheet.half_flops * reached.product
    few = datasheet_name(name) in FEW_DOUBLES_BY_NAME
    by_type = {
        "float64": single * (FEW_DOUBLES if few else DOUBLE_SHARE.get(sheet.capability, FEW_DOUBLES)),
        "float16": half,
        "bfloat16": half if sheet.capability >= FIRST_BFLOAT16 else single,
        TF32: max(single, sheet.tf32_flops * reached.product),
    }
    if sheet.capability >= FIRST_FLOAT8:
        by_type |= dict.fromkeys(FLOAT8_TYPES, 2 * half * reached.float8)
    return Device(
        name, single, sheet.bandwidth * reached.stream, allocation_bytes=512, multiprocessors=sheet.multiprocessors,
        efficiencies=reached, flops_by_type=by_type, specials_per_second=_specials_per_second(sheet),
    )  # fmt: skip


def _specials_per_second(sheet: Datasheet) -> float:
    """Returns the results of all special function units in a second. The clock follows from the float32 rate."""
    lanes = FEW_LANES.get(sheet.capability, LANES)
    return SPECIAL_UNITS * sheet.single_flops / (2 * lanes)


def efficiencies(name: str) -> Efficiencies:
    """Returns what kernels reach on the CUDA device ``name``, by its architecture."""
    sheet = datasheet(name)
    reached = MIDDLING if sheet is None else EFFICIENCIES.get(sheet.capability, MIDDLING)
    limit = POWER_LIMITED.get(datasheet_name(name) or "")
    if limit is None:
        return reached
    return replace(reached, product=limit, attention=reached.attention * limit / reached.product)


def cpu_device(threads: int) -> Device:
    """Returns the rates of ``threads`` CPU cores.

    A core reads a line of memory into its cache before it writes the line, so a write moves a byte twice. It has few
    instructions in flight, so the shorter of arithmetic and traffic is hidden in part only.
    """
    bandwidth = min(threads * CPU_BYTES_PER_SECOND_PER_CORE, CPU_MAX_BYTES_PER_SECOND)
    return Device(CPU, threads * CPU_FLOPS_PER_CORE, bandwidth, write_share=2 / 3, overlaps_wholly=False)
