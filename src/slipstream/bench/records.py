"""What a benchmark leaves behind: one JSON line per run and one per request, read and written strictly.

Nothing is computed here; the definitions stand in `metrics`.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from slipstream.core.errors import InputError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Divergence:
    """Where a text parts from that of the reference system.

    Attributes:
        position: index among the emitted tokens.
        gap: distance of the reference's scores of the two tokens; None where rounding cannot explain it.
        bound: the largest gap that rounding may explain.
        tie: rounding explains it.
    """

    position: int
    gap: float | None
    bound: float
    tie: bool


@dataclass(frozen=True)
class TimeSplit:
    """Where the seconds of the rounds went.

    Attributes:
        draft_s: proposing, and showing the proposer what was said.
        verify_s: the target's pass over the block.
        other_s: accepting, streaming, and all else between first and last token.
    """

    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True)
class Measured:
    """What one request came to, whoever served it.

    Attributes:
        token_ids: emitted, a final stop token included; nothing after it.
        text: as the user reads it.
        spans: the text cut where drafted and undrafted tokens meet; empty where that is not known.
        stop_reason: `stop` or `length`.
        started_s: seconds from the start of the run to the request.
        ttft_s: from the request to its first token.
        decode_s: from the first token to the last.
        total_s: from the request to its end.
        rounds: draft-verify rounds; 0 where they are not known.
        emitted_in_rounds: tokens that they emitted; the first token comes from the prompt's pass.
        drafted_per_position: at index k-1, rounds that had a draft k.
        tried_per_position: at index k-1, rounds in which draft k was looked at: all before it were kept, and
            the text had not ended.
        accepted_per_position: at index k-1, rounds that kept draft k.
        accepted_runs: drafts that each round kept, in order; empty where only totals are known.
        parked: rounds without drafts.
        split: None where it was not taken.
        peak_memory_bytes: of the device, or of the process on a CPU; 0 where it is not known.
        past_end: tokens that were counted or sent after the end of the text.
        cached_tokens: of the prompt that a server had read before.
        stated_acceptance: tokens per round as a server states them that counts nothing, a mean over all that
            it has served; None otherwise.
    """

    token_ids: tuple[int, ...]
    text: str
    stop_reason: str
    started_s: float
    ttft_s: float
    decode_s: float
    total_s: float
    spans: tuple[tuple[str, bool], ...] = ()
    rounds: int = 0
    emitted_in_rounds: int = 0
    drafted_per_position: tuple[int, ...] = ()
    tried_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    accepted_runs: tuple[int, ...] = ()
    parked: int = 0
    split: TimeSplit | None = None
    peak_memory_bytes: int = 0
    past_end: int = 0
    cached_tokens: int = 0
    stated_acceptance: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens emitted, a final stop token included."""
        return len(self.token_ids)


RecordKey = tuple[str, str, str, int, int, int, float]
"""System, workload, prompt, turn, repeat, users and rate of a request."""


@dataclass(frozen=True)
class Record:
    """One request of a benchmark.

    Attributes:
        system: that served it.
        workload: that it belongs to.
        prompt: name of the prompt in its workload.
        turn: of a conversation, from 0.
        repeat: of the same request, from 0.
        concurrency: users at a time; 1 alone.
        rate: arrivals per second of an open load; 0.0 for a closed one.
        prompt_tokens: length of the prompt.
        prompt_hash: of its token ids.
        template_hash: of the chat template that made them.
        warm: the system had answered before, in this process: its warm-up, or another request.
        divergence: from the reference system's text; None where equal, or not comparable.
        marks: what a reader must know about this request.
        measured: what it came to.
    """

    system: str
    workload: str
    prompt: str
    turn: int
    repeat: int
    prompt_tokens: int
    prompt_hash: str
    template_hash: str
    measured: Measured
    concurrency: int = 1
    rate: float = 0.0
    warm: bool = True
    divergence: Divergence | None = None
    marks: tuple[str, ...] = ()

    @property
    def key(self) -> RecordKey:
        """What no other request of a file shares."""
        pair = (self.concurrency, self.rate)
        return (self.system, self.workload, self.prompt, self.turn, self.repeat, *pair)


