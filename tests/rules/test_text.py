"""Committed text is about Slipstream alone: no path of one machine, no registry host."""

import re
import subprocess

import pytest

# Written in pieces so that this file does not find itself.
PATHS = ("tmp", "work", "root", "home", "opt", "Users", "mnt")
PLACE = re.compile(r"(?<![\w.}$*~-])/(" + "|".join(PATHS) + r")/\w")
HOSTS = re.compile("|".join((r"files\.python" + "hosted", r"pypi" + r"\.org", r"registry\." + "npm")))
CHECKED = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".sh", ".cfg", ""}


def committed(root):
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    run = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    paths = [root / line for line in run.stdout.splitlines()]
    return [path for path in paths if path.suffix in CHECKED and path.is_file() and path.name != "LICENSE"]


def test_no_machine_paths_and_no_hosts(root):
    found = []
    for path in committed(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if PLACE.search(line) or HOSTS.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:80]}")
    assert not found
