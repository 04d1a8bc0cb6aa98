"""What servers say of acceptance, as counts: against hand-worked rounds; means stay means."""

import random

import pytest

from slipstream.bench.counters import (
    of_counters,
    of_details,
    of_mean,
    of_timings,
    read_counters,
    read_mean,
)
from slipstream.bench.metrics import by_position

PAGES = {
    "vllm": (
        "# HELP something\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 12.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.79e+09\n'
    ),
    "sglang": (
        'sglang:spec_verify_calls_total{model_name="tiny"} 4.0\n'
        'sglang:spec_verify_calls_created{model_name="tiny"} 1.79e+09\n'
        'sglang:spec_accept_length{model_name="tiny",tp_rank="0"} 2.25\n'
        'sglang:spec_num_draft_tokens{model_name="tiny"} 4.0\n'
    ),
    "tensorrt": (
        'trtllm_spec_decode_drafted_tokens_total{model_name="tiny",token_position="0"} 4.0\n'
        'trtllm_spec_decode_drafted_tokens_total{model_name="tiny",token_position="1"} 4.0\n'
        'trtllm_spec_decode_drafted_tokens_total{model_name="tiny",token_position="2"} 4.0\n'
        'trtllm_spec_decode_accepted_tokens_total{model_name="tiny",token_position="0"} 3.0\n'
        'trtllm_spec_decode_accepted_tokens_total{model_name="tiny",token_position="1"} 2.0\n'
    ),
    "tensorrt, iterations alone": (
        'trtllm_spec_decode_num_draft_tokens_total{model_name="tiny"} 12.0\n'
        'trtllm_spec_decode_num_accepted_tokens_total{model_name="tiny"} 5.0\n'
        'trtllm_spec_decode_acceptance_length{model_name="tiny"} 2.5\n'
    ),
}


@pytest.mark.parametrize("engine", PAGES)
def test_one_request_from_counters(engine):
    """Four rounds of three drafts keep 2, 2, 1 and 0: nine tokens, after one from the prompt."""
    counts = of_counters({}, read_counters(PAGES[engine]), tokens=10)
    assert (counts["rounds"], counts["emitted_in_rounds"]) == (4, 9)
    if engine in ("vllm", "tensorrt"):
        assert counts["drafted_per_position"] == (4, 4, 4)
        assert counts["tried_per_position"] == (4, 3, 2)
        assert counts["accepted_per_position"] == (3, 2, 0)


@pytest.mark.parametrize("engine", PAGES)
def test_only_what_was_added_counts(engine):
    page = read_counters(PAGES[engine])
    doubled = {name: 2 * value for name, value in page.items()}
    assert of_counters(page, doubled, 10) == of_counters({}, page, 10)
    assert of_counters(page, page, 10) == {}, "not one round"


def test_workers_add_up_and_other_pages_are_empty():
    page = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 2\nvllm:spec_decode_num_drafts_total{engine="1"} 3\n'
    )
    assert read_counters(page) == {"rounds": 5}
    assert read_counters("other 3\n") == {}
    assert of_counters({}, {}, 5) == {}


def test_drafts_past_the_end_do_not_count():
    """vLLM counts kept drafts after the stop token: 4 rounds kept 9, but the text has 10 tokens."""
    counts = of_counters({}, {"rounds": 4, "accepted": 9}, tokens=10)
    assert counts["emitted_in_rounds"] == 9


def test_means_are_no_counts():
    assert read_mean(PAGES["sglang"]) == 2.25
    assert read_mean(PAGES["tensorrt, iterations alone"]) == 2.5
    assert read_mean(PAGES["vllm"]) is None
    assert read_mean("sglang:spec_accept_length 0.0\n") is None, "before any round"
    assert "mean" not in "".join(read_counters(PAGES["sglang"]))


@pytest.mark.parametrize("seed", range(20))
def test_details_of_sglang_against_rounds_one_by_one(seed):
    draw, places = random.Random(seed), 1 + seed % 7
    kept = [draw.randint(0, places) for _ in range(1 + seed)]
    runs = [kept.count(number) for number in range(max(kept) + 1)]
    said = {
        "spec_verify_ct": len(kept),
        "spec_num_correct_drafts": sum(kept),
        "spec_num_proposed_drafts": places * len(kept),
        "spec_correct_drafts_histogram": runs,
    }
    counts = of_details(said, tokens=1 + len(kept) + sum(kept))
    drafted, tried, accepted = by_position([(places, one, False) for one in kept], places)
    assert (counts["rounds"], counts["emitted_in_rounds"]) == (len(kept), len(kept) + sum(kept))
    assert counts["drafted_per_position"] == drafted
    assert counts["tried_per_position"] == tried
    assert counts["accepted_per_position"] == accepted
    without = of_details(said | {"spec_correct_drafts_histogram": []}, 1 + len(kept) + sum(kept))
    assert without == {name: counts[name] for name in ("rounds", "emitted_in_rounds")}
    assert of_details({}, 5) == {}


def test_timings_of_llama_cpp():
    assert of_timings({"draft_n": 81, "draft_n_accepted": 9, "predicted_n": 24}, 24) == {
        "rounds": 14,
        "emitted_in_rounds": 23,
    }
    assert of_timings({"predicted_n": 24}, 24) == {}


@pytest.mark.parametrize(("tokens", "rounds"), [(10, 4), (23, 7), (400, 131), (2, 1)])
def test_a_mean_of_one_reply_gives_its_rounds(tokens, rounds):
    """TensorRT-LLM divides by all passes, the prompt's included, and sends a 32-bit fraction."""
    found = of_mean(round(tokens / (rounds + 1), 6), tokens)
    assert found == {"rounds": rounds, "emitted_in_rounds": tokens - 1}


def test_a_mean_that_fits_no_number_of_rounds_stays_one():
    assert of_mean(2.9, 10) == {"stated_acceptance": 2.9}
    assert of_mean(None, 10) == of_mean(2.0, 1) == {}
