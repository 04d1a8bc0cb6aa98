"""Speed and memory of Slipstream's trainer beside speculators' DFlash trainer and a plain training step.

Every run is a process of its own on the same chats, target, taps and shapes; features are made once, before.
The contenders take turns, and the figures are medians over the rounds; ratios hold within one run only.

The peer gets an interpreter of its own: `--peer PYTHON`, one that imports speculators 0.9.0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_SKIPPED = 2
_CANDIDATES = 16
_MIB = 2**20
_HARD = {"soft_share": 0.0, "vocabulary": 0}


def contenders(peer: bool, full: bool) -> dict[str, dict[str, Any]]:
    """What takes turns: who trains, in which precision, with which options besides the shapes."""
    found: dict[str, dict[str, Any]] = {
        "slipstream, defaults": {"who": "slipstream", "precision": "bfloat16"},
        "slipstream, whole vocabulary": {"who": "slipstream", "precision": "bfloat16", "options": _HARD},
        "plain step": {"who": "plain", "precision": "bfloat16", "options": _HARD},
    }
    if full:
        found["slipstream, whole vocabulary, float32"] = {
            "who": "slipstream",
            "precision": "float32",
            "options": _HARD,
        }
    if peer:
        found["speculators"] = {"who": "speculators", "precision": "bfloat16"}
        if full:
            found["speculators, float32"] = {"who": "speculators", "precision": "float32"}
    return found


#: Who is compared with whom: same work first, then what a user gets without any option.
PAIRS = (
    ("slipstream, whole vocabulary", "speculators"),
    ("slipstream, whole vocabulary, float32", "speculators, float32"),
    ("slipstream, defaults", "speculators"),
    ("slipstream, whole vocabulary", "plain step"),
    ("slipstream, defaults", "plain step"),
)


def main() -> None:
    """Prepare, run all rounds, print the table and write the JSON."""
    options = _parsed()
    with tempfile.TemporaryDirectory(prefix="slipstream-training-") as name:
        folder = options.work or Path(name)
        shapes = _shapes(folder, options)
        named = contenders(options.peer is not None, options.full)
        runs: dict[str, list[dict[str, Any]]] = {label: [] for label in named}
        for round_ in range(options.rounds):
            for label, contender in named.items():
                runs[label].append(_run(contender, options, shapes, folder))
                print(f"round {round_ + 1}: {_line(label, summary(runs[label][-1:]))}", flush=True)
    totals = {label: summary(found) for label, found in runs.items()}
    about = {
        "shapes": shapes,
        "documents": options.documents,
        "anchors": options.anchors,
        "steps": options.steps,
        "threads": options.threads,
    }
    size = f"{options.steps} steps after {_SKIPPED}, {options.threads} threads"
    print(f"\nmedians of {options.rounds} rounds of {size}")
    for label, total in totals.items():
        print(_line(label, total))
    compared = ratios(totals)
    for line in compared:
        print(
            f"{line['first']} / {line['second']}: tokens/s {line['tokens_per_second']:.2f}, "
            f"blocks/s {line['blocks_per_second']:.2f} "
            f"(per CPU second {line['blocks_per_cpu_second']:.2f}), memory {line['memory']:.2f}"
        )
    if options.json is not None:
        whole = {"about": about, "totals": totals, "ratios": compared, "runs": runs}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="interpreter that imports speculators 0.9.0")
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("--chats-file", type=Path, default=_HERE / "chats_smollm2.jsonl.xz")
    parser.add_argument("--chats", type=int, default=200, help="most chats read")
    parser.add_argument(
        "--steps", type=int, default=8, help=f"steps that count, after {_SKIPPED} that do not"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--documents", type=int, default=16, help="chats per step")
    parser.add_argument("--anchors", type=int, default=24, help="blocks per chat")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--full", action="store_true", help="also in float32")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--work", type=Path, help="folder that keeps the features, 12 KiB a token")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options)
        raise SystemExit
    return options


def _shapes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What lies in the folder; made first where it is not there yet."""
    if not (folder / "shapes.json").exists():
        # A child's memory figures must not begin with what this process holds, so it stays small.
        flags = (
            "--prepare",
            str(folder),
            "--target",
            options.target,
            "--chats-file",
            str(options.chats_file),
        )
        counts = ("--chats", str(_chats_needed(options)), "--layers", str(options.layers))
        size = ("--block-size", str(options.block_size))
        subprocess.run([sys.executable, __file__, *flags, *counts, *size], check=True)
    shapes: dict[str, Any] = json.loads((folder / "shapes.json").read_text())
    return shapes


def _chats_needed(options: argparse.Namespace) -> int:
    """About as many chats as the steps read."""
    return min(options.chats, options.documents * (options.steps + 1))


