"""Decode token ids with vLLM on the CPU, one prompt after another, and print the time; run with the Python of
`.peers/vllm`.

    python rate_vllm.py TARGET DRAFTER|none DRAFTS TOKENS < prompts.json

Prompts are lists of token ids. The last line of stdout is JSON: seconds and tokens of all prompts but the
first.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main():
    from vllm import LLM, SamplingParams

    target, drafter, drafts, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    more = {}
    if drafter != "none":
        more["speculative_config"] = {"method": "dflash", "model": drafter, "num_speculative_tokens": drafts}
    llm = LLM(
        model=target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **more,
    )
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
