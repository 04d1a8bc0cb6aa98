"""What 8-bit drafter weights cost: acceptance on the peers' prompts from bf16 and from a Q8_0 file, greedy.

python benchmarks/peers/int8.py
"""

import sys
import tempfile
from pathlib import Path

import slipstream
from slipstream.api import drafter_path
from slipstream.core.records import total_acceptance
from slipstream.formats import read_drafter, write_gguf_drafter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.peer.engines import PROMPTS, TOKENS


def main():
    engine = slipstream.EngineOptions(drafts="max")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dflash-int8.gguf"
        write_gguf_drafter(read_drafter(drafter_path("smollm2")), path, int8=True)
        for name, draft in (("bf16", drafter_path("smollm2")), ("int8", path)):
            session = slipstream.load("smollm2", str(draft), engine_options=engine)
            session.drafter.draft_vocabulary = None  # GGUF has no list of drafted tokens
            sampling = slipstream.SamplingOptions(max_tokens=TOKENS)
            done = session.generate_batch(PROMPTS, sampling)
            weights = draft if draft.is_file() else draft / "model.safetensors"
            size = weights.stat().st_size / 1e6
            print(f"{name}: {total_acceptance(done):.3f} tokens per round, {size:.1f} MB")


if __name__ == "__main__":
    main()
