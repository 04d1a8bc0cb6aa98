"""Targets of the Llama and Qwen3 families as GGUF files, to be handed over beside their drafter.

Not a general converter: other families are left to llama.cpp's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import check_layers, integer, number, read_json
from slipstream.formats.gguf_file import FILE_TYPES, put_tensor, read_gguf, stored_dtype, writing_gguf
from slipstream.formats.gguf_tokenizer import put_vocabulary, read_vocabulary

FAMILIES: Final = ("llama", "qwen3")
_OUTER: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_QK_NORMS: Final = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def write_gguf_target(
    folder: Path,
    path: Path,
    *,
    name: str = "target",
    dtype: torch.dtype = torch.bfloat16,
    force: bool = False,
) -> None:
    """Write a target, read it back, compare every tensor, then rename.

    Args:
        folder: a Hugging Face model with its tokenizer.
        path: of the file.
        name: shown by engines.
        dtype: of the stored matrices; vectors are float32.
        force: replace an existing file.

    Raises:
        CheckpointError: the family or its tokenizer is not known here, or the file exists.
        MissingExtraError: the gguf package is not installed.
    """
    raw = read_json(folder / "config.json")
    family = _check(raw, folder)
    shape = {key: integer(raw.get(key), key) for key in _SHAPE}
    shape["head_dim"] = integer(
        raw.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"], "head_dim"
    )
    check_layers(shape["num_hidden_layers"])
    vocabulary = read_vocabulary(folder, shape["vocab_size"])
    with writing_gguf(path, family, force) as (writer, finish):
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[dtype])
        writer.add_quantization_version(2)
        _put_config(writer, raw, shape)
        put_vocabulary(writer, vocabulary)
        written = {}
        for theirs, tensor in _tensors(folder, raw, family, shape):
            put_tensor(writer, theirs, tensor, dtype)
            written[theirs] = tensor
        _compare(written, finish(), dtype)


_SHAPE: Final = (
    "num_hidden_layers",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _check(raw: Mapping[str, Any], folder: Path) -> str:
    """The family.

    Raises:
        CheckpointError: it is another one, or has something that these keys cannot say.
    """
    family = raw.get("model_type")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    odd = [
        key
        for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
        if raw.get(key)
    ]
    odd += ["rope scaling"] if rope.get("rope_type", rope.get("type", "default")) != "default" else []
    if family not in FAMILIES or odd:
        what = f"of the family {family}" if family not in FAMILIES else f"with {odd[0]}"
        raise CheckpointError(
            f"{folder} is a model {what}, which is not written here; convert it with llama.cpp's "
            "convert_hf_to_gguf.py and export the drafter alone"
        )
    return str(family)


def _put_config(writer: Any, raw: Mapping[str, Any], shape: Mapping[str, int]) -> None:
    rope = raw.get("rope_parameters") or {}
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(number(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), "rope_theta"))
    writer.add_layer_norm_rms_eps(number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"))
    writer.add_vocab_size(shape["vocab_size"])


def _tensors(
    folder: Path, raw: Mapping[str, Any], family: str, shape: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Name in the file and tensor; every stored tensor is used once."""
    names = {key: value for key, value in _OUTER.items() if key != "lm_head.weight"}
    if not raw.get("tie_word_embeddings"):
        names["lm_head.weight"] = _OUTER["lm_head.weight"]
    inner = _INNER | (_QK_NORMS if family == "qwen3" else {})
    for layer in range(shape["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in inner.items()}
    left = set(names)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for ours in file.keys():  # noqa: SIM118 - the file is no mapping
                    if ours == "lm_head.weight" and ours not in names:
                        continue  # a tied head that was stored nevertheless
                    if ours not in left:
                        raise CheckpointError(f"tensor {ours} of {folder} is unknown to the family {family}")
                    left.remove(ours)
                    yield names[ours], _turned(file.get_tensor(ours), ours, family, shape)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a readable safetensors file; was it cut short?") from error
    if left:
        raise CheckpointError(f"tensor {min(left)} of {folder} is missing")


def _turned(tensor: Tensor, name: str, family: str, shape: Mapping[str, int]) -> Tensor:
    """llama.cpp rotates neighbouring channels in Llama: each head's halves are woven into one another."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if family != "llama" or key is None:
        return tensor
    split = tensor.reshape(shape[key], 2, shape["head_dim"] // 2, -1)
    return split.transpose(1, 2).reshape(tensor.shape)


def _compare(written: Mapping[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """What was written must read back bit for bit."""
    _, load = read_gguf(path)
    found = load()
    wrong = [
        name
        for name, tensor in written.items()
        if name not in found or not torch.equal(found[name], tensor.to(stored_dtype(tensor, dtype)))
    ]
    if wrong or len(found) != len(written):
        raise CheckpointError(
            f"tensor {min(wrong, default='?')} reads back differently, so nothing was written"
        )
