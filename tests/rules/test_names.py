"""Public names are documented and typed, and `__all__` says the truth."""

import ast
import importlib

import pytest

import slipstream


def public_definitions(source):
    """Yield (qualified name, node) of public functions, classes and methods."""
    queue = [("", node) for node in source.tree.body]
    while queue:
        prefix, node = queue.pop()
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or node.name.startswith("_"):
            continue
        yield f"{source.name}:{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            queue += [(f"{node.name}.", child) for child in node.body]


def has_decorator(node, *names):
    return any(ast.unparse(item).split("(")[0].split(".")[-1] in names for item in node.decorator_list)


def test_public_names_are_documented(sources):
    bare = [
        name
        for source in sources
        for name, node in public_definitions(source)
        if not ast.get_docstring(node) and not has_decorator(node, "overload", "override", "setter")
    ]
    assert not bare


def test_modules_say_what_they_are(sources):
    assert not [source.name for source in sources if not ast.get_docstring(source.tree)]


def test_functions_are_typed(sources):
    untyped = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [arg.arg for arg in args if not arg.annotation and arg.arg not in ("self", "cls")]
                if bare or not node.returns:
                    untyped.append(f"{source.name}:{node.name} {bare}")
    assert not untyped


def test_all_is_true(sources):
    wrong = []
    for source in sources:
        module = importlib.import_module(source.module) if source.path.stem != "__main__" else None
        for name in getattr(module, "__all__", ()):
            if not hasattr(module, name):
                wrong.append(f"{source.name}: {name}")
    assert not wrong


def test_the_package_exports_what_it_lists():
    assert dir(slipstream) == list(slipstream.__all__)
    assert not [name for name in slipstream.__all__ if not getattr(slipstream, name).__doc__]
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = slipstream.nothing_like_this
