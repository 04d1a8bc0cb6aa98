"""Decode token ids with vLLM on the CPU and print what it counted; run with the Python of `.peers/vllm`.

    python run_vllm.py TARGET DRAFTER DRAFTS TOKENS < prompts.json

Prompts are lists of token ids. The last line of stdout is JSON: tokens, rounds, accepted, by_position.
"""

import json
import sys

from vllm_cpu import engine


def main():
    from vllm import SamplingParams

    target, drafter, drafts, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    prompts = json.load(sys.stdin)
    llm = engine(target, drafter, drafts, max_num_seqs=4, disable_log_stats=False)
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    counts = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    rounds = counts["vllm:spec_decode_num_drafts"].value
    accepted = counts["vllm:spec_decode_num_accepted_tokens"].value
    by_position = counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    found = {
        "tokens": sum(len(one.outputs[0].token_ids) - 1 for one in done),
        "rounds": rounds,
        "accepted": accepted,
        "by_position": [count / rounds for count in by_position],
        "ids": [list(one.outputs[0].token_ids) for one in done],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
