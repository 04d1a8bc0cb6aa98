"""vLLM on the CPU as both scripts beside this one run it; imported with the Python of `.peers/vllm`."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def engine(target, drafter, drafts, **more):
    """An engine in bf16 without graphs, drafting with a DFlash drafter where one is named."""
    from vllm import LLM

    if drafter is not None:
        method = {"method": "dflash", "model": drafter, "num_speculative_tokens": drafts}
        more["speculative_config"] = method
    common = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    return LLM(model=target, enable_prefix_caching=False, **common, **more)
