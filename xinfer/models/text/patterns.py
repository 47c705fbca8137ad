"""How texts are cut into words before merging: regular expressions of model families, as their tokenizers have them."""

__all__ = ["CL100K", "KIMI", "LLAMA3", "O200K", "PRE", "QWEN", "WordSplit"]

from dataclasses import dataclass

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_UPPER_K, _LOWER_K = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_UPPERCASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_ASCII_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_PHRASE = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CL100K = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
QWEN = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
O200K = rf"{_CASED}{_ENDINGS}?|{_UPPERCASED}{_ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_K}*{_LOWER_K}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_K}+{_LOWER_K}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_TEKKEN = rf"{_CASED}|{_UPPERCASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK = rf"{_ASCII_SIGN_WORD}|{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
# Letters that have a case, as Unicode once had them; some that look like others are written as escapes.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01…“”‘’—\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class WordSplit:
    """What `tokenizer.ggml.pre` stands for.

    Attributes:
        patterns: each cuts the pieces that those before it left.
        whole: whether a word that is a token is one, whatever merges would make of it (`ignore_merges`).
        begin: whether texts begin with the beginning-of-sequence token where the file does not say.
        compose: whether texts are composed before (NFC).
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begin: bool = False
    compose: bool = False


_DIGITS = WordSplit((r"\p{N}", GPT2))
_GPT2_ALONE = WordSplit((GPT2,))
_LLAMA3_ALONE = WordSplit((LLAMA3,))
_QWEN_ALONE = WordSplit((QWEN,))

# Kinds by the name that llama.cpp calls them by first (src/llama-vocab.cpp); `default` is nobody's own but what files
# without the key get there. Where llama.cpp approximates a model's own expression, since its engine lacks something,
# the model's own stands here: that of tekken and gpt-4o, which look at letters of all scripts, and qwen2's composing.
_KINDS = {
    "default": WordSplit((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_ALONE,
    "smollm": _DIGITS,
    "llama-bpe": WordSplit((LLAMA3,), whole=True, begin=True),
    "qwen2": WordSplit((QWEN,), compose=True),
    "qwen35": WordSplit(
        (rf"{_ENDINGS}|{_MARKED_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        compose=True,
    ),
    "stablelm2": _QWEN_ALONE,
    "dbrx": _LLAMA3_ALONE,
    "minicpm5": WordSplit((r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), whole=True),
    "jais-2": WordSplit(
        (
            rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+"
            + "".join(rf"|\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "deepseek-llm": WordSplit(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": WordSplit((r"\p{N}{1,3}", _CJK, _DEEPSEEK)),
    "falcon": WordSplit((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "bloom": WordSplit((_BLOOM,)),
    "viking": WordSplit((_BLOOM, r"\p{N}")),
    "tekken": WordSplit((_TEKKEN,), whole=True, begin=True),
    "gpt-4o": WordSplit((O200K,)),
    "tiny_aya": WordSplit((r"\d{1,3}(?=(?:\d{3})*\b)", O200K)),
    "kimi-k2": WordSplit((KIMI,)),
    "superbpe": WordSplit((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe": WordSplit((rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "seed-coder": WordSplit((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "exaone-moe": WordSplit((rf"{_ENDINGS}|{_PHRASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "youtu": WordSplit(
        (
            _YOUTU,
            rf"{_CASED}{_ENDINGS}?|{_UPPERCASED}{_ENDINGS}?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        whole=True,
    ),
    "chameleon": WordSplit(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        begin=True,
    ),
}

# Names that mean the same, and differ at most in what a file says besides.
_SAME = {
    "gpt-2": "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo jais "
    "trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez",
    "stablelm2": "hunyuan solar-open grok-2",
    "dbrx": "smaug-bpe glm4 chatglm-bpe",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "tiny_aya": "cohere2moe",
    "bailingmoe": "bailingmoe2 llada-moe",
}
PRE = _KINDS | {other: _KINDS[name] for name, others in _SAME.items() for other in others.split()}
