"""Chat templates in the styles of ten model families, written for tests: markers, spacing and habits of
each.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>"),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|user|>",
        "<|assistant|>",
    ),
    *(
        "<|system|>",
        "<|end|>",
        "[INST]",
        "[/INST]",
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
    ),
    *("<think>", "</think>", "<bos>", "<eos>"),
)
_OPEN = "{% if add_generation_prompt %}"

#: Template and end-of-turn token by style.
STYLES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _OPEN
        + "<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "chatml with a default system turn": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _OPEN
        + "<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
        "</s>",
    ),
    "llama 3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        + _OPEN
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
    ),
    "gemma": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + _OPEN + "<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
    "zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
        + _OPEN
        + "<|assistant|>\n{% endif %}",
        "</s>",
    ),
    "phi 3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        + _OPEN
        + "<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|end|>",
    ),
    "granite": (
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% endfor %}" + _OPEN + "<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "<|end_of_text|>",
    ),
    # Thoughts of earlier answers are dropped; with thinking off, an empty thought opens the answer.
    "qwen 3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}"
        + _OPEN
        + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<|im_end|>",
    ),
    # Plain words instead of special tokens; the turn ends with the tokenizer's own end token.
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
        "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}" + _OPEN + "ASSISTANT:{% endif %}",
        "</s>",
    ),
}


def tokenizer_of(style: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens of all families and one style's template."""
    template, end = STYLES[style]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A merge across what templates and answers meet at shows whether they are tokenised apart.
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "\u010a\u010a", "\u0120I"])}
    merges = [("\u010a", "\u010a"), ("\u0120", "I")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
