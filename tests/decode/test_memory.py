"""Twenty thousand rounds must not leave anything behind."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import Engine, NullProposer
from slipstream.target import Prefill

VOCAB = 8


class CountingTarget:
    """A target whose next token is the last one plus one; fast enough for many rounds."""

    device = torch.device("cpu")
    dtype = torch.float32
    tokenizer = None
    kernels = None
    token_bytes = 0
    tap_ids: tuple[int, ...] = ()
    info = SimpleNamespace(
        intermediate_size=1, vocab_size=VOCAB, max_context=4000, eos_token_ids=(), name="counting", width=1
    )

    def set_taps(self, layer_ids: tuple[int, ...]) -> None:
        """No layers."""

    def new_cache(self, rows: int, slots: int) -> Any:
        """Only its size is asked for."""
        return SimpleNamespace(
            rows=rows,
            slots=slots,
            clear=lambda row_B=None: None,
            reuse=lambda again, longest: again == rows and longest <= slots,
        )

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float()

    def prefill_parts(
        self, ids: torch.Tensor, length: torch.Tensor, cache: Any, chunk: int, row_B: Any, *start: Any
    ) -> Iterator[Prefill]:
        """Logits after the last token of each row, in one part."""
        last = ids.gather(1, length[:, None] - 1)[:, 0]
        yield Prefill(self._logits(last), torch.zeros(*ids.shape, 1))

    def verify(self, ids: torch.Tensor, start: torch.Tensor, cache: Any, visible: int, row: Any) -> Any:
        """Logits after every token."""
        return SimpleNamespace(logits_BTV=self._logits(ids), features_BTE=torch.zeros(*ids.shape, 1))


def held(engine: Engine, calls: int) -> int:
    """Bytes that Python holds after so many calls, completions dropped."""
    request = Request([1], SamplingOptions(max_tokens=501, repetition_penalty=1.1))
    for _ in range(calls):
        engine.generate([request])
    engine.completions = []
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_memory_is_constant_over_20000_rounds() -> None:
    engine = Engine(CountingTarget(), NullProposer(2), EngineOptions())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        before = held(engine, 2)
        tensors = sum(type(o) is torch.Tensor for o in gc.get_objects())
        after = held(engine, 40)
        assert after - before < 64 * 1024
        assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= tensors
    finally:
        tracemalloc.stop()
