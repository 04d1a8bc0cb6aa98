"""Decode token ids with vLLM on the CPU, one prompt after another, and print the time; run with the Python of
`.peers/vllm`.

    python rate_vllm.py TARGET DRAFTER|none DRAFTS TOKENS < prompts.json

Prompts are lists of token ids. The last line of stdout is JSON: seconds and tokens of all prompts but the
first.
"""

import json
import sys
import time

from vllm_cpu import engine


def main():
    from vllm import SamplingParams

    target, drafter, drafts, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    llm = engine(target, None if drafter == "none" else drafter, drafts, max_num_seqs=1)
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    seconds = said = 0.0
    for number, ids in enumerate(json.load(sys.stdin)):
        begun = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        if number:  # the first is the warm-up
            seconds += time.perf_counter() - begun
            said += len(done[0].outputs[0].token_ids)
    print(json.dumps({"seconds": seconds, "tokens": said}))


if __name__ == "__main__":
    main()
