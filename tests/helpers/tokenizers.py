"""Tokenizers of other families, trained on made-up text, as folders."""

import json
import random
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from snug.tokenizer import END_OF_TEXT

SCRIPTS = "aeioubcdfgh aeioubcdfgh абвгдежзикл αβγδεζηθι 你好世界中文字天地 한글말하기 عربيةمدسل नमस्ते".split()
AWKWARD = [" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x85", "  ", "    ", "\n\n\n", "    return x\n"]
AWKWARD += "▁ </ Ġ Ã© 's 'LL 'Re it's WE'VE '\u017f don't ’s I'M <a :// ----- \\n && 1234567 3.14 **2 [i]".split()
AWKWARD += "👩\u200d👩\u200d👧 🏳️\u200d🌈 👍🏽 🙂 \x00 \x1b[0m \ufeff \u200d \x7f \ufffd \uffff".split()
AWKWARD += "e\u0301 a\u0323\u0301 \u1e9b\u0323 =\u0338 \u0344 가\u11a8 \u212b \u0958 ﬁ ① é İ".split()
SPELLED = "<|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> [INST] [/INST] <think> </think>".split()
SPELLED += ["<tool é>", "<tool e\u0301>", "<|im_", "|>", "＜/s＞", "<\u200ds>", "<0x41>"]


@cache
def texts(count, seed=1, spelled=True):
    """Text with, or without, spellings of special tokens."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(rng.choice(SCRIPTS), k=rng.randrange(1, 7))) for _ in range(400)]
    kinds = [words, words, AWKWARD, SPELLED if spelled else words]
    word = lambda: rng.choice(["", " ", " "]) + rng.choice(rng.choice(kinds))  # noqa: E731
    return ["".join(word() for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def trained(model, trainer, special=(), bos=(), eos=(), **parts):
    """-> the object in tokenizer.json, of a tokenizer trained on random texts."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer.vocab_size, trainer.special_tokens, trainer.show_progress = 1200, list(special), False
    tokenizer.train_from_iterator(texts(1000, seed=2, spelled=False), trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in (*bos, *eos)]
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=ids)
    return json.loads(tokenizer.to_str())


def byte_level(pattern=None, special=(), **parts):
    """pattern: cuts texts before BPE does; None: GPT-2's."""
    before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        before = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), before])
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    parts = dict(pre_tokenizer=before, decoder=decoders.ByteLevel()) | parts
    return trained(models.BPE(), trainer, special, **parts)


def added(spec, *tokens, special=True, normalized=False):
    """The object with more added tokens, after those it has."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=normalized) for token in tokens])
    return json.loads(tokenizer.to_str())


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def gpt2_like():
    spec = byte_level()
    spec["model"]["vocab"][END_OF_TEXT] = len(spec["model"]["vocab"])  # as OpenAI's has it: in the vocabulary too
    return added(spec, END_OF_TEXT, normalized=True)


@cache
def llama3_like():
    special = "<s>", END_OF_TEXT, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    spec = byte_level(WORDS % r"\p{N}{1,3}", special, bos=["<s>"])
    spec["model"]["ignore_merges"] = True
    return spec


@cache
def qwen_like():
    spec = added(byte_level(WORDS % r"\p{N}", normalizer=normalizers.NFC()), END_OF_TEXT, "<|im_start|>", "<|im_end|>")
    return added(added(spec, "<think>", "</think>", special=False), "<tool é>", special=False, normalized=True)


@cache
def smollm2_like():
    """Special tokens are its first ids, and bytes that were not in its texts are no tokens."""
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    spec = byte_level(None, (END_OF_TEXT, "<|im_start|>", "<|im_end|>"), pre_tokenizer=pre_tokenizers.Sequence(digits))
    merged = "".join(map("".join, spec["model"]["merges"]))
    for symbol in [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in merged][:21]:
        del spec["model"]["vocab"][symbol]
    return spec


def sentencepiece_bpe(*special, **parts):
    """As Llama 2 and Mistral have it: <0x41> are tokens of the vocabulary and not added ones."""
    special, byte_tokens = ["<unk>", "<s>", "</s>", *special], [f"<0x{byte:02X}>" for byte in range(256)]
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model, trainer = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True), trainers.BpeTrainer()
    parts |= dict(decoder=decoders.Sequence(strip), bos=["<s>"])
    spec = trained(model, trainer, special + byte_tokens, **parts)
    spec["added_tokens"] = spec["added_tokens"][: len(special)]
    return spec


@cache
def llama2_like():
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentencepiece_bpe(normalizer=normalizer)


@cache
def mistral_like():
    cut = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentencepiece_bpe("[INST]", "[/INST]", pre_tokenizer=cut)


@cache
def unigram():
    """Its model makes </s> of text that spells it, and its normalizer makes </s> of other text."""
    parts = dict(normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace())
    trainer = trainers.UnigramTrainer(unk_token="<unk>")
    return trained(models.Unigram(), trainer, ["<unk>", "<s>", "</s>"], eos=["</s>"], **parts)


FAMILIES = [gpt2_like, llama3_like, qwen_like, smollm2_like, llama2_like, mistral_like, unigram]
STOP = dict.fromkeys(FAMILIES[:4], END_OF_TEXT) | dict.fromkeys(FAMILIES[4:], "</s>")


def folder_of(path, spec, **files):
    """Writes the files of a tokenizer: objects as JSON, text and bytes as they are."""
    path.mkdir(exist_ok=True)
    for name, value in dict(tokenizer=spec, **files).items():
        data = json.dumps(value) if isinstance(value, dict | list) else value
        data = data if isinstance(data, bytes) else data.encode()
        (path / f"{name}.{'jinja' if name == 'chat_template' else 'json'}").write_bytes(data)
    return str(path)


def ids_of(theirs, text, special):
    theirs.encode_special_tokens = not special
    return theirs.encode(text, add_special_tokens=False).ids


HERMES = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As Qwen3.5 and Qwen3-Coder
XML = HERMES.replace(
    """<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}""",
    """<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}{{- '</function>\\n</tool_call>' }}""",
)
# As Qwen3: only turns after the last question keep their thoughts.
THOUGHTS = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- macro kept(text, place) %}{{- text if place > ns.last else text.split('</think>')[-1].lstrip('\\n') }}{%- endmacro %}
""" + HERMES.replace(
    "'\\n' + message.content }}",
    "'\\n' + (kept(message.content, loop.index0) if message.role == 'assistant' else message.content) }}",
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe nice.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA31 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
    {%- set question = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- question + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", ' }}
        {{- '"parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
TOOLED = {  # name: family, template, the token that ends a turn, call_form
    "qwen2.5": (qwen_like, HERMES, "<|im_end|>", "hermes"), "qwen3": (qwen_like, THOUGHTS, "<|im_end|>", "hermes"),
    "qwen3.5": (qwen_like, XML, "<|im_end|>", "xml"), "smollm2": (smollm2_like, SMOLLM2, "<|im_end|>", "inline"),
    "llama3.1": (llama3_like, LLAMA31, "<|eot_id|>", "llama"),
}  # fmt: skip


def user(content, role="user"):
    return dict(role=role, content=content)


def tool(content, name="calc"):
    return dict(role="tool", name=name, content=content)
