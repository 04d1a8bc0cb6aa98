"""A complete tiny model folder, tokenizer and chat template included, and a drafter folder that fits it."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.formats import write_zlab
from slipstream.model import DraftConfig, Drafter
from slipstream.target import load_target

SPECIAL = ("<|start|>", "<|end|>", "<|mask|>", "<|spare|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template=TEMPLATE):
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|mask|>", "<|spare|>"]})
    fast.chat_template = template
    return fast


def save_target(folder, template=TEMPLATE):
    """Write a random Llama of two layers and return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=257,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def save_drafter(folder, target_folder):
    """Write a random drafter of one layer for the target and return its folder."""
    torch.manual_seed(1)
    info = load_target(str(target_folder)).info
    config = DraftConfig.for_target(info, num_layers=1, block_size=4, num_taps=2, mask_token_id=258)
    write_zlab(Drafter(config), folder)
    return folder
