"""The Python interface: from names and prompts to completions."""

import pytest

import slipstream
from slipstream import EngineOptions, InputError, SamplingOptions, TargetOptions
from slipstream.api import bundled_drafter
from tests.tiny import save_drafter, save_target

OPTIONS = TargetOptions(dtype="float32")
SHORT = SamplingOptions(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = save_target(tmp_path_factory.mktemp("target"))
    return str(target), str(save_drafter(tmp_path_factory.mktemp("drafter") / "d", target))


@pytest.fixture(scope="module")
def session(folders):
    return slipstream.load(*folders, target_options=OPTIONS)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_and_plain_say_the_same(session, temperature):
    sampling = SamplingOptions(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    drafted = session.generate("hello", sampling)
    plain = session.generate("hello", sampling, draft=False)
    assert drafted.token_ids == plain.token_ids
    assert plain.acceptance_length == 1.0
    assert drafted.acceptance_length >= 1.0


def test_stream_ends_with_the_completion(session):
    stream = session.stream("hello", SHORT)
    with pytest.raises(InputError, match="not ended"):
        _ = stream.completion
    pieces = list(stream)
    assert sum((piece.token_ids for piece in pieces), ()) == stream.completion.token_ids
    assert "".join(piece.text for piece in pieces) == stream.completion.text
    assert pieces[-1].finish_reason == "length"


def test_a_closed_stream_leaves_the_session_usable(session):
    stream = session.stream("hello", SHORT)
    next(stream)
    stream.close()
    assert session.generate("hello", SHORT).completion_tokens == 12


def test_batch_keeps_the_order_and_each_ones_options(session):
    sampling = [SamplingOptions(max_tokens=n, ignore_eos=True) for n in (3, 7)]
    batch = session.generate_batch(["a longer prompt", "b"], sampling)
    alone = [session.generate(p, s) for p, s in zip(["a longer prompt", "b"], sampling, strict=True)]
    assert [item.token_ids for item in batch] == [item.token_ids for item in alone]
    with pytest.raises(InputError, match="2 prompts, but 1"):
        session.generate_batch(["a", "b"], sampling[:1])


def test_prompts_are_text_messages_or_ids(session):
    chat = session.encode("hi")
    assert chat == session.encode([{"role": "user", "content": "hi"}])
    assert session.target.tokenizer.decode(chat) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert session.target.tokenizer.decode(session.encode("hi", raw=True)) == "hi"
    assert session.encode([1, 2, 3]) == [1, 2, 3]


def test_prompts_that_cannot_be_used(session):
    for prompt, raw in (("", True), ([], False), ([{"role": "user", "content": "x"}], True)):
        with pytest.raises(InputError):
            session.encode(prompt, raw)


def test_no_chat_template_is_said(tmp_path):
    session = slipstream.load(str(save_target(tmp_path, template=None)), None, target_options=OPTIONS)
    with pytest.raises(InputError, match="no chat template"):
        session.encode("hi")


def test_auto_without_a_bundled_drafter_decodes_plainly_and_says_so(folders):
    session = slipstream.load(folders[0], target_options=OPTIONS)
    assert session.drafter is None
    assert "no drafter is bundled" in session.note
    assert session.generate("hi", SHORT).token_ids == session.generate("hi", SHORT, draft=False).token_ids
    assert bundled_drafter(session.target.info) is None


def test_exact_says_whether_the_text_is_the_targets(folders):
    reject = slipstream.load(
        *folders,
        target_options=OPTIONS,
        engine_options=EngineOptions(acceptor="reject", draft_noise="argmax"),
    )
    assert not reject.exact()
    assert reject.exact(draft=False)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute"):
        _ = slipstream.nothing


def test_a_second_session_knows_what_rounds_cost(tmp_path, monkeypatch, session):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)

    def fresh():
        return slipstream.Session(session.target, session.drafter, session.options)

    first = fresh()
    first.generate("hello", SamplingOptions(max_tokens=40, ignore_eos=True))
    assert fresh().engine._costs.seconds.keys() == first.engine._costs.seconds.keys() != set()