def prepare(options: argparse.Namespace) -> None:
    """Target, chats and features in both layouts, all in the folder `prepare`."""
    import torch
    from safetensors.torch import save_file

    from slipstream.core.options import TargetOptions
    from slipstream.data.extract import documents_of, index_of
    from slipstream.data.features import Document, write_index, write_shard
    from slipstream.data.make import renderer_for
    from slipstream.data.readers import read_chats
    from slipstream.model import DraftConfig
    from slipstream.target import load_target

    folder: Path = options.prepare
    target = load_target(options.target, TargetOptions(pack=False))
    reading = read_chats(options.chats_file, renderer_for(target, None), None, None, options.chats)
    config = DraftConfig.for_target(target.info, num_layers=options.layers, block_size=options.block_size)
    taps = config.target_layer_ids
    # The peer also reads the output of the last layer, to make its labels from.
    target.set_taps((*taps, target.info.num_layers - 1))
    documents = []
    (folder / "hidden_states").mkdir(parents=True)
    (folder / "features").mkdir()
    for start in range(0, len(reading.chats), 32):
        for document in documents_of(target, reading.chats[start : start + 32], _CANDIDATES):
            hidden = document.features_LE.unflatten(-1, (-1, target.info.width))
            path = folder / "hidden_states" / f"hs_{len(documents)}.safetensors"
            save_file({"hidden_states": hidden.contiguous(), "token_ids": document.tokens_L}, path)
            read = document.features_LE[:, : len(taps) * target.info.width].clone()
            rest = document.top_ids_LJ, document.top_logprobs_LJ
            documents.append(Document(document.tokens_L, document.answer_L, read, *rest))
    mark = write_shard(folder / "features" / "shard-00000.safetensors", documents)
    index = index_of(target, reading.chats, taps, _CANDIDATES)
    write_index(
        folder / "features", type(index)(**{**vars(index), "shards": {"shard-00000.safetensors": mark}})
    )
    chats = [
        {
            "input_ids": document.tokens_L.tolist(),
            "loss_mask": (document.answer_L > 0).long().tolist(),
            "seq_len": len(document),
        }
        for document in documents
    ]
    (folder / "peer_chats.json").write_text(json.dumps(chats))
    target.model.save_pretrained(folder / "target")
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder / "target")
    shapes = {
        "target": options.target,
        "chats": len(documents),
        "tokens": sum(map(len, documents)),
        "layers": options.layers,
        "block_size": options.block_size,
        "taps": taps,
        "width": target.info.width,
        "vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "torch": torch.__version__,
    }
    (folder / "shapes.json").write_text(json.dumps(shapes))
    print(f"{shapes['chats']} chats, {shapes['tokens']} tokens; taps {taps}", flush=True)


def _run(
    contender: dict[str, Any], options: argparse.Namespace, shapes: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """One process; its figures."""
    peer = contender["who"] == "speculators"
    program = "training_peer.py" if peer else "training_contenders.py"
    interpreter = str(options.peer) if peer else sys.executable
    task = {
        **shapes,
        "contender": contender["who"],
        "folder": str(folder),
        "threads": options.threads,
        "skipped": _SKIPPED,
        "steps": options.steps,
        "precision": contender["precision"],
        # One more than is measured, as a checkpoint is written with the last.
        "options": {
            "max_steps": _SKIPPED + options.steps + 1,
            "documents": options.documents,
            "anchors": options.anchors,
            "precision": contender["precision"],
            **contender.get("options", {}),
        },
        "blocks": options.documents * options.anchors,
        "row_tokens": row_tokens(shapes["tokens"], shapes["chats"], options.documents),
        # Its ids count the embedding as 0.
        "layer_ids": [tap + 1 for tap in shapes["taps"]],
    }
    with tempfile.TemporaryDirectory(dir=folder) as own:
        # Links, so that no run finds what another has written.
        for path in folder.iterdir():
            if path != Path(own):
                (Path(own) / path.name).symlink_to(path)
        task["folder"] = own
        command = [interpreter, str(_HERE / program), json.dumps(task)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def row_tokens(tokens: int, chats: int, documents: int) -> int:
    """Length of the peer's one row per step: that many chats of mean length, in steps of 64."""
    return -(-tokens * documents // (chats * 64)) * 64


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds; memory is the highest."""

    def middle(top: str, bottom: str) -> float:
        return statistics.median(run[top] / run[bottom] for run in runs)

    return {
        "seconds_per_step": middle("seconds", "steps"),
        "cpu_seconds_per_step": middle("cpu_seconds", "steps"),
        "tokens_per_second": middle("tokens", "seconds"),
        "blocks_per_second": middle("blocks", "seconds"),
        "blocks_per_cpu_second": middle("blocks", "cpu_seconds"),
        "tokens_per_step": middle("tokens", "steps"),
        "blocks_per_step": middle("blocks", "steps"),
        "peak_mib": max(run["peak_bytes"] for run in runs) / _MIB,
        "above_start_mib": max(run["peak_bytes"] - run["before_bytes"] for run in runs) / _MIB,
        "mapped_mib": max(run["mapped_bytes"] for run in runs) / _MIB,
    }


def ratios(totals: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Of every pair that has been run, first over second."""
    return [
        {
            "first": first,
            "second": second,
            **{
                name: totals[first][name] / totals[second][name]
                for name in ("tokens_per_second", "blocks_per_second", "blocks_per_cpu_second")
            },
            "memory": totals[first]["above_start_mib"] / totals[second]["above_start_mib"],
        }
        for first, second in PAIRS
        if first in totals and second in totals
    ]


def _line(label: str, total: dict[str, float]) -> str:
    return (
        f"{label:38s} {total['seconds_per_step']:6.2f} s/step ({total['cpu_seconds_per_step']:.2f} CPU), "
        f"{total['tokens_per_second']:6.0f} tokens/s, {total['blocks_per_second']:6.1f} blocks/s, "
        f"peak {total['peak_mib']:5.0f} MiB, {total['above_start_mib']:5.0f} above the start"
    )


if __name__ == "__main__":
    main()
