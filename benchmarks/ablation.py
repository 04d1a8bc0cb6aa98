"""What each choice of the recipe is worth: many short trainings of equal compute, one choice changed in each.

Reads the features of a finished run (`slipstream train -o RUN`). Every variant gets as many steps as the
given CPU seconds hold, at the cost of its own first steps, so that a dearer variant takes fewer; CPU seconds
and not the clock's, as other work on the machine would count otherwise. Rows are appended to a JSON lines
file as they are ready; variants that it holds already are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slipstream.core.options import CONTINUED_RATE, TargetOptions, TrainOptions
from slipstream.data.chats import Chat
from slipstream.data.features import Document, Features, FeatureStore
from slipstream.data.readers import read_chats
from slipstream.formats import read_zlab
from slipstream.model import DraftConfig, Drafter
from slipstream.model.drafter import ContextKV
from slipstream.model.rope import rope_angles
from slipstream.target import Target, load_target
from slipstream.train.checkpoint import new_run
from slipstream.train.evaluate import Forecast, evaluate
from slipstream.train.loop import train
from slipstream.train.pipeline import held_out_numbers
from slipstream.train.prepare import fresh_drafter, frozen_ends
from slipstream.train.step import FrozenEnds

# Steps whose cost decides how many a variant gets; the first one is left out, as it warms up.
_TRIAL_STEPS = 4


@dataclass(frozen=True)
class Variant:
    """One training.

    Attributes:
        name: in the table.
        training: options that differ from the base.
        layers: draft layers.
        block: slots of a block.
        data: which chats: `all`, a share such as `1/4`, `greedy`, or `sampled` (as many as are greedy).
        start: begins from the drafter that is given on the command line.
        separate: every draft layer mixes the taps by itself; no layout can hold such a drafter.
    """

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    layers: int = 3
    block: int = 8
    data: str = "all"
    start: bool = False
    separate: bool = False


# What the others of these are measured against.
_STARTED_RATE = 6e-4
_HARD = {"soft_share": 0.0}
VARIANTS = (
    Variant("base"),
    Variant("base, another seed", {"seed": 1}),
    Variant("hard labels", _HARD),
    Variant("random weights", {"initialise": False}),
    Variant("hard labels, random weights", _HARD | {"initialise": False}),
    Variant("Muon", {"optimizer": "muon"}),
    Variant("rate 6e-4", {"learning_rate": 6e-4}),
    Variant("rate 4e-3", {"learning_rate": 4e-3}),
    Variant("2 layers", layers=2),
    Variant("4 layers", layers=4),
    Variant("5 layers", layers=5),
    Variant("blocks of 12", block=12),
    Variant("blocks of 16", block=16),
    Variant("decay weights", {"weighting": "decay"}),
    Variant("whole vocabulary", {"vocabulary": 0}),
    Variant("half the blocks a step", {"documents": 4}),
    Variant("taps mixed by each layer", separate=True),
    Variant("1/4 of the chats", data="1/4"),
    Variant("from a drafter: base", start=True),
    Variant("from a drafter: base, another seed", {"seed": 1}, start=True),
    Variant("from a drafter: Muon", {"optimizer": "muon"}, start=True),
    Variant("from a drafter: rate 3e-4", {"learning_rate": CONTINUED_RATE}, start=True),
    Variant("from a drafter: rate 2e-3", {"learning_rate": 2e-3}, start=True),
    Variant("from a drafter: soft labels alone", {"soft_share": 1.0}, start=True),
    Variant("from a drafter: hard labels", _HARD, start=True),
    Variant("from a drafter: total variation", {"loss": "tv"}, start=True),
    Variant("from a drafter: expected acceptance", {"loss": "acceptance"}, start=True),
    Variant("from a drafter: decay weights", {"weighting": "decay"}, start=True),
    Variant(
        "from a drafter: 4 x chats a step, a quarter of the anchors",
        {"documents": 32, "anchors": 6},
        start=True,
    ),
    Variant("from a drafter: half the blocks a step", {"documents": 4}, start=True),
    Variant("from a drafter: taps mixed by each layer", start=True, separate=True),
    Variant("from a drafter: greedy chats", data="greedy", start=True),
    Variant("from a drafter: sampled chats", data="sampled", start=True),
)


class SeparateTaps(Drafter):
    """A drafter whose layers have a fusion of the taps each, all alike at first.

    Args:
        drafter: whose weights it begins with.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config)
        self.load_state_dict(drafter.state_dict())
        self.fusions = nn.ModuleList(copy.deepcopy(self.fc) for _ in range(len(self.layers) - 1))

    def context_kv(self, features_BLE: Tensor, position_BL: Tensor) -> ContextKV:
        """As `Drafter.context_kv`; the first layer reads `fc`, each other one its own."""
        cos, sin = rope_angles(position_BL, self.config.head_dim, self.config.rope_theta)
        return tuple(
            layer.self_attn.keys_values(self.hidden_norm(fusion(features_BLE)), cos, sin)  # type: ignore[operator, union-attr]
            for layer, fusion in zip(self.layers, [self.fc, *self.fusions], strict=True)
        )


