"""A tensor's name ends in its axes: the letters are in the legend, and they agree with real shapes."""

import ast
import re
import sys

import pytest
import torch

import slipstream
from slipstream import EngineOptions, SamplingOptions, TargetOptions
from slipstream.core.axes import LEGEND
from tests.rules.conftest import PACKAGE
from tests.tiny import save_drafter, save_target

NUMERIC = {"model", "target", "decode", "data", "train"}
SUFFIX = re.compile(r"^[a-z][a-z0-9_]*_([A-Z]{2,})$")
ANY_SUFFIX = re.compile(r"^[a-z][a-z0-9_]*_([A-Z]+)$")


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr


def test_suffixes_are_in_the_legend(sources):
    unknown = {
        f"{source.name}: {name}"
        for source in sources
        if source.folder in NUMERIC
        for name in identifiers(source.tree)
        if (match := SUFFIX.match(name)) and not set(match[1]) <= set(LEGEND)
    }
    assert not unknown


class AxisTracer:
    """Compares every suffixed tensor of a numeric function with its name when the function returns."""

    def __init__(self):
        self.checked = set()
        self.wrong = set()

    def __enter__(self):
        sys.setprofile(self.on_event)
        return self

    def __exit__(self, *_error):
        sys.setprofile(None)

    def on_event(self, frame, event, _argument):
        if event != "return" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        place = frame.f_code.co_filename[len(str(PACKAGE)) + 1 :]
        if place.split("/")[0] in NUMERIC:
            self.look(f"{place}:{frame.f_code.co_name}", frame.f_locals)

    def look(self, place, variables):
        sizes = {}
        for name, value in variables.items():
            match = ANY_SUFFIX.match(name)
            if match is None or not isinstance(value, torch.Tensor):
                continue
            self.checked.add(f"{place} {name}")
            if value.dim() != len(match[1]):
                self.wrong.add(f"{place}: {name} has {value.dim()} axes: {tuple(value.shape)}")
                continue
            for letter, size in zip(match[1], value.shape, strict=True):
                first = sizes.setdefault(letter, (size, name))
                if first[0] != size:
                    self.wrong.add(f"{place}: {letter} is {first[0]} in {first[1]}, but {size} in {name}")


def test_the_tracer_sees_what_it_should():
    tracer = AxisTracer()
    tracer.look("f", {"x_BT": torch.zeros(2, 3), "y_BV": torch.zeros(2, 5), "plain": torch.zeros(1)})
    assert not tracer.wrong
    tracer.look("f", {"x_BT": torch.zeros(2, 3), "y_BV": torch.zeros(3, 5)})
    tracer.look("f", {"x_BT": torch.zeros(2)})
    assert len(tracer.wrong) == 2


@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_names_agree_with_shapes_in_real_rounds(tmp_path, acceptor):
    target = save_target(tmp_path / "target")
    drafter = save_drafter(tmp_path / "drafter", target)
    sampling = [
        SamplingOptions(max_tokens=9, ignore_eos=True),
        SamplingOptions(
            max_tokens=6, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2, ignore_eos=True
        ),
    ]
    with AxisTracer() as tracer:
        session = slipstream.load(
            str(target),
            str(drafter),
            target_options=TargetOptions(dtype="float32"),
            engine_options=EngineOptions(
                acceptor=acceptor, draft_noise="argmax" if acceptor == "reject" else "coupled"
            ),
        )
        session.generate_batch(["hello there", "b"], sampling)
        session.generate_batch(["hello there", "b"], sampling, draft=False)
    assert len(tracer.checked) > 50
    assert not tracer.wrong, "\n".join(sorted(tracer.wrong))
