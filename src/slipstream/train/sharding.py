"""Weights split over processes (FSDP): how a run is split, and how whole weights come back from it.

Accelerate reads the user's wishes and starts the processes; torch's `fully_shard` splits. Checkpoints are
always whole, so nothing on disk depends on the number of processes. What is not split: the target, its ends
and the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.core.errors import InputError
from slipstream.model.drafter import MLP, Drafter
from slipstream.train.checkpoint import Run
from slipstream.train.muon import Muon


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse settings of FSDP that would not be followed.

    Raises:
        InputError: names the setting.
    """
    if plugin.fsdp_version != 2:
        raise InputError("weights are split by FSDP 2 only; add --fsdp_version 2 to accelerate launch")
    offloads = plugin.cpu_offload and type(plugin.cpu_offload).__name__ != "OffloadPolicy"
    for asked, name in (
        (offloads, "fsdp_offload_params"),
        (plugin.activation_checkpointing, "fsdp_activation_checkpointing"),
    ):
        if asked:
            raise InputError(f"training does not support --{name}; leave it out")


def split(
    run: Run, module: nn.Module, accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin
) -> None:
    """Leave each process its rows of every weight, average and optimiser state, in place.

    Every feed-forward is gathered by itself; the rest of the drafter (attention, whose projections are also
    called for the context, `fc`, norms) is gathered once a pass. Weights are gathered in float32 and
    gradients summed in it, so the figures are those of one process.

    Args:
        run: whole, the same on all processes.
        module: holds the run's drafter; what the loop calls.
        accelerator: of several processes.
        plugin: checked.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for whole in (*run.drafter.parameters(), *run.average.parameters()):
        whole.data = broadcast(whole.data)
    before = dict(run.drafter.named_parameters())
    for part in module.modules():
        if isinstance(part, MLP):
            fully_shard(part, mesh=mesh, reshard_after_forward=bool(plugin.reshard_after_forward))
    fully_shard(module, mesh=mesh)
    after = dict(run.drafter.named_parameters())
    _replace(run.average, lambda name, mean: _like(mean, after[name]))
    successor: dict[Tensor, Tensor] = {before[name]: after[name] for name in before}
    for optimizer in run.optimizers:
        states = {successor[p]: state for p, state in optimizer.state.items()}
        for group in optimizer.param_groups:
            group["params"] = [successor[p] for p in group["params"]]
        optimizer.state.clear()
        for parameter, state in states.items():
            optimizer.state[parameter] = {
                name: _like(value, parameter) if value.shape == parameter.shape else value
                for name, value in state.items()
            }
        if isinstance(optimizer, Muon):
            optimizer.exchange = MatrixExchange()


def join(run: Run) -> None:
    """Give every process whole weights again, on the host; the optimisers are done with.

    All processes must call it.
    """
    host = torch.device("cpu")
    drafter, average = (whole_drafter(part, host) for part in (run.drafter, run.average))
    assert drafter is not None
    assert average is not None
    run.drafter, run.average, run.optimizers = drafter.requires_grad_(True), average, []


def whole_drafter(parts: Drafter, device: torch.device, keep: bool = True) -> Drafter | None:
    """A whole copy of a split drafter, without gradients. All processes must call it.

    Args:
        parts: of the drafter.
        device: of the copy.
        keep: whether this process wants it; None is returned without it.
    """
    weights = gathered(parts.state_dict(), keep)
    if not keep:
        return None
    drafter = Drafter(parts.config).to(device).requires_grad_(False)
    drafter.load_state_dict(weights)
    return drafter


def gathered(state: Any, keep: bool = True) -> Any:
    """Nested dicts and lists with every split tensor whole and on the host.

    All processes must call it, with the same names in the same order.

    Args:
        state: anything.
        keep: whether this process wants the tensors; without it they are left out.
    """
    if isinstance(state, DTensor):
        whole: Tensor = state.full_tensor().detach()
        return whole.cpu() if keep else None  # host: a checkpoint; one tensor at a time lies on the device
    if isinstance(state, Mapping):
        return {name: gathered(value, keep) for name, value in state.items()}
    if isinstance(state, list):
        return [gathered(value, keep) for value in state]
    return state


class MatrixExchange:
    """Gives each process one whole matrix of a round to work on, and everybody their rows of the results."""

    @property
    def processes(self) -> int:
        """Matrices of a round."""
        return dist.get_world_size()

    def __call__(self, parts: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Do `work` on whole matrices.

        Args:
            parts: at most one split matrix per process, split by rows.
            work: matrix to matrix of the same shape.

        Returns:
            The results, split as the parts are.
        """
        mine = dist.get_rank()
        locals_ = [part.to_local() for part in parts]  # type: ignore[attr-defined]
        sent = [local.numel() for local in locals_] + [0] * (self.processes - len(parts))
        received = [0] * self.processes
        if mine < len(parts):
            height, width = parts[mine].shape
            received = [rows * width for rows in _rows(height, self.processes)]
        flat = torch.cat([local.reshape(-1) for local in locals_])
        whole = flat.new_empty(sum(received))
        dist.all_to_all_single(whole, flat, received, sent)
        if mine < len(parts):
            whole = work(whole.view(parts[mine].shape)).reshape(-1).contiguous()
        result = torch.empty_like(flat)
        dist.all_to_all_single(result, whole, sent, received)
        pieces = result.split(sent[: len(parts)])
        return [
            _wrapped(piece.view(local.shape), part)
            for piece, local, part in zip(pieces, locals_, parts, strict=True)
        ]


def _rows(height: int, processes: int) -> list[int]:
    """Rows that each process holds: equal runs, the last ones shorter or empty."""
    run = -(-height // processes)
    return [max(0, min(run, height - place * run)) for place in range(processes)]


def _like(whole: Tensor, example: Tensor) -> Tensor:
    """This process's rows of a tensor that all processes have."""
    assert isinstance(example, DTensor)
    return distribute_tensor(
        whole.detach().to(example.device), example.device_mesh, example.placements, src_data_rank=None
    )


def _wrapped(local: Tensor, example: Tensor) -> Tensor:
    """Rows as a split tensor of the example's shape."""
    assert isinstance(example, DTensor)
    return DTensor.from_local(
        local,
        example.device_mesh,
        example.placements,
        run_check=False,
        shape=example.shape,
        stride=example.stride(),
    )


def _replace(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Put new parameters in the place of all old ones."""
    for name, old in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        new = nn.Parameter(make(name, old), requires_grad=False)
        setattr(module.get_submodule(owner), own, new)
