"""Device-to-host copies stand where a reader expects them: each is marked, and a round has exactly one."""

import ast
import re

FOLDERS = {"model", "target", "decode"}
COPIES = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__"}
CASTS = {"int", "float", "bool"}
MARK = "# host:"
TENSOR = re.compile(r"^[a-z][a-z0-9_]*_[A-Z]+$")


def is_tensor(node):
    """Whether the expression is a tensor by its name: `length_B`, `length_B[0]`, `length_B.max()`."""
    while isinstance(node, ast.Subscript | ast.Call | ast.Attribute):
        if isinstance(node, ast.Attribute) and TENSOR.match(node.attr):
            return True
        if isinstance(node, ast.Attribute) and node.attr in (
            "shape",
            "size",
            "ndim",
            "dim",
            "numel",
            "dtype",
            "device",
        ):
            return False
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and bool(TENSOR.match(node.id))


def copies(tree):
    """Yield every expression that reads a tensor's values on the host."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if (isinstance(node.func, ast.Attribute) and node.func.attr in COPIES) or (
                isinstance(node.func, ast.Name)
                and node.func.id in CASTS
                and node.args
                and is_tensor(node.args[0])
            ):
                yield node
        elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) and is_tensor(node.test):
            yield node.test


def unmarked(text):
    lines = text.splitlines()
    for node in copies(ast.parse(text)):
        if not any(MARK in line for line in lines[node.lineno - 1 : node.end_lineno]):
            yield f"{node.lineno}: {lines[node.lineno - 1].strip()}"


def test_copies_are_marked(sources):
    found = [
        f"{source.name}:{line}"
        for source in sources
        if source.folder in FOLDERS
        for line in unmarked(source.text)
    ]
    assert not found


def test_the_rule_sees_what_it_should():
    seen = "a = x_BT.tolist()\nb = int(n_B[0])\nif done_B.all():\n    pass\nc = float(x_BT.max())\n"
    assert len(list(unmarked(seen))) == 4
    fine = (
        "a = x_BT.tolist()  # host: the round's copy\nb = int(x_BT.shape[0])\nc = int(text)\nd = len(x_BT)\n"
    )
    assert not list(unmarked(fine))
