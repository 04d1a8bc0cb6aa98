"""llama.cpp runs our pair of GGUF files as we run it, and its own converter writes the same drafter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

import slipstream
from slipstream.api import Session
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.formats.export import export_drafter
from slipstream.target import model_folder
from tests.peer.engines import PROMPTS, TOKENS, Tally, complete, llama_binaries, llama_server, need

pytestmark = [pytest.mark.peer, pytest.mark.real]


@pytest.fixture(scope="module")
def session() -> Session:
    session = slipstream.load("smollm2", engine_options=EngineOptions(drafts="max"))
    assert session.drafter is not None
    session.drafter.draft_vocabulary = None  # llama.cpp drafts from all tokens
    return session


@pytest.fixture(scope="module")
def pair(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "out"
    assert session.drafter is not None
    export_drafter(
        session.drafter, folder, "llama.cpp", target_folder=model_folder("smollm2"), name="smollm2"
    )
    return folder


def ours(session: Session) -> Tally:
    done = [session.generate(prompt, SamplingOptions(max_tokens=TOKENS)) for prompt in PROMPTS]
    rounds = sum(one.rounds for one in done)
    by_position = np.sum([one.accepted_per_position for one in done], axis=0) / rounds
    return Tally(sum(one.completion_tokens - 1 for one in done), rounds, tuple(by_position.tolist()))


def theirs(session: Session, pair: Path) -> Tally:
    assert session.drafter is not None
    tokens = accepted = 0
    with llama_server(
        pair / "target-smollm2.gguf", pair / "dflash-smollm2.gguf", session.drafter.config.block_size - 1
    ) as address:
        for prompt in PROMPTS:
            timings = complete(address, session.encode(prompt), TOKENS)["timings"]
            tokens += timings["predicted_n"] - 1
            accepted += timings["draft_n_accepted"]
    return Tally(tokens, tokens - accepted)


def test_acceptance_is_ours_within_five_percent(session: Session, pair: Path) -> None:
    llama_binaries()
    mine, other = ours(session), theirs(session, pair)
    print(f"\ntokens per round: Slipstream {mine.acceptance:.3f}, llama.cpp {other.acceptance:.3f}")
    print("Slipstream by position: " + " ".join(f"{share:.2f}" for share in mine.by_position))
    assert abs(other.acceptance / mine.acceptance - 1) < 0.05


@pytest.mark.parametrize("which", ["dflash", "target"])
def test_the_converter_writes_the_same_tensors(pair: Path, which: str, tmp_path: Path) -> None:
    python, script = (
        need("converter", "bin", "python"),
        need("converter", "llama.cpp", "convert_hf_to_gguf.py"),
    )
    target = model_folder("smollm2")
    drafter = Path(slipstream.__file__).parent / "drafters" / "smollm2"
    source = [drafter, "--target-model-dir", target] if which == "dflash" else [target]
    words = [python, script, *source, "--outtype", "bf16", "--outfile", tmp_path / "theirs.gguf"]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    mine, other = GGUFReader(pair / f"{which}-smollm2.gguf"), GGUFReader(tmp_path / "theirs.gguf")
    tensors = [{tensor.name: tensor for tensor in file.tensors} for file in (mine, other)]
    assert set(tensors[0]) == set(tensors[1])
    for name, tensor in tensors[0].items():
        assert tensor.tensor_type == tensors[1][name].tensor_type, name
        assert np.array_equal(tensor.data, tensors[1][name].data), name
    fields = [{name: field.contents() for name, field in file.fields.items()} for file in (mine, other)]
    said = {name for name in fields[1] if name.startswith(("dflash.", "llama.", "tokenizer."))}
    # Both names split texts alike for this vocabulary, which merges no digits.
    said -= {"tokenizer.ggml.pre"}
    assert {name: fields[0].get(name) for name in said} == {name: fields[1][name] for name in said}
