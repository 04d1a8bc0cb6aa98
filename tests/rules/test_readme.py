"""The README's commands run as they stand: blocks after `<!-- test -->`, or `<!-- test: MARKER -->`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCK = re.compile(r"<!-- test(?:: (?P<marker>\w+))? -->\n```(?P<kind>\w+)\n(?P<body>.*?)```", re.DOTALL)


def blocks():
    for number, match in enumerate(BLOCK.finditer((ROOT / "README.md").read_text())):
        marks = [getattr(pytest.mark, match["marker"])] if match["marker"] else []
        lines = match["body"].splitlines()
        if match["kind"] == "python":
            yield pytest.param(["-c", match["body"]], marks=marks, id=f"python-{number}")
        for line in lines if match["kind"] == "console" else ():
            program, *words = shlex.split(line.removeprefix("$ "), comments=True)
            assert program == "slipstream", "only our own command is run"
            yield pytest.param(["-m", "slipstream", *words], marks=marks, id=" ".join(words[:2]))


@pytest.mark.parametrize("words", list(blocks()))
def test_readme_block_runs(words):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_there_are_blocks():
    assert len(list(blocks())) >= 4