class Part:
    """Some documents of a store.

    Args:
        store: all of them.
        numbers: which.
    """

    def __init__(self, store: Features, numbers: Sequence[int]) -> None:
        self._store, self._numbers, self.index = store, list(numbers), store.index

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._numbers)

    def length(self, number: int) -> int:
        """Tokens of one document."""
        return self._store.length(self._numbers[number])

    def answer_tokens(self) -> int:
        """Answer tokens of all documents together."""
        return sum(map(self._store.answer_tokens_of, self._numbers))

    def answer_tokens_of(self, number: int) -> int:
        """Answer tokens of one document."""
        return self._store.answer_tokens_of(self._numbers[number])

    def longest_answer(self, number: int) -> int:
        """Tokens of a document's longest answer."""
        return self._store.longest_answer(self._numbers[number])

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, shape [V]; of the whole store, so that all parts score the same."""
        return self._store.token_counts(vocab_size)

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Some documents."""
        return self._store.documents([self._numbers[number] for number in numbers])

    def __getitem__(self, number: int) -> Document:
        """One document."""
        return self._store[self._numbers[number]]


@dataclass(frozen=True)
class Bench:
    """What all variants share.

    Attributes:
        target: with weights as they are, not packed.
        ends: of the target.
        store: training documents.
        held: held-out documents.
        chats: of `store`, in its order.
        start: folder of a drafter to begin from.
        base: options of all.
        seconds: of CPU time for the steps of one variant.
    """

    target: Target
    ends: FrozenEnds
    store: Features
    held: Features
    chats: Sequence[Chat]
    start: Path | None
    base: TrainOptions
    seconds: float


