"""Text to token ids: truncation, special tokens, and the training of a new vocabulary.

Wraps a Hugging Face ``tokenizer.json`` without transformers. Truncation is counted, never silent.

Shapes: B texts.
Source: ModernBERT, arXiv:2412.13663, section 2.1.1 (byte-level BPE, 50,368 ids: a multiple of 64, [CLS] text [SEP]).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, read_json, write_json, write_text

# ModernBERT's names, in the order of its ids.
SPECIAL_TOKENS = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}

Splitter: TypeAlias = tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]


def _split_words() -> Splitter:
    """ModernBERT's splitter: a word includes the space before it."""
    return normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_identifiers() -> Splitter:
    """For code and text about it: splits camelCase, converts to lower case, and makes runs of spaces tokens of their own."""
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"(?<=[a-z0-9])(?=[A-Z])"), " "), normalizers.Lowercase()]
    )
    pieces = Regex(r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizer, pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), byte_level])


SPLITTERS: dict[str, Callable[[], Splitter]] = {"words": _split_words, "identifiers": _split_identifiers}
"""How a new vocabulary splits text before it learns merges."""


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of B texts, special tokens included, and for each text whether it lost tokens."""

    ids: list[list[int]]
    truncated: list[bool]


@dataclass(frozen=True)
class TextTokens:
    """The ids of a text's tokens without special tokens, and the start and end character of each without surrounding white space.

    All byte tokens of a character have the span of that character.
    """

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class PairTemplate:
    """Special tokens of a pair of texts in one sequence: before the first, between the two, and after the second."""

    before: list[int]
    between: list[int]
    behind: list[int]


class Tokenizer:
    """A vocabulary with its rules; gives the same ids as the fast tokenizer of transformers for the same folder.

    Settings of tokenizer_config.json that change ids are followed: BERT's lower case, accents and Chinese characters, special tokens, the
    truncation side. Unsupported settings are an error. It is made of the rules, as an object of the tokenizers library, and of the parsed
    tokenizer_config.json, which names the special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        # Stored truncation or padding would be a hidden default: here lengths are arguments.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.settings = settings

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Tokenizer:
        """Read ``tokenizer.json``, which an InputError names if it is missing or no tokenizer, and ``tokenizer_config.json``."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder}: tokenizer.json is missing; save the model's fast tokenizer there with transformers")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise InputError(f"{path}: not a tokenizer: {error}") from error
        config = Path(folder) / "tokenizer_config.json"
        settings = read_json(config) if config.is_file() else {}
        _follow_settings(backend, settings, config)
        return cls(backend, settings)

    def save(self, folder: Path | str) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""
        write_text(Path(folder) / "tokenizer.json", self.to_json())
        # Every version of transformers knows this class; v5 writes a name that v4 does not know.
        write_json(Path(folder) / "tokenizer_config.json", self.settings | {"tokenizer_class": "PreTrainedTokenizerFast"})

    def to_json(self) -> str:
        """Return the rules as the text of a tokenizer.json."""
        text: str = self._backend.to_str(pretty=True)
        return text

    @property
    def normalizer(self) -> str:
        """The rule for text before it is split, as JSON; empty if there is none."""
        rule = self._backend.normalizer
        return "" if rule is None else rule.__getstate__().decode()

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def max_length(self) -> int | None:
        """The longest input that tokenizer_config.json allows, in tokens; None if it sets no limit."""
        value = self.settings.get("model_max_length")
        # transformers writes 1e30 for "no limit".
        return int(value) if isinstance(value, int | float) and value < 1_000_000_000 else None

    @property
    def truncation_side(self) -> str:
        """End at which long texts are truncated: ``right`` or ``left``."""
        return str(self.settings.get("truncation_side", "right"))

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, None if it is not in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its role: unk, cls, sep, pad, mask; None if the tokenizer has none."""
        if name not in SPECIAL_TOKENS:
            raise ValueError(f"a special token must be one of {', '.join(SPECIAL_TOKENS)}, got {name!r}")
        token = self.settings.get(f"{name}_token", SPECIAL_TOKENS[name])
        if isinstance(token, dict):  # transformers 4 may write the added token with its flags
            token = token.get("content")
        return self.token_id(token) if isinstance(token, str) else None

    def add_token(self, token: str) -> int:
        """Add a token to the vocabulary unless it exists; returns its id."""
        self._backend.add_tokens([AddedToken(token, normalized=False)])
        found = self.token_id(token)
        if found is None:
            raise ValueError(f"the tokenizer cannot add the token {token!r}")
        return found

    def encode(self, texts: Sequence[str], *, max_length: int) -> TokenizedTexts:
        """Tokenize texts, with special tokens.

        Args:
            texts: B texts.
            max_length: Maximum length in tokens, special tokens included; longer texts are truncated and counted.

        Raises:
            InputError: ``max_length`` leaves no room for the special tokens, or a text contains half of a surrogate pair; names its number.

        Example:
            >>> from quiver.encoder import Tokenizer
            >>> tokenizer = Tokenizer.train(["a bird has wings"] * 2, vocab_size=320)
            >>> tokenizer.encode(["a bird", ""], max_length=3).truncated
            [True, False]
        """
        special: int = self._backend.num_special_tokens_to_add(is_pair=False)
        if max_length < special:
            raise InputError(f"max_length must be >= {special}, the number of special tokens, got {max_length}")
        encodings = self._backend.encode_batch_fast(_check_texts(texts))
        found = [encoding.ids for encoding in encodings]
        truncated = [len(ids) > max_length for ids in found]
        # Truncated here: the library keeps truncation as state, which threads would share, and makes objects of all that it cuts off.
        for number in itertools.compress(range(len(found)), truncated):
            ids = found[number]
            before = encodings[number].special_tokens_mask.index(0)
            end = len(ids) - (special - before)
            start = end - (max_length - special) if self.truncation_side == "left" else before
            found[number] = [*ids[:before], *ids[start : start + max_length - special], *ids[end:]]
        return TokenizedTexts(found, truncated)

    def encode_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts of any length without truncation or special tokens."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(_check_texts(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; bytes that are not UTF-8 become replacement characters."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(self, text: str) -> TextTokens:
        """Return the tokens of a text with their positions, without truncation or special tokens."""
        encoding = self._backend.encode(check_utf8(text, "the text"), add_special_tokens=False)
        spans = []
        for start, end in encoding.offsets:
            inner = text[start:end].strip()
            begin = text.index(inner, start) if inner else start  # a span of white space alone is not changed
            spans.append((begin, begin + len(inner) if inner else end))
        return TextTokens(list(encoding.ids), spans)

    def pair_template(self) -> PairTemplate:
        """Return the special tokens around and between a pair of texts."""
        encoding = self._backend.encode("a", "a")
        ids, texts = list(encoding.ids), list(encoding.sequence_ids)  # special tokens belong to no text: None
        first, second = texts.index(0), texts.index(1)
        between = [ids[place] for place in range(first, second) if texts[place] is None]
        return PairTemplate(ids[:first], between, ids[len(texts) - texts[::-1].index(1) :])

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int, max_length: int = 8192, split: str = "words", unused: int = 0) -> Tokenizer:
        """Learn a byte-level BPE vocabulary with ModernBERT's template: bytes and merges, then [UNK] [CLS] [SEP] [PAD] [MASK], then unused.

        Args:
            texts: Training text, read once.
            vocab_size: Size of the vocabulary, special tokens included; a multiple of 64 keeps the embedding aligned. If the text yields
                too few merges, ``[unused]`` tokens fill it up.
            max_length: Written as ``model_max_length``.
            split: A key of `SPLITTERS`.
            unused: Minimum number of ``[unused]`` tokens, for later use; ModernBERT's vocabulary of 50,368 ids has 83.

        Raises:
            InputError: ``vocab_size`` has no room for the 256 bytes, the special and the unused tokens, or the split is unknown.
        """
        special = list(SPECIAL_TOKENS.values())
        if vocab_size < 256 + len(special) + unused:
            room = f"256 bytes and {len(special)} special tokens" + (f" and {unused} unused ones" if unused else "")
            raise InputError(f"vocab_size must be >= {256 + len(special) + unused} ({room}), got {vocab_size}")
        if split not in SPLITTERS:
            raise InputError(f"split must be one of {', '.join(SPLITTERS)}, got {split!r}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer, backend.pre_tokenizer = SPLITTERS[split]()
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special) - unused, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        backend.add_special_tokens([AddedToken(token, normalized=False, lstrip=token == "[MASK]") for token in special])
        missing = vocab_size - backend.get_vocab_size()
        backend.add_tokens([AddedToken(f"[unused{number}]", normalized=False) for number in range(missing)])
        cls_token, sep_token = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls_token} $A {sep_token}",
            pair=f"{cls_token} $A {sep_token} $B {sep_token}",
            special_tokens=[(token, backend.token_to_id(token)) for token in (cls_token, sep_token)],
        )
        settings: dict[str, Any] = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
        settings |= {
            "model_max_length": max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        return cls(backend, json.loads(json.dumps(settings)))


def _check_texts(texts: Sequence[str]) -> list[str]:
    """Return texts as a list; a text that UTF-8 cannot hold is refused by its number, from 0."""
    return [check_utf8(text, f"text {number}") for number, text in enumerate(texts)]


# Names in tokenizer_config.json of settings that tokenizer.json keeps in a BERT normalizer.
BERT_NORMALIZER = {"do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"}


def _follow_settings(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path) -> None:
    """Apply what tokenizer_config.json adds to tokenizer.json, as transformers does when it loads the folder."""
    # Asked piece by piece: the text of the whole would hold every word and merge.
    if isinstance(backend.normalizer, normalizers.BertNormalizer):
        values = {ours: getattr(backend.normalizer, ours) for ours in ("clean_text", *BERT_NORMALIZER.values())}
        options = {ours: settings[theirs] for theirs, ours in BERT_NORMALIZER.items() if theirs in settings}
        if options.items() - values.items():
            backend.normalizer = normalizers.BertNormalizer(**values | options)
    if settings.get("truncation_side", "right") not in ("right", "left"):
        raise InputError(f"{path}: truncation_side must be right or left, got {settings['truncation_side']!r}")
    _follow_added_tokens(backend, settings, path, {token.content for token in backend.get_added_tokens_decoder().values()})


def _follow_added_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path, known: set[str]) -> None:
    decoder, extra = settings.get("added_tokens_decoder") or {}, settings.get("additional_special_tokens") or []
    if not isinstance(decoder, dict) or not isinstance(extra, list):
        raise InputError(f"{path}: added_tokens_decoder must be an object and additional_special_tokens a list")
    for token in [*decoder.values(), *extra]:
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            raise InputError(f"{path}: an added token must be text, got {token!r}")
        if content in known:
            continue
        if backend.token_to_id(content) is None:
            raise InputError(f"{path}: the token {content!r} is not in tokenizer.json; save the tokenizer again with transformers")
        given = token if isinstance(token, dict) else {}
        flags = {key: given[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if key in given}
        backend.add_special_tokens([AddedToken(content, special=True, **flags)])
