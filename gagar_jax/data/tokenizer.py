"""Text to ids and back: a byte-level BPE shaped for code windows such as `12|    if x:`.

Special ids mark the structure of a conversation (rollout/episode.py puts them in). They are ids and
nothing else: no text, whatever it says, encodes to one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from gagar_jax.types import UserError

PAD = 0
BOS = 1
ACT = 2  # the model's turn starts
OBS = 3  # an observation follows
END = 4  # ends the model's turn
SPECIALS = ("<|pad|>", "<|bos|>", "<|act|>", "<|obs|>", "<|end|>")

# In order of preference: a newline; the bar after a line number; indentation; two digits; a word with its
# space and leading underscores; punctuation with its space; any other white space.
_PIECES = Regex(r"\n|\||[ ]{2,}|\t+|\d{1,2}| ?_*\p{L}+| ?(?:[^\s\p{L}\d|_]|_(?!_*\p{L}))+|\s")
_DIGIT_PAIRS = [(tens, ones) for tens in "0123456789" for ones in "0123456789"]
_SMALLEST = len(SPECIALS) + 256 + len(_DIGIT_PAIRS)


class Tokenizer:
    """Byte-level BPE. `decode(encode(text)) == text` for every text that UTF-8 can hold."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learns merges from texts; the same texts give the same tokenizer, byte for byte.

        Every byte, every run of two digits and the five specials have an id whatever the texts hold.

        Args:
          texts: the corpus.
          vocab_size: ids in all, specials included; fewer come out where the corpus is small.

        Raises:
          UserError: `vocab_size` has no room for what every tokenizer holds.
        """
        if vocab_size < _SMALLEST:
            raise UserError(
                f"model.vocab_size is {vocab_size}; specials, bytes and two-digit numbers need {_SMALLEST}."
            )
        # Rayon's threads would make every later fork of this process print a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend = _backend(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        learned = [(left, right) for left, right in json.loads(backend.to_str())["model"]["merges"]]
        return cls(_backend(_with_digit_pairs(learned, vocab_size)))

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, never a special one. What UTF-8 cannot hold (a lone surrogate) becomes `?`."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        return self._backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, specials left out. Bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self._backend.decode([i for i in ids if i >= len(SPECIALS)], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Writes the usual `tokenizer.json` in one step: a reader finds the old file or the new one."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(self._backend.to_str(), encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads what `save` wrote.

        Raises:
          UserError: the file is missing or is no tokenizer of this package.
        """
        try:
            text = path.read_text(encoding="utf-8")
            vocabulary = json.loads(text)["model"]["vocab"]
            if [vocabulary.get(name) for name in SPECIALS] != list(range(len(SPECIALS))):
                raise UserError(f"{path}: ids 0 to {len(SPECIALS) - 1} are not {', '.join(SPECIALS)}")
        except FileNotFoundError:
            raise UserError(f"{path}: no such tokenizer file") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a tokenizer file ({error}); remove it to train another") from error
        return cls(Backend.from_str(text))


def _backend(model: models.BPE) -> Backend:
    backend = Backend(model)
    pieces = pre_tokenizers.Split(_PIECES, behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _with_digit_pairs(learned: list[tuple[str, str]], vocab_size: int) -> models.BPE:
    """All hundred digit pairs first, then as many learned merges as fit.

    Merges are learned in order and build only on earlier ones, so the last can be dropped; a digit pair
    builds on nothing, and nothing builds on it, because no piece holds more than two digits.
    """
    vocabulary = {name: i for i, name in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for merge in dict.fromkeys(_DIGIT_PAIRS + learned):
        name = "".join(merge)
        if name not in vocabulary:
            if len(vocabulary) == vocab_size:
                break
            vocabulary[name] = len(vocabulary)  # two merges may make the same piece
        merges.append(merge)
    return models.BPE(vocab=vocabulary, merges=merges)
