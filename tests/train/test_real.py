"""Fine-tuning on a narrow domain with the real model: acceptance there rises within minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.core.options import EngineOptions, SynthesisOptions, TrainOptions
from slipstream.data.make import ChatPlan, make_chats
from slipstream.data.readers import read_chats
from slipstream.decode import Engine
from slipstream.formats import read_zlab
from slipstream.target import load_target
from slipstream.train.evaluate import decoded_acceptance
from slipstream.train.pipeline import Plan, train_drafter

pytestmark = pytest.mark.real

THINGS = [
    "lamp",
    "chair",
    "kettle",
    "bicycle",
    "backpack",
    "tent",
    "umbrella",
    "watch",
    "camera",
    "blender",
    "sofa",
    "desk",
    "mirror",
    "carpet",
    "pillow",
    "blanket",
    "toaster",
    "fridge",
    "guitar",
    "piano",
    "drum",
    "violin",
    "notebook",
    "pencil",
    "stapler",
    "hammer",
    "drill",
    "saw",
    "ladder",
    "bucket",
    "shovel",
    "rake",
    "hose",
    "mower",
    "grill",
    "helmet",
    "glove",
    "scarf",
    "jacket",
    "boot",
]

KINDS = ["short", "friendly", "funny", "sober"]

#: The test decodes by itself.
NO_TRIALS = {"decode_prompts": 0, "workload_prompts": 0}


def test_acceptance_on_a_narrow_domain_rises(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"Write a {kind} product description for a {thing}."}) + "\n"
            for thing in THINGS
            for kind in KINDS
        )
    )
    target = load_target("smollm2")
    engine = Engine(target, None, EngineOptions(max_rows=64))
    writing = SynthesisOptions(answer_tokens=80, greedy_share=1.0)
    make_chats(target, engine, ChatPlan(0, str(prompts), options=writing), tmp_path / "all.jsonl")
    lines = (tmp_path / "all.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:-16]))
    (tmp_path / "unseen.jsonl").write_text("".join(lines[-16:]))
    unseen = read_chats(tmp_path / "unseen.jsonl", None).chats
    bundled = Path(__file__).parents[2] / "src/slipstream/drafters/smollm2"
    options = TrainOptions(max_steps=60, documents=12, learning_rate=2e-3, **NO_TRIALS)
    plan = Plan("smollm2", tmp_path / "run", str(tmp_path / "train.jsonl"), 0, bundled, training=options)
    result = train_drafter(plan, lambda line: None)
    before = decoded_acceptance(target, read_zlab(bundled), unseen)
    after = decoded_acceptance(target, read_zlab(result.drafter), unseen)
    print("ACC", before, after)
    assert after > before + 0.1
