"""A decoding round reads from the device exactly once, counted while it runs."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import slipstream
from slipstream import EngineOptions, SamplingOptions, TargetOptions
from tests.tiny import save_drafter, save_target

READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
}


class CountReads(TorchFunctionMode):
    """Counts every call that needs a tensor's values on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = save_target(tmp_path_factory.mktemp("target"))
    return str(target), str(save_drafter(tmp_path_factory.mktemp("drafter") / "d", target))


def reads_and_rounds(session, tokens, temperature, draft):
    sampling = SamplingOptions(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    with CountReads() as reads:
        completion = session.generate("hello", sampling, draft=draft)
    return reads.count, completion.rounds if draft else completion.completion_tokens


def test_the_counter_sees_reads():
    x = torch.ones(2)
    with CountReads() as reads:
        _ = x.tolist(), x[0].item(), bool(x[0]), int(x[0]), float(x[0]), x.nonzero(), x.cpu(), x.numpy()
    assert reads.count == 8


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize(("acceptor", "temperature"), [("match", 0.0), ("match", 0.9), ("reject", 0.9)])
def test_a_round_reads_once(folders, acceptor, temperature, draft):
    session = slipstream.load(
        *folders,
        target_options=TargetOptions(dtype="float32"),
        engine_options=EngineOptions(
            acceptor=acceptor, draft_noise="argmax" if acceptor == "reject" else "coupled"
        ),
    )
    short = reads_and_rounds(session, 10, temperature, draft)
    long = reads_and_rounds(session, 40, temperature, draft)
    assert long[1] > short[1]
    assert long[0] - short[0] == long[1] - short[1]
