"""The size budget: what keeps every file and function short enough to be read in one go."""

import ast

FILE_LINES = 400
FUNCTION_LINES = 60
USUAL_LINES = 35


def function_sizes(sources):
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{source.name}:{node.name}", node.end_lineno - node.lineno + 1


def test_files_are_within_the_budget(sources):
    sizes = {source.name: source.text.count("\n") for source in sources}
    assert not {name: size for name, size in sizes.items() if size > FILE_LINES}


def test_functions_are_within_the_budget(sources):
    assert not {name: size for name, size in function_sizes(sources) if size > FUNCTION_LINES}


def test_nine_functions_of_ten_are_short(sources):
    sizes = list(function_sizes(sources))
    long = sorted((size, name) for name, size in sizes if size > USUAL_LINES)
    assert len(long) <= 0.1 * len(sizes), long


def test_no_module_is_a_drawer(sources):
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert not [source.name for source in sources if drawers & set(source.module.split("."))]
