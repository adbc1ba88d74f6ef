"""A small tokenizer with a chat template, made on the spot."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = r"""
{{- bos_token }}
{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{{- raise_exception('nobody may not speak') }}{%- endif %}
    {%- if message.role == 'divider' %}{{- 1 // 0 }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.tool_calls %}
        {%- generation %}{{- message.tool_calls | tojson }}{%- endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
TEXT = "The quick brown fox jumps over the lazy dog. What is the weather like today? It rains, as it always does in autumn. "


def make_model(folder: Path) -> str:
    """Write a byte-level BPE tokenizer with a chat template into a folder, and return its path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
