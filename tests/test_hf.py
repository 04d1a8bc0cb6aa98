"""Plain transformers code with a drafter: the same ids as its own decoding, streamed, or a clear refusal."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, TextStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from slipstream import EngineOptions, InputError, speculate
from tests.tiny import save_drafter, save_target, tiny_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("target"))
    drafter = save_drafter(tmp_path_factory.mktemp("drafter") / "d", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, str(drafter)


def inputs(*rows):
    """Left-padded ids and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("rows", [([5, 6, 7],), ([5, 6, 7, 8, 9], [70, 80])])
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3}, {"min_new_tokens": 6, "eos_token_id": list(range(60, 200))}],
)
def test_greedy_ids_are_those_of_transformers(pair, rows, settings):
    model, draft = pair
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 258, **settings}
    plain = model.generate(**inputs(*rows), **settings)
    fast = model.generate(
        **inputs(*rows), **settings, custom_generate=speculate(draft, EngineOptions(drafts="max"))
    )
    assert torch.equal(plain, fast)


def test_sampling_follows_torch_seeds(pair):
    model, draft = pair
    method = speculate(draft)
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5, "top_k": 40, "pad_token_id": 258}

    def sample(seed):
        torch.manual_seed(seed)
        return model.generate(**inputs([5, 6, 7]), **settings, custom_generate=method).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_several_answers_differ(pair):
    model, draft = pair
    found = model.generate(
        **inputs([5, 6]), max_new_tokens=12, do_sample=True, num_return_sequences=3, pad_token_id=258,
        temperature=2.0, custom_generate=speculate(draft),
    )  # fmt: skip
    assert len({tuple(row) for row in found.tolist()}) == 3


@pytest.mark.parametrize("given_to", ["generate", "speculate"])
def test_an_answer_is_streamed(pair, capsys, given_to):
    model, draft = pair
    tokenizer = tiny_tokenizer()
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    mine, its = (None, streamer) if given_to == "generate" else (streamer, None)
    found = model.generate(
        **inputs([5, 6, 7]), max_new_tokens=16, do_sample=False, pad_token_id=258, streamer=its,
        custom_generate=speculate(draft, streamer=mine),
    )  # fmt: skip
    assert capsys.readouterr().out.strip() == tokenizer.decode(found[0, 3:]).strip()


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])}, "NoRepeatNGram"),
    ],
)
def test_what_has_no_counterpart_is_refused(pair, settings, hint):
    model, draft = pair
    with pytest.raises(InputError, match=hint):
        model.generate(**inputs([5, 6]), max_new_tokens=4, **settings, custom_generate=speculate(draft))
