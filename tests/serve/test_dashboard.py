"""The dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slipstream.serve.metrics import Metrics
from slipstream.serve.worker import Load

ROOT = Path(__file__).parents[2]


def test_every_metric_of_the_dashboard_is_there():
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|slipstream):[a-z0-9_]+", target["expr"])
    }
    text = Metrics("tiny", Load, 7).text()
    known = set(
        re.findall(
            r"# TYPE ((?:vllm|slipstream):[a-z0-9_]+)", text if isinstance(text, str) else text.decode()
        )
    )
    known |= {f"{name}_bucket" for name in known}
    assert asked
    assert asked <= known, asked - known
