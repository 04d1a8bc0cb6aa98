"""Cards: memory, how fast it is read, and how fast matrices are multiplied, from the makers' data sheets.

Dense rates without sparsity. Apple's machines and DGX Spark share memory with the host.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from slipstream.core.errors import InputError


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Attributes:
        name: as users name it.
        memory_gib: that it has.
        bandwidth: bytes per second of its memory.
        flops: bf16 products per second with fp32 sums, two operations each, dense.
        link: bytes per second to its neighbours, one way; 0 where several are not joined.
        source: where the figures are from.
        fp8_flops: the same in 8 bits, for weights that are stored so; 0 where that is no faster.
        measured: bandwidth and flops were reached by a program, not promised by a maker.
    """

    name: str
    memory_gib: float
    bandwidth: float
    flops: float
    link: float
    source: str
    fp8_flops: float = 0.0
    measured: bool = False


def _card(
    name: str,
    memory_gib: float,
    terabytes: float,
    teraflops: float,
    link_gb: float,
    source: str,
    fp8: float = 0,
) -> Card:
    return Card(
        name, memory_gib, terabytes * 1e12, teraflops * 1e12, link_gb * 1e9, source, fp8_flops=fp8 * 1e12
    )


CARDS = (
    _card("A100", 80, 2.039, 312, 300, "NVIDIA A100 80GB SXM data sheet"),
    _card("H100", 80, 3.35, 989, 450, "NVIDIA H100 SXM data sheet", 1979),
    _card("H200", 141, 4.8, 989, 450, "NVIDIA H200 SXM data sheet", 1979),
    _card("B200", 180, 8.0, 2250, 900, "NVIDIA DGX B200 data sheet, per GPU", 4500),
    _card("B300", 288, 8.0, 2250, 900, "NVIDIA DGX B300 data sheet, per GPU", 4500),
    _card("GB200", 186, 8.0, 2500, 900, "NVIDIA GB200 NVL72 data sheet, per GPU", 5000),
    _card("L4", 24, 0.300, 121, 0, "NVIDIA L4 data sheet", 242),
    _card("L40S", 48, 0.864, 362, 0, "NVIDIA L40S data sheet", 733),
    _card("RTX 3090", 24, 0.936, 71, 0, "NVIDIA Ampere GA102 whitepaper (fp32 sums)"),
    _card("RTX 4090", 24, 1.008, 165, 0, "NVIDIA Ada whitepaper (fp32 sums)", 330),
    _card("RTX 5090", 32, 1.792, 210, 0, "NVIDIA RTX Blackwell whitepaper (fp32 sums)", 419),
    _card(
        "RTX PRO 6000",
        96,
        1.792,
        504,
        0,
        "NVIDIA RTX PRO 6000 Blackwell data sheet; bf16 an eighth of sparse FP4",
        1007,
    ),
    _card("DGX Spark", 128, 0.273, 62, 0, "NVIDIA DGX Spark data sheet; bf16 a sixteenth of sparse FP4", 125),
    _card("MI300X", 192, 5.3, 1307, 64, "AMD Instinct MI300X data sheet", 2615),
    _card("M4 Max", 128, 0.546, 18, 0, "Apple's bandwidth; GPU's fp32 rate, as bf16 is no faster"),
    _card("M3 Ultra", 512, 0.819, 28, 0, "Apple's bandwidth; GPU's fp32 rate, as bf16 is no faster"),
    _card("M5 Max", 128, 0.614, 70, 0, "Apple's bandwidth; with the GPU's neural accelerators, estimated"),
)
CPU = "cpu"


def find_card(name: str) -> Card:
    """The card of a name, whatever its case and spaces.

    Raises:
        InputError: unknown; the nearest known ones are named.
    """
    known = {_plain(card.name): card for card in CARDS}
    found = known.get(_plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), [*known, CPU], 1, 0.4)
    meant = f"; did you mean {known[near[0]].name if near[0] in known else CPU}?" if near else ""
    listed = ", ".join([*(card.name for card in CARDS), CPU])
    raise InputError(f"the card {name!r} is unknown{meant} Known are: {listed}")


def _plain(name: str) -> str:
    return "".join(name.lower().split()).replace("-", "").replace("_", "")
