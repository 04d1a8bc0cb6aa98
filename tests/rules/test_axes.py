"""A tensor's name ends in its axes: the letters are in the legend, and they agree with real shapes."""

import ast
import re

from slipstream.core.axes import LEGEND

NUMERIC = {"model", "target", "decode", "data", "train"}
SUFFIX = re.compile(r"^[a-z][a-z0-9_]*_([A-Z]{2,})$")


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
