"""One run of the DFlash trainer of speculators 0.9.0; a process of its own, whose interpreter has that.

Its configuration, data set, packing, model, optimisers and training loop, through their public classes. Three
things of it need an accelerator, and each is replaced by what the package itself offers, or left out:

- attention: FlexAttention has no backward pass on a CPU; `--draft-attn-impl sdpa` is its way out;
- loss: the fused kernels are Triton's; `--loss-implementation eager` is its other implementation;
- the trainer moves the model to accelerator 0 and waits for that accelerator in every step that it logs; here
  the device is the CPU and no step is logged.

Hidden states are read from files, as after its offline generation; vLLM takes no part.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hs_connectors import FileTransfer
from speculators.models.dflash import DFlashDraftModel
from speculators.train.cli import build_draft_model, set_seed
from speculators.train.config import TrainConfig
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from training_meter import Meter

_NEVER = 1 << 30


class CpuTrainer(Trainer):
    """Their trainer on a CPU, silent."""

    def setup_trainer(self) -> None:
        """Name the device; begin at step 1, as step 0 is always logged."""
        super().setup_trainer()
        self.local_rank, self.device_type = "cpu", "cpu"
        self.global_step = 1


class Counted:
    """Their loader, with a note of what every batch holds."""

    def __init__(self, loader: Any, max_anchors: int, block_size: int) -> None:
        self.batch_sampler, self._loader = loader.batch_sampler, loader
        self._max_anchors, self._block_size = max_anchors, block_size
        self.tokens: list[int] = []
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.tokens.append(int((batch["document_ids"] != -1).sum()))
            anchors = int(batch["loss_mask"][:, : -self._block_size].sum())
            self.blocks.append(min(anchors, self._max_anchors))
            yield batch


def main(task: dict[str, Any]) -> None:
    """Load, train some steps, print what was measured."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(task["threads"])
    folder = Path(task["folder"])
    meter = Meter(task["skipped"], task["steps"])
    args = _arguments(task, folder)
    set_seed(args.seed)
    model = build_draft_model(args, DFlashDraftModel, None, None, task["vocab_size"])
    loader = Counted(_loader(args, task, folder), args.max_anchors, args.block_size)
    total = task["skipped"] + task["steps"] + 1
    call, _ = DFlashDraftModel.get_trainer_kwargs(**vars(args))
    trainer = CpuTrainer(model, _trainer_config(args, call, total), loader, None)
    meter.mark()
    epoch = 0
    while trainer.global_step <= total:
        trainer.train_epoch(epoch, step_callback=meter.mark)
        epoch += 1
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    meter.print(loader.tokens, loader.blocks, parameters=trained, torch=torch.__version__)


def _arguments(task: dict[str, Any], folder: Path) -> argparse.Namespace:
    """Their defaults of a DFlash run, but for the shapes that both sides share."""
    flags = {
        "speculator_type": "dflash",
        "verifier_name_or_path": str(folder / "target"),
        "data_path": str(folder / "peer"),
        "save_path": str(folder / "peer_run"),
        "num_layers": task["layers"],
        "block_size": task["block_size"],
        "full_attention_indices": list(range(task["layers"])),
        "target_layer_ids": task["layer_ids"],
        "mask_token_id": task["mask_token_id"],
        "total_seq_len": task["row_tokens"],
        "max_anchors": task["blocks"],
        "num_workers": 0,
        "hidden_states_dtype": task["precision"],
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "on_missing": "raise",
        "no_resume_from_checkpoint": True,
        "log_freq": _NEVER,
    }
    return argparse.Namespace(**TrainConfig.from_sources(cli=flags, argv=[]).flatten())


def _loader(args: argparse.Namespace, task: dict[str, Any], folder: Path) -> Any:
    """Their data set on the files written beforehand; one chat is left to the validation they ask for."""
    chats = json.loads((folder / "peer_chats.json").read_text())
    data = Dataset.from_list(chats).with_format(
        "torch", columns=["input_ids", "loss_mask"], output_all_columns=True
    )
    data.save_to_disk(folder / "peer")
    train_loader, _ = create_train_val_loaders(
        data_path=args.data_path,
        total_seq_len=args.total_seq_len,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
        transfer=FileTransfer(folder / "hidden_states"),
        vllm_endpoint=args.vllm_endpoint,
        on_missing=args.on_missing,
        verifier_name_or_path=args.verifier_name_or_path,
        request_timeout=args.request_timeout,
        max_retries=args.max_retries,
        generation_validation_retries=args.generation_validation_retries,
        max_consecutive_generation_failures=args.max_consecutive_generation_failures,
        hidden_size=task["width"],
        num_target_layers=len(task["layer_ids"]),
        num_workers=0,
        prefetch_factor=args.prefetch_factor,
        preprocess=None,
        train_data_ratio=1 - 0.5 / len(chats),
        seed=args.seed,
    )
    return train_loader


def _trainer_config(args: argparse.Namespace, call: dict[str, Any], total: int) -> TrainerConfig:
    """Theirs, from the flags; the step counter begins at 1."""
    names = [name for name in TrainerConfig._fields if hasattr(args, name)]
    values = {name: getattr(args, name) for name in names}
    values["hidden_states_dtype"] = getattr(torch, args.hidden_states_dtype)
    values |= {"num_epochs": args.epochs, "max_steps": total + 1, "train_call_kwargs": call}
    return TrainerConfig(**values)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