@dataclass(frozen=True)
class Side:
    """One of the systems compared.

    Attributes:
        name: as in the records.
        kind: `plain`, `drafted`, `lookup`, `transformers` or `url`.
        exact: promises the text of the reference system at any temperature.
        detail: in words: the drafter, its block, the server.
        block_size: slots of a block; 0 where it is not known.
        weights_bytes: that it adds to the target.
    """

    name: str
    kind: str
    exact: bool
    detail: str = ""
    block_size: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True)
class Run:
    """What a file's records have in common; written once, and again by each call that adds to it.

    Attributes:
        command: as it was typed.
        started: date and time, UTC.
        versions: of what computed.
        machine: where.
        target: name, and how it was loaded.
        target_bytes: of its weights.
        sides: the systems.
        sampling: options of decoding.
        engine: options of our engines.
        seed: of orders and arrivals.
        marks: what a reader must know about all of it.
    """

    command: str
    started: str
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    target: Mapping[str, str]
    target_bytes: int
    sides: tuple[Side, ...]
    sampling: Mapping[str, Any]
    engine: Mapping[str, Any]
    seed: int = 0
    marks: tuple[str, ...] = ()

    @property
    def settings(self) -> str:
        """Hash of what must be the same for records to lie in one file."""
        parts = (self.target, dict(self.sampling), dict(self.engine), dict(self.machine), dict(self.versions))
        return digest(json.dumps(parts, sort_keys=True, default=str))


@dataclass(frozen=True)
class Results:
    """A file of results: its runs, and its records in the order in which they were measured."""

    runs: tuple[Run, ...]
    records: tuple[Record, ...]
    source: str = field(default="", compare=False)


def digest(text: str) -> str:
    """A short hash, for comparing by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_ids(ids: Sequence[int]) -> str:
    """A short hash of token ids."""
    return digest(",".join(map(str, ids)))


def to_line(item: Run | Record) -> str:
    """One line of JSON, its end included."""
    kind = "run" if isinstance(item, Run) else "request"
    document = {"kind": kind, **asdict(item)}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def append(path: Path, items: Iterable[Run | Record]) -> None:
    """Add lines to a file in one write, so that an interruption leaves whole lines.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(to_line(item) for item in items))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_results(path: Path) -> Results:
    """Read a file of results.

    A last line without its end was cut off by a kill, and is left out.

    Raises:
        InputError: no such file, or a line that is not one of ours; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read results from {path}: {error}") from error
    runs: list[Run] = []
    records: list[Record] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            raw = json.loads(line)
            kind = raw.pop("kind")
            if kind == "run":
                runs.append(_built(Run, raw))
            elif kind == "request":
                records.append(_built(Record, raw))
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, line {number}, is not a line of results: {error}") from error
    if not runs:
        raise InputError(f"{path} holds no results of slipstream bench")
    return Results(tuple(runs), tuple(records), str(path))


def mend(path: Path) -> None:
    """Cut off a last line that was not finished, so that the next one begins a line.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _built(kind: type[_T], raw: Any) -> _T:
    """An instance of a dataclass from parsed JSON; unknown and missing fields are errors."""
    if not isinstance(raw, dict):
        raise ValueError(f"{kind.__name__.lower()} is not an object")
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, name) for name, value in raw.items()})


def _value(hint: Any, raw: Any, name: str) -> Any:
    """JSON to what the annotation says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if raw is None else _value(arguments[0], raw, name)
    if hasattr(hint, "__dataclass_fields__"):
        return _built(hint, raw)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ValueError(f"{name} is not a list")
        kinds = [arguments[0]] * len(raw) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(kind, item, name) for kind, item in zip(kinds, raw, strict=True))
    if origin is not None:
        if not isinstance(raw, dict):
            raise ValueError(f"{name} is not an object")
        return raw
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if type(raw) is not hint:
        raise ValueError(f"{name} is {raw!r}, not a {hint.__name__}")
    return raw
