"""The code under the rules: every source file of the package, parsed once."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "slipstream"


@dataclass(frozen=True)
class Source:
    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self):
        """Path inside the package, such as decode/round.py."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def folder(self):
        """First folder inside the package, or the file's own stem at the top level."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else self.path.stem

    @property
    def module(self):
        """Dotted module name."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_sources():
    paths = sorted(PACKAGE.rglob("*.py"))
    return [Source(path, path.read_text(), ast.parse(path.read_text())) for path in paths]


@pytest.fixture(scope="session")
def sources():
    return read_sources()


@pytest.fixture(scope="session")
def root():
    return ROOT
