"""`slipstream plan`: what drafting would bring on a card that is not at hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.cli.show import print_json
from slipstream.core.command_options import PlanOptions

if TYPE_CHECKING:
    from slipstream.plan import Pair, Prediction, Setting


def plan(
    *,
    target: Annotated[str, Parameter(alias="-t")],
    drafter: Annotated[str, Parameter(alias="-d")] = "",
    json: Annotated[bool, Parameter(name="--json")] = False,
    options: Annotated[PlanOptions, Parameter(name="*", group="Plan")] = PlanOptions(),
) -> int:
    """Predict tokens per second, drafted and plain, from configs, a card's data sheet and acceptance.

    Args:
        target: smollm2 (bundled), a config file, a model folder or a hub id; no weights are read.
        drafter: config file, folder or hub id of a drafter in the published layout; without one, layers as
            the paper would make them.
        json: print one JSON document.
    """
    from slipstream.plan import predict
    from slipstream.plan.inputs import read_concurrency

    pair, setting = _pair(target, drafter, options), _setting(options)
    found = predict(pair, setting, read_concurrency(options.concurrency))
    if json:
        print_json(_document(pair, setting, found))
    else:
        _print(pair, setting, found)
    return 0


def _pair(target: str, drafter: str, options: PlanOptions) -> Pair:
    from slipstream.core.errors import InputError
    from slipstream.plan import Pair, described_drafter, read_drafter_shape, read_shape
    from slipstream.plan.inputs import read_acceptance, read_config

    shape = read_shape(read_config(_folder(target)))
    if drafter:
        layers, fused, block = read_drafter_shape(read_config(_drafter_folder(drafter)), shape)
        if options.block_size > block:
            raise InputError(f"block_size {options.block_size} is larger than the drafter's {block}")
    else:
        (layers, fused), block = described_drafter(shape, options.drafter_layers), 16
    block = options.block_size or block
    return Pair(shape, layers, fused, block, read_acceptance(options, block))


def _folder(target: str) -> str:
    """Bundled and GGUF targets have their config in the cache."""
    if target != "smollm2" and not target.endswith(".gguf"):
        return target
    from slipstream.target import model_folder

    return str(model_folder(target, say))


def _drafter_folder(drafter: str) -> str:
    if drafter not in ("auto", "smollm2"):
        return drafter
    from slipstream.api import drafter_path

    return str(drafter_path(drafter))


def _setting(options: PlanOptions) -> Setting:
    from slipstream.plan import CPU, Setting, find_card

    if options.gpu.lower() == CPU:
        from slipstream.plan.probe import measured_cpu

        say("measuring this machine")
        card = measured_cpu()
    else:
        card = find_card(options.gpu)
    overhead = None if options.overhead_ms < 0 else options.overhead_ms / 1e3
    return Setting(card, options.tp, options.context, options.execution, options.precision, overhead)


def _document(pair: Pair, setting: Setting, found: Prediction) -> dict[str, Any]:
    return {
        "verdict": verdict(setting, found),
        "rows": [asdict(row) for row in found.rows],
        "acceptance_length": found.acceptance_length,
        "best_block_size": found.best_block_size,
        "break_even_acceptance_length": found.break_even,
        "pays_up_to": found.pays_up_to,
        "block_size": pair.block_size,
        "profile": list(pair.profile),
        "target": {"family": pair.target.name, "parameters": pair.target.parameters},
        "drafter": {"layers": len(pair.drafter.layers)},
        "setting": asdict(setting) | {"overhead_s": setting.overhead_s},
    }


def verdict(setting: Setting, found: Prediction) -> str:
    """The answer in one sentence."""
    first, cards = found.rows[0], f"{setting.cards} x " if setting.cards > 1 else ""
    where = f"on {cards}{setting.card.name} with {first.concurrency} at once"
    if not first.fits:
        return f"It does not fit: {first.memory_gib:.0f} GiB are needed {where}."
    if first.speedup < 1:
        return (
            f"Drafting does not pay {where}: {first.speedup:.2f}x at {found.acceptance_length:.2f} a round."
        )
    until = (
        "at every concurrency looked at" if found.pays_up_to is None else f"up to {found.pays_up_to} at once"
    )
    return f"{first.speedup:.1f}x faster {where}; drafting pays {until}."


def _print(pair: Pair, setting: Setting, found: Prediction) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(verdict(setting, found))
    table = Table(caption="tokens/s of all requests together; times in ms; memory on each card in GiB")
    for name in ("at once", "plain", "drafted", "gain", "step", "round", "draft", "verify", "memory"):
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(
            str(row.concurrency),
            f"{row.plain_tokens_per_s:.0f}",
            f"{row.drafted_tokens_per_s:.0f}",
            f"{row.speedup:.2f}x",
            *(f"{ms:.2f}" for ms in (row.step_ms, row.round_ms, row.draft_ms, row.verify_ms)),
            f"{row.memory_gib:.1f}" + ("" if row.fits else " too much"),
        )
    console.print(table)
    card = setting.card
    lines = (
        f"{pair.target.parameters / 1e9:.2f} B weights, {setting.context} tokens of context, blocks of "
        f"{pair.block_size}, acceptance length {found.acceptance_length:.2f}.",
        f"Drafting pays from {found.break_even:.2f} on; the best block here is {found.best_block_size}.",
        f"{card.name}: {card.bandwidth / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s in bf16",
        f"({card.source}).",
        f"{setting.execution} execution, {setting.overhead_s * 1e3:.1f} ms a round beyond its passes.",
        "A prediction: docs/plan_accuracy.md says how near such ones were.",
    )
    for line in lines:
        console.print(line)
