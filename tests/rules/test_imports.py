"""Imports go one way, and an optional package is imported in one folder only."""

import ast
import subprocess
import sys

CORE = {"core"}
DECODE = {"core", "native", "model", "target", "decode"}
DATA = DECODE | {"data"}
MAY_IMPORT = {
    "core": CORE,
    "native": CORE | {"native"},
    "model": CORE | {"model"},
    "target": CORE | {"native", "target"},
    "formats": CORE | {"model", "formats"},
    "decode": DECODE,
    "data": DATA,
    "plan": CORE | {"plan"},
    "train": DATA | {"train", "formats"},
    "bench": DATA | {"api", "formats", "bench"},
    "serve": DECODE | {"__version__", "api", "formats", "serve"},
    "tape": set(),
    "testing": DECODE | {"formats"},
    "api": DECODE | {"formats"},
    "hf": DECODE | {"api"},
}
TOP = {"cli", "__init__", "__main__"}  # may use all
ONE_FOLDER = {
    "cyclopts": "cli",
    "rich": "cli",
    "gguf": "formats",
    "accelerate": "train",
    "datasets": "data",
    "fastapi": "serve",
    "uvicorn": "serve",
    "starlette": "serve",
    "pydantic": "serve",
    "prometheus_client": "serve",
    "llguidance": "serve",
}
# Reports and training curves are both pictures.
TWO_FOLDERS = {"matplotlib": {"bench", "train"}}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "slipstream":
                yield from (f"slipstream.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_imports_go_one_way(sources):
    wrong = []
    for source in sources:
        if source.folder in TOP:
            continue
        assert source.folder in MAY_IMPORT, f"say in this test what {source.folder} may import"
        for name in imported(source.tree):
            parts = name.split(".")
            if parts[0] == "slipstream" and (len(parts) == 1 or parts[1] not in MAY_IMPORT[source.folder]):
                wrong.append(f"{source.name} imports {name}")
    assert not wrong


def test_core_needs_no_torch(sources):
    heavy = {"torch", "transformers", "numpy", "safetensors"}
    wrong = [
        f"{source.name} imports {name}"
        for source in sources
        if source.folder == "core"
        for name in imported(source.tree)
        if name.split(".")[0] in heavy
    ]
    assert not wrong


def folders_of(package, otherwise):
    return TWO_FOLDERS.get(package) or {ONE_FOLDER.get(package, otherwise)}


def test_a_special_package_has_one_folder(sources):
    wrong = [
        f"{source.name} imports {name}"
        for source in sources
        for name in imported(source.tree)
        if source.folder not in folders_of(name.split(".")[0], source.folder)
    ]
    assert not wrong


def modules_after(statement):
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_imports_no_torch():
    assert not {"torch", "transformers", "numpy"} & modules_after("import slipstream")


def test_help_imports_no_torch():
    for args in (
        ["--help"],
        ["generate", "--help"],
        ["demo", "--help"],
        ["check", "--help"],
        ["chat", "--help"],
        ["serve", "--help"],
    ):
        statement = f"from slipstream.cli import main\ntry: main({args!r})\nexcept SystemExit: pass"
        assert not {"torch", "transformers"} & modules_after(statement), args
