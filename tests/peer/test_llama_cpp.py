"""llama.cpp runs our pair of GGUF files as we run it, and its own converter writes the same drafter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from slipstream.api import Session, drafter_path
from slipstream.formats.export import export_drafter
from slipstream.formats.gguf_drafter import write_gguf_drafter
from slipstream.formats.gguf_tokenizer import read_vocabulary
from slipstream.target import model_folder
from tests.peer.engines import (
    PROMPTS,
    TOKENS,
    Tally,
    accepted_by_round,
    all_tokens_session,
    llama_binaries,
    llama_server,
    need,
    tally,
)

pytestmark = [pytest.mark.peer, pytest.mark.real]


@pytest.fixture(scope="module")
def session() -> Session:
    return all_tokens_session()


@pytest.fixture(scope="module")
def mine(session: Session) -> Tally:
    return tally(session)


@pytest.fixture(scope="module")
def pair(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "out"
    assert session.drafter is not None
    export_drafter(
        session.drafter, folder, "llama.cpp", target_folder=model_folder("smollm2"), name="smollm2"
    )
    return folder


def theirs(session: Session, target: Path, drafter: Path) -> Tally:
    assert session.drafter is not None
    drafts = session.drafter.config.block_size - 1
    tokens, kept = 0, []
    with llama_server(target, drafter, drafts) as address:
        for prompt in PROMPTS:
            said, rounds = accepted_by_round(address, session.encode(prompt), TOKENS)
            tokens += said - 1
            kept += rounds
    # A round without drafts, for the last token of a text, is a round as well.
    rounds_in_all = tokens - sum(kept)
    shares = tuple(sum(n >= k for n in kept) / rounds_in_all for k in range(1, drafts + 1))
    return Tally(tokens, rounds_in_all, shares)


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_acceptance_is_ours_within_five_percent(
    int8: bool, session: Session, pair: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The 8-bit drafter is compared with ours in bf16: it must not cost more than that."""
    llama_binaries()
    drafter = pair / "dflash-smollm2.gguf"
    if int8:
        assert session.drafter is not None
        vocabulary = read_vocabulary(model_folder("smollm2"), session.drafter.config.vocab_size)
        drafter = tmp_path / "dflash-int8.gguf"
        write_gguf_drafter(session.drafter, drafter, vocabulary, int8=True)
    mine: Tally = request.getfixturevalue("mine")
    other = theirs(session, pair / "target-smollm2.gguf", drafter)
    print(f"\ntokens per round: Slipstream {mine.acceptance:.3f}, llama.cpp {other.acceptance:.3f}")
    for name, one in (("Slipstream", mine), ("llama.cpp", other)):
        print(f"{name} by position: " + " ".join(f"{share:.2f}" for share in one.by_position))
    assert abs(other.acceptance / mine.acceptance - 1) < 0.05


@pytest.mark.parametrize("which", ["dflash", "target"])
def test_the_converter_writes_the_same_tensors(pair: Path, which: str, tmp_path: Path) -> None:
    python, script = (
        need("converter", "bin", "python"),
        need("converter", "llama.cpp", "convert_hf_to_gguf.py"),
    )
    target = model_folder("smollm2")
    drafter = drafter_path("smollm2")
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