def main() -> None:
    """Run the variants that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run with features on disk")
    parser.add_argument("--chats", required=True, help="the chats that it was trained on")
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", type=Path, help="drafter that the second half begins from")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON lines, appended")
    parser.add_argument("--seconds", type=float, default=240.0, help="CPU seconds of steps per variant")
    parser.add_argument("--documents", type=int, default=8, help="chats per step")
    parser.add_argument("--anchors", type=int, default=24, help="blocks per chat and step")
    parser.add_argument(
        "--only", action="append", help="this variant, by name; may be repeated, and says the order"
    )
    parser.add_argument(
        "--share", default="0/1", help="every so-manieth variant, as I/N, for several processes"
    )
    options = parser.parse_args()
    bench = _bench(options)
    done = {json.loads(line)["name"] for line in options.out.open()} if options.out.exists() else set()
    first, step = map(int, options.share.split("/"))
    known = {variant.name: variant for variant in VARIANTS}
    if strange := set(options.only or ()) - set(known):
        raise SystemExit(f"there is no variant {strange.pop()!r}")
    for variant in [known[name] for name in options.only or known][first::step]:
        if variant.name in done or (variant.start and not options.draft):
            continue
        row = measure(bench, variant)
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(bench: Bench, variant: Variant) -> dict[str, Any]:
    """Train one variant and score it on the held-out chats."""
    rate = {"learning_rate": _STARTED_RATE} if variant.start else {}
    options = replace(bench.base, **rate | variant.training)
    store = _chosen(bench, variant.data)
    cost = _cost_of_a_step(bench, variant, store, options)
    steps = max(_TRIAL_STEPS, round(bench.seconds / cost))
    drafter, training, _ = _trained(bench, variant, store, replace(options, max_steps=steps))
    forecast: Forecast = evaluate(drafter, bench.ends, bench.held)
    return {
        "name": variant.name,
        "steps": steps,
        "cpu_seconds_per_step": round(cost, 3),
        "training": round(training, 3),
        "held_out": round(forecast.acceptance_length, 4),
        "hit_rate": [round(rate, 4) for rate in forecast.hit_rate],
        "variant": asdict(variant),
    }


def _cost_of_a_step(bench: Bench, variant: Variant, store: Features, options: TrainOptions) -> float:
    """CPU seconds of one step of this variant."""
    marks = _trained(bench, variant, store, replace(options, max_steps=_TRIAL_STEPS))[2]
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def _trained(
    bench: Bench, variant: Variant, store: Features, options: TrainOptions
) -> tuple[Drafter, float, list[float]]:
    """A trained drafter, its acceptance length on the last batches, the CPU clock after each step."""
    if variant.start:
        assert bench.start is not None
        drafter = read_zlab(bench.start).float().train().requires_grad_(True)
        drafter.config = replace(drafter.config, block_size=variant.block)
    else:
        config = DraftConfig.for_target(
            bench.target.info,
            num_layers=variant.layers,
            block_size=variant.block,
            num_taps=5,
            mask_token_id=None,
        )
        drafter, _ = fresh_drafter(config, bench.target, store, options)
    if variant.separate:
        drafter = SeparateTaps(drafter)
    run = new_run(drafter, options)
    marks: list[float] = []
    lengths: list[float] = []

    def note(progress: Any) -> None:
        marks.append(time.process_time())
        lengths.append(progress.acceptance_length)

    with tempfile.TemporaryDirectory() as folder:
        train(run, bench.ends, store, None, options, Path(folder), note)
    return run.average, lengths[-1], marks


def _chosen(bench: Bench, data: str) -> Features:
    """The chats that a variant trains on."""
    numbers = range(len(bench.store))
    if data == "all":
        return bench.store
    if data in ("greedy", "sampled"):
        kinds = [
            [n for n in numbers if (bench.chats[n].temperature == 0) == greedy] for greedy in (True, False)
        ]
        fewest = min(map(len, kinds))
        return Part(bench.store, kinds[data == "sampled"][:fewest])
    parts = int(data.split("/")[1])
    return Part(bench.store, numbers[::parts])


def _bench(options: argparse.Namespace) -> Bench:
    """Load what all variants share."""
    target = load_target(options.target, TargetOptions(pack=False))
    store, held = FeatureStore(options.run / "features"), FeatureStore(options.run / "held-out")
    chats = read_chats(options.chats, None).chats
    out = held_out_numbers(len(chats))
    kept = [chat for number, chat in enumerate(chats) if number not in out]
    if len(kept) != len(store):
        raise SystemExit(
            f"{options.run} was trained on {len(store)} chats, but {options.chats} gives {len(kept)}"
        )
    base = TrainOptions(
        documents=options.documents,
        anchors=options.anchors,
        evaluate_every=10**9,
        save_every=10**9,
        average=0.98,
    )
    ends = frozen_ends(target)
    return Bench(target, ends, store, held, kept, options.draft, base, options.seconds)


if __name__ == "__main__":
    main()
