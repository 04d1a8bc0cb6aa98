"""What has to be known about Slipstream on a CUDA card, in one run of a few minutes (`make gpu`).

Sections run in order of worth; after each one the JSON file is written anew, so a run that is cut off keeps
what it had. Without a card (or with --dry) it prints what each section would do and runs it on the CPU at a
tiny size, so that the script itself is tested; its figures then mean nothing and say so.

The large target has the shapes and bytes of Qwen3-8B and random weights: its text means nothing, its drafts
are forced to be right for a given number of slots. That is said in the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

import slipstream
from slipstream.core.files import replacing
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.accept import Proposal
from slipstream.decode.lossless import check
from slipstream.model import DraftConfig, Drafter
from slipstream.tape import TapeRecorder
from slipstream.target import Target, target_from_model

#: Bytes per second that the memory of a card gives, by a part of its name (data sheets of NVIDIA).
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.0e12, "L40S": 0.864e12, "L4": 0.3e12}
DEPTH, BLOCK = 5, 16


@dataclass(frozen=True)
class Size:
    """Sizes of a run.

    Attributes:
        width: of the large target; the other sizes follow Qwen3-8B's proportions.
        layers: of it.
        vocabulary: of it.
        tokens: decoded per request.
        rows: of the timed rounds.
    """

    width: int
    layers: int
    vocabulary: int
    tokens: int
    rows: tuple[int, ...]


#: Of requests whose captured rounds are compared with those run as they are.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.2},
)
REAL = Size(4096, 36, 151_936, 96, (1, 8, 32))
DRY = Size(128, 3, 512, 24, (1, 2))


def main() -> None:
    """Run the sections, write the file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("-o", "--out", type=Path, default=None, help="JSON file; printed as well")
    parser.add_argument("--seconds", type=float, default=480, help="no section begins after so long")
    options = parser.parse_args()
    dry = options.dry or not torch.cuda.is_available()
    device = torch.device("cpu" if dry else "cuda")
    found: dict[str, Any] = {
        "card": "none: a dry run on the CPU, figures mean nothing" if dry else torch.cuda.get_device_name(),
        "versions": {"slipstream": slipstream.__version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "large target": "random weights in the shapes of Qwen3-8B, drafts forced; the text means nothing",
    }
    sections: dict[str, Callable[[torch.device, Size], Any]] = {
        "equality": equality,
        "captured rounds": captured,
        "host copies": host_copies,
        "rounds": rounds,
        "graph of a verify pass": graph,
    }
    begun, size = time.perf_counter(), DRY if dry else REAL
    for name, section in sections.items():
        said = (section.__doc__ or "").strip().splitlines()[0]
        print(f"{'would do' if dry else 'does'} {name}: {said}", flush=True)
        if time.perf_counter() - begun > options.seconds:
            found[name] = "left out: no time"
            continue
        try:
            found[name] = section(device, size)
        except Exception as error:  # what comes after it is worth having all the same
            found[name] = f"failed: {type(error).__name__}: {error}"
        if options.out is not None:
            with replacing(options.out, force=True) as file:
                json.dump(found, file, indent=1)
    print(json.dumps(found))


def equality(device: torch.device, size: Size) -> Any:
    """Drafted against plain decoding, same shapes and one row, greedy and sampled, float32 and bfloat16."""
    verdicts = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, drafter = models(device, dtype, DRY)
        requests = [
            Request(tuple(range(3, 3 + length)), SamplingOptions(max_tokens=24, temperature=t, seed=length))
            for length in (4, 30)
            for t in (0.0, 0.8)
        ]
        report = check(target, DraftProposer(target, drafter), requests)
        verdicts[report.dtype] = {"exact": report.exact, "ties": report.ties, "requests": len(requests)}
        verdicts[report.dtype]["graphs"] = report.graphs
    return verdicts


def captured(device: torch.device, size: Size) -> Any:
    """Rounds replayed as graphs against the same rounds run as they are: texts, captures, reasons."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, drafter = models(device, dtype, DRY)
        requests = [
            Request((3, 4, 5 + n), SamplingOptions(max_tokens=60, ignore_eos=True, seed=n, **settings))
            for n, settings in enumerate(SETTINGS)
        ]
        for drafts in (0, 3, BLOCK - 1):
            same, as_they_are = {}, EngineOptions(drafts=drafts, graphs="off")
            # Without a card a tape stands for the graphs: it replays the operations and none of the Python.
            recorder = None if device.type == "cuda" else TapeRecorder()
            one = Engine(target, DraftProposer(target, drafter), EngineOptions(drafts=drafts), recorder)
            other = Engine(target, DraftProposer(target, drafter), as_they_are)
            for request, settings in zip(requests, SETTINGS, strict=True):
                texts = [engine.generate([request])[0].token_ids for engine in (one, other)]
                same[str(settings)] = texts[0] == texts[1]
            texts = [[done.token_ids for done in engine.generate(requests)] for engine in (one, other)]
            same["together"] = texts[0] == texts[1]
            name = str(dtype).removeprefix("torch.")
            found[f"{name}, {drafts} drafts"] = {"same": same, "graphs": one.graphs.sentence()}
    return found


def host_copies(device: torch.device, size: Size) -> Any:
    """Copies from the card per round; one is expected."""
    target, drafter = models(device, torch.bfloat16, DRY)
    engine = Engine(target, DraftProposer(target, drafter), EngineOptions(drafts="max"))
    if device.type != "cuda":
        return "needs a card; tests/rules/test_round_copies.py counts them on the CPU"
    rows = engine.open(2)
    for n in (3, 4):
        rows.submit(Request((n, 5), SamplingOptions(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        rows.step()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            rows.step()
    torch.cuda.set_sync_debug_mode("default")
    return {"per round": len(caught) / 4, "where": sorted({f"{w.filename}:{w.lineno}" for w in caught})[:8]}


def rounds(device: torch.device, size: Size) -> Any:
    """Plain and drafted rounds of the large target with forced acceptance, captured and run as they are,
    beside the memory floor.
    """
    target, drafter = models(device, torch.bfloat16, size)
    bandwidth = next((b for name, b in BANDWIDTH.items() if device.type == "cuda" and name in card()), None)
    table = []
    for rows in size.rows:
        requests = [
            Request(tuple(range(5 + n, 105 + n)), SamplingOptions(max_tokens=size.tokens, ignore_eos=True))
            for n in range(rows)
        ]
        plain = Engine(target, None, EngineOptions(max_rows=rows))
        eager = {"max_rows": rows, "graphs": "off"}
        plain_eager = Engine(target, None, EngineOptions(**eager))
        texts = [done.token_ids for done in plain.generate(requests)]
        whole = [[*request.prompt_ids, *text] for request, text in zip(requests, texts, strict=True)]
        for right in (3, 7):
            proposer = Forced(target, drafter, whole, right)
            engine = Engine(target, proposer, EngineOptions(max_rows=rows, drafts="max"))
            engine_eager = Engine(target, proposer, EngineOptions(**eager, drafts="max"))
            engines = {"plain_eager": plain_eager, "drafted_eager": engine_eager}
            times = {}
            # The captured drafted one last: its completions are those that are counted below.
            for name, one in (engines | {"plain": plain, "drafted": engine}).items():
                one.generate(requests)  # captures, and whatever else only first times take
                with timed(device) as took:
                    done = one.generate(requests)
                times[name] = took[0] / max(item.rounds for item in done) * 1e3
            lengths = [item.acceptance_length for item in done]
            row = {"rows": rows, "right": right, "acceptance_length": statistics.mean(lengths)}
            row |= {f"{name}_round_ms": ms for name, ms in times.items()}
            row |= {"graphs": engine.graphs.sentence(), "plain_graphs": plain.graphs.sentence()}
            if bandwidth is not None:
                row |= floors(target, drafter, bandwidth)
            table.append(row)
    return table


def graph(device: torch.device, size: Size) -> Any:
    """A verify pass of one row and a whole block, eager and captured as a CUDA graph; same logits?"""
    target, _ = models(device, torch.bfloat16, size)
    cache = target.new_cache(1, 256)
    ids_BT, start_B = torch.full((1, BLOCK), 7, device=device), torch.tensor([100], device=device)

    def work() -> torch.Tensor:
        return target.verify(ids_BT, start_B, cache, 128).logits_BTV

    eager = median_ms(work, device)
    if device.type != "cuda":
        return {"eager_ms": eager, "captured": "needs a card"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        logits = work()
    replayed = median_ms(captured.replay, device)
    return {"eager_ms": eager, "captured_ms": replayed, "same logits": bool(torch.equal(logits, work()))}


class Forced(DraftProposer):
    """The drafter's work, and drafts that are right for so many slots, whatever it says."""

    def __init__(self, target: Target, drafter: Drafter, texts: list[list[int]], right: int) -> None:
        super().__init__(target, drafter)
        longest = max(map(len, texts)) + BLOCK + 1
        padded = [[*text, *[0] * (longest - len(text))] for text in texts]
        self._texts_BL, self._right = torch.tensor(padded, device=target.device), right

    def propose(self, anchor_B: Any, length_B: Any, num_drafts: int, *rest: Any) -> Proposal:
        """No more copies than the drafter's own proposal makes."""
        super().propose(anchor_B, length_B, num_drafts, *rest)
        offset_K = torch.arange(1, num_drafts + 1, device=length_B.device)
        position_BK = (length_B[:, None] + offset_K).clamp(max=self._texts_BL.shape[1] - 1)
        drafts_BK = self._texts_BL[: len(length_B)].gather(1, position_BK)
        return Proposal(torch.where(offset_K <= self._right, drafts_BK, (drafts_BK + 1) % 100))


def models(device: torch.device, dtype: torch.dtype, size: Size) -> tuple[Target, Drafter]:
    """A random target of the family and a random drafter for it."""
    from transformers import AutoModelForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 128 or 1,
        num_key_value_heads=max(1, size.width // 512),
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        target = target_from_model(model, None, "random Qwen3")
        depth, block = (DEPTH, BLOCK) if size is REAL else (2, BLOCK)
        shape = DraftConfig.for_target(
            target.info, num_layers=depth, block_size=block, num_taps=min(5, size.layers)
        )
        with device:
            drafter = Drafter(shape).to(dtype).eval()
    finally:
        torch.set_default_dtype(before)
    return target, drafter


def floors(target: Target, drafter: Drafter, bandwidth: float) -> dict[str, float]:
    """Milliseconds that reading the weights alone takes, of a plain and of a drafted round."""
    body = sum(p.numel() * p.element_size() for p in target.model.parameters())
    embedding = target.info.vocab_size * target.info.width * 2  # read row by row
    head = target.info.vocab_size * target.info.width * 2
    draft = sum(p.numel() * p.element_size() for p in drafter.parameters()) + head
    plain = body - embedding
    return {
        "plain_floor_ms": plain / bandwidth * 1e3,
        "drafted_floor_ms": (plain + draft) / bandwidth * 1e3,
    }


def card() -> str:
    """Name of the card in use."""
    return torch.cuda.get_device_name()


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Seconds of a block, the card's work included."""
    took: list[float] = []
    begun = time.perf_counter()
    yield took
    if device.type == "cuda":
        torch.cuda.synchronize()
    took.append(time.perf_counter() - begun)


def median_ms(work: Callable[[], Any], device: torch.device) -> float:
    """Of ten times, after two."""
    times = []
    for number in range(12):
        with timed(device) as took:
            work()
        if number >= 2:
            times.append(took[0] * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
