"""`slipstream inspect`: the doctor for a drafter and its pair."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.cli.show import print_json
from slipstream.core.command_options import InspectOptions
from slipstream.core.errors import InputError
from slipstream.core.options import TargetOptions

if TYPE_CHECKING:
    from slipstream.bench.mistakes import Diagnosis, Score
    from slipstream.formats.doctor import Findings
    from slipstream.model import Drafter
    from slipstream.target import Target

_NONE = 1.05  # tokens per round: below it no draft is kept


def inspect(
    drafter: str,
    /,
    *,
    target: Annotated[str, Parameter(alias="-t")] = "",
    engine: Literal[
        "all", "z-lab", "dflash", "vllm", "sglang", "trtllm", "llama.cpp", "ollama", "ollama-mlx"
    ] = "all",
    fix: Path | None = None,
    json: Annotated[bool, Parameter(name="--json")] = False,
    looking: Annotated[InspectOptions, Parameter(name="*", group="Inspection")] = InspectOptions(),
    loading: Annotated[TargetOptions, Parameter(name="*", group="Models")] = TargetOptions(),
) -> int:
    """Say what a drafter states, how engines read it, and whether a wrong reading accepts more.

    Exits with 1 when the pair cannot work: it does not fit, no draft is accepted, or the engine named with
    --engine does not load it or reads it otherwise.

    Args:
        drafter: a folder, a GGUF file, a hub id, or smollm2 (the bundled one).
        target: its target; with it, acceptance is measured as stated and under the usual mistakes.
        engine: show this one alone.
        fix: write the drafter as the better reading has it to this folder, where there is one, in the z-lab
            layout (or the speculators layout, if it drafts from the anchor's slot).
        json: print one JSON document.
    """
    from slipstream.api import drafter_path
    from slipstream.core.files import refuse_existing
    from slipstream.formats.doctor import examine
    from slipstream.target import load_target

    if fix is not None:
        if not target:
            raise InputError("--fix needs the target: name it with -t")
        refuse_existing(fix, force=False)
    loaded = load_target(target, loading, say) if target else None
    read, findings = examine(drafter_path(drafter, say), loaded.info if loaded else None, loaded)
    if engine != "all":
        findings = replace(findings, readings={engine: findings.readings[engine]})
    found = None if loaded is None else _diagnose(loaded, read, looking)
    verdict = _verdict(findings, found, engine)
    if json:
        print_json(_document(findings, found, verdict))
    else:
        _print(findings, found, verdict)
    if fix is not None:
        _fix(found, findings, fix)
    return 1 if verdict else 0


def _diagnose(target: Target, drafter: Drafter, options: InspectOptions) -> Diagnosis:
    from slipstream.bench.mistakes import PROMPTS, diagnose, mask_candidates

    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise InputError(f"{target.info.name} has no tokenizer, so there are no prompts to measure with")

    def render(**arguments: Any) -> list[list[int]]:
        turns = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        template = tokenizer.apply_chat_template
        return [list(template(t, add_generation_prompt=True, return_dict=False, **arguments)) for t in turns]

    raw = [list(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    others: list[tuple[str, list[list[int]]]] = []
    texts = raw
    if tokenizer.chat_template:
        texts = render()
        others.append(("no chat template", raw))
        for mode in (True, False):
            changed = render(enable_thinking=mode)
            if changed != texts:
                others.append((f"thinking {'on' if mode else 'off'}", changed))
    say("Measuring acceptance as stated and under the usual mistakes")
    moved = drafter.to(target.device, target.dtype)
    masks = mask_candidates(tokenizer, target.info.embedding_rows)
    return diagnose(target, moved, texts, options, others, masks)


def _verdict(findings: Findings, found: Diagnosis | None, engine: str) -> list[str]:
    """Why the pair cannot work; empty where it can."""
    verdict = []
    if engine != "all":
        one = findings.readings[engine]
        if not one.loads:
            verdict.append((*one.problems, *one.notes)[0])
        verdict += [f"{one.engine} {problem}" for problem in one.problems if one.loads]
    if found is not None and found.stated.acceptance_length < _NONE:
        verdict.append(
            f"as stated no draft is accepted ({found.stated.acceptance_length:.2f} tokens per round); "
            "drafter and target were not made for each other, or it is stated wrongly"
        )
    return verdict


def _fix(found: Diagnosis | None, findings: Findings, folder: Path) -> None:
    """Write what was measured from the stored weights, not from those in the target's dtype."""
    import torch

    from slipstream.bench.mistakes import as_read
    from slipstream.formats import read_drafter, write_speculators, write_zlab

    if found is None or found.better is None or found.better.drafter is None:
        say("note: no other reading is clearly better, so there is nothing to fix")
        return
    stored = read_drafter(findings.path, dtype=torch.bfloat16)
    mended = as_read(stored, found.better)
    (write_speculators if mended.config.from_anchor else write_zlab)(mended, folder)
    say(f"note: wrote the drafter with {found.better.name} to {folder}")


def _document(findings: Findings, found: Diagnosis | None, verdict: list[str]) -> dict[str, Any]:
    acceptance = None
    if found is not None:
        acceptance = {
            "stated": _score(found.stated),
            "mistakes": [_score(score) for score in found.others],
            "better": None if found.better is None else found.better.name,
        }
    return {
        "path": str(findings.path),
        "states": findings.facts,
        "engines": {key: asdict(one) for key, one in findings.readings.items()},
        "acceptance": acceptance,
        "works": not verdict,
        "verdict": verdict,
    }


def _score(score: Score) -> dict[str, Any]:
    return {
        "reading": score.name,
        "acceptance_length": score.acceptance_length,
        "by_position": list(score.by_position),
        "log_p": score.mean_log_p,
        "blocks": len(score.lengths),
    }


def _print(findings: Findings, found: Diagnosis | None, verdict: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    states = Table("", "", title=str(findings.path), show_header=False)
    for name, value in findings.facts.items():
        states.add_row(name, str(value))
    console.print(states)
    engines = Table("engine", "version", "reads it", title="How engines read it")
    for one in findings.readings.values():
        if not one.loads:
            how = "does not load it: " + "; ".join((*one.problems, *one.notes))
        else:
            how = "; ".join(one.problems) or "as stated"
        engines.add_row(one.engine, one.version, how)
    console.print(engines)
    if found is not None:
        _print_acceptance(console, found)
    for sentence in verdict:
        console.print(f"cannot work: {sentence}")
    if not verdict:
        works = (
            "it works as stated"
            if found and found.better is None
            else "it works, but another reading is better"
        )
        console.print(f"verdict: {works if found else 'readable; name its target with -t to try it'}")


def _print_acceptance(console: Any, found: Diagnosis) -> None:
    from rich.table import Table

    blocks = len(found.stated.lengths)
    table = Table(
        "reading",
        "tokens per round",
        "log p",
        "right up to draft 1, 2, ...",
        title=f"Teacher-forced, {blocks} blocks",
    )
    for score in (found.stated, *found.others):
        shares = " ".join(f"{share:.2f}" for share in score.by_position)
        table.add_row(score.name, f"{score.acceptance_length:.2f}", f"{score.mean_log_p:.2f}", shares)
    console.print(table)
    for score in found.others:
        if score.acceptance_length <= found.stated.acceptance_length or score is found.better:
            continue
        if score.drafter is None:
            console.print(f"note: with {score.name} it accepts more; perhaps it was trained on such texts")
        else:
            console.print(f"note: {score.name} accepts a little more here, within what chance explains")
    if found.better is not None:
        console.print(
            f"STATED WRONGLY? With {found.better.name} it accepts {found.better.acceptance_length:.2f} "
            f"tokens per round, as stated {found.stated.acceptance_length:.2f}, and gives the right tokens "
            f"the log-probability {found.better.mean_log_p:.2f} instead of {found.stated.mean_log_p:.2f}; "
            "--fix FOLDER writes it that way."
        )
