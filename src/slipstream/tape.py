"""Recorded operations that run again without their Python: what a CUDA graph does, on any device.

Not fast and not for decoding: it shows without a card that a round can be captured. A tape keeps every
operation with the tensors and scalars that it had; a replay runs them on those very tensors. Between replays
whatever a tape made itself is overwritten, as the memory of a graph belongs to others then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

#: Operations that look at values on the host, that make a tensor of host data, or whose shape hangs on
#: values. None of them can be captured.
UNCAPTURABLE = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "lift_fresh", "lift_fresh_copy", "to_device"),
        *("nonzero", "nonzero_static", "masked_select", "unique", "_unique", "_unique2", "unique_dim"),
        *("unique_consecutive", "repeat_interleave", "bincount", "argwhere", "pin_memory", "_pin_memory"),
        # Random numbers of a generator; noise here is a hash.
        *("rand", "randn", "randint", "uniform_", "normal_", "exponential_", "multinomial", "bernoulli_"),
    }
)
#: Stands in whatever was overwritten.
_JUNK = 1 << 40


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        call: the operator.
        args: as it was given them.
        kwargs: likewise.
        made: tensors that it returned.
        fresh: for each of them, whether it is new memory and no view of an argument.
    """

    call: Any
    args: Any
    kwargs: Any
    made: tuple[Tensor, ...]
    fresh: tuple[bool, ...]

    @property
    def name(self) -> str:
        """Of the operator, without its overload."""
        return str(self.call.overloadpacket.__name__)

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold it."""
        indices = tree_leaves(self.args[1]) if self.name.startswith("index") and len(self.args) > 1 else []
        by_mask = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        return self.name not in UNCAPTURABLE and not by_mask

    def run(self) -> None:
        """Again, into the same tensors."""
        again = tuple(leaf for leaf in tree_leaves(self.call(*self.args, **self.kwargs)) if _is_tensor(leaf))
        for made, fresh, new in zip(self.made, self.fresh, again, strict=True):
            if fresh:
                made.copy_(new)


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Records what is run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and keep it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = tuple(leaf for leaf in tree_leaves(out) if _is_tensor(leaf))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        self.steps.append(Step(func, args, kwargs, made, tuple(_storage(t) not in given for t in made)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """All operations again, in order."""
        for step in self.steps:
            step.run()

    @torch.no_grad()
    def spoil(self) -> None:
        """Overwrite what the tape's own operations made."""
        for made in self._fresh():
            made.fill_(
                torch.nan if made.is_floating_point() else made.dtype == torch.bool or _junk(made.dtype)
            )

    def outline(self) -> list[tuple[Any, ...]]:
        """Each operation as a graph knows it: operator, scalars, and of every tensor shape, strides, dtype
        and where it lies: the address of one from outside, the number of one that the tape made.
        """
        numbers = {_storage(made): number for number, made in enumerate(self._fresh())}

        def seen(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            place = numbers.get(_storage(leaf))
            where = ("made", place) if place is not None else ("address", _storage(leaf))
            return tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, *where

        return [
            (str(step.call), *map(seen, tree_leaves((step.args, step.kwargs))), *map(seen, step.made))
            for step in self.steps
        ]

    def refused(self) -> set[str]:
        """Operations that a CUDA graph cannot hold."""
        return {step.name for step in self.steps if not step.captures}

    def _fresh(self) -> Iterable[Tensor]:
        for step in self.steps:
            for made, fresh in zip(step.made, step.fresh, strict=True):
                if fresh and made.numel():
                    yield made


class TapeRecorder:
    """Captures rounds on tapes; see `decode.graphs.Recorder`.

    Attributes:
        tapes: of the captured rounds that may still be replayed.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """One run of the work.

        Raises:
            RuntimeError: a CUDA graph could not hold one of its operations.
        """
        tape = Tape()
        with tape:
            result = work()
        if tape.refused():
            raise RuntimeError(f"a graph cannot hold {', '.join(sorted(tape.refused()))}")
        self.tapes.append(tape)

        def replay() -> None:
            for other in self.tapes:
                other.spoil()
            tape.replay()

        return result, replay

    def forget(self) -> None:
        """Their memory is somebody else's."""
        for tape in self.tapes:
            tape.spoil()
        self.tapes.clear()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _junk(dtype: torch.dtype) -> int:
    return min(_JUNK, torch.iinfo(dtype).max)
