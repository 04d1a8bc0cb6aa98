"""Drafts that are kept where a JSON schema binds the answer: counts, no times.

The engine decodes some requests with the guides of the server, as many drafts a round as there can be. The
texts are compared with those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from slipstream import EngineOptions, SamplingOptions, load
from slipstream.api import Session
from slipstream.core.records import Completion, Request, total_acceptance
from slipstream.decode import Engine
from slipstream.decode.lookup import LookupProposer
from slipstream.decode.propose import Proposer
from slipstream.serve.fields import ResponseFormat
from slipstream.serve.grammar import Grammars

_TEXT, _COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 9999}
#: A question, and the fields of its answer.
_ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Give me a person: name, age and city.", {"name": _TEXT, "age": _COUNT, "city": _TEXT}),
    (
        "Describe a book about the sea.",
        {
            "title": _TEXT,
            "author": _TEXT,
            "published_year": _COUNT,
            "genre": {"enum": ["fiction", "science"]},
        },
    ),
    (
        "List three fruits with their colours.",
        {
            "fruits": {
                "type": "array",
                "minItems": 3,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"fruit_name": _TEXT, "colour": _TEXT},
                    "required": ["fruit_name", "colour"],
                    "additionalProperties": False,
                },
            }
        },
    ),
    (
        "What is the weather in Paris like today?",
        {"temperature_celsius": _COUNT, "is_raining": {"type": "boolean"}, "short_summary": _TEXT},
    ),
    ("Plan a day in Rome.", {"morning": _TEXT, "afternoon": _TEXT, "evening": _TEXT, "total_cost": _COUNT}),
    (
        "Is this review good or bad? 'The soup was cold and the waiter rude.'",
        {"sentiment": {"enum": ["positive", "negative", "neutral"]}, "reason_for_it": _TEXT},
    ),
)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    session = load(options.target, engine_options=EngineOptions(max_rows=len(_ASKED), drafts="max"))
    proposers: dict[str, Proposer] = {"lookup": LookupProposer()}
    if session.drafter is not None:
        proposers = {"drafter": session.proposer} | proposers
    for temperature in (0.0, 1.0):
        plain = session.plain.generate(_requests(session, options.max_tokens, temperature))
        for name, proposer in proposers.items():
            engine = Engine(session.target, proposer, session.options)
            done = engine.generate(_requests(session, options.max_tokens, temperature))
            row = {"proposer": name, "temperature": temperature} | _figures(done, plain)
            print(json.dumps(row) if options.json else "  ".join(f"{key} {row[key]}" for key in row))


def _requests(session: Session, tokens: int, temperature: float) -> list[Request]:
    """Fresh ones, as guides follow the text."""
    grammars, requests = Grammars(session.target), []
    for number, (question, properties) in enumerate(_ASKED):
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        form = ResponseFormat.model_validate(
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema | {"additionalProperties": False}},
            }
        )
        ids = session.encode([{"role": "user", "content": question + " Answer in JSON."}])
        sampling = SamplingOptions(max_tokens=tokens, temperature=temperature, seed=number)
        guide = grammars.answer(form)
        requests.append(Request(tuple(ids), sampling, grammar=lambda guide=guide: guide))
    return requests


def _figures(done: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, Any]:
    rounds = sum(item.rounds for item in done)
    accepted = sum(sum(item.accepted_per_position) for item in done)
    return {
        "tokens": sum(item.completion_tokens for item in done),
        "rounds": rounds,
        "acceptance_length": round(total_acceptance(done), 3),
        "accepted_per_round": round(accepted / rounds, 3),
        "same_texts": [item.token_ids for item in done] == [item.token_ids for item in plain],
    }


if __name__ == "__main__":
    main()
