"""A byte-level BPE tokenizer trained on a corpus, for networks trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spaniel.data.template import Template, wrap_tokenizer
from spaniel.errors import BadInput
from spaniel.types import InputPath

TAGS = (
    "<think>", "</think>", "<search>", "</search>",
    "<information>", "</information>", "<answer>", "</answer>",
)  # fmt: skip
PAD, EOS, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class NewTokenizer:
    """Byte-level BPE (Sennrich et al. 2016) of `vocab_size` entries, trained on the contents of a corpus and on the
    demonstrations (all that the network will read and write); or one token for each of `characters`.

    The tags of the search format are single tokens; they are plain text, not special tokens.
    """

    corpus: InputPath | None = None
    vocab_size: int = 1024
    characters: str = ""

    def __post_init__(self) -> None:
        if bool(self.characters) == (self.corpus is not None):
            raise BadInput(
                f"tokenizer: corpus {self.corpus!r} and characters {self.characters!r}; expected exactly one of them"
            )
        if self.characters:
            if len(set(self.characters)) < len(self.characters):
                raise BadInput(f"tokenizer.characters: {self.characters!r}; expected each character once")
            return
        least = 256 + len(TAGS) + 5
        if self.vocab_size < least:
            raise BadInput(
                f"tokenizer.vocab_size: {self.vocab_size}; expected at least {least}: 256 bytes, the tags, the specials"
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Template:
    """Train on `texts`; the same texts give the same tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, EOS, USER, ASSISTANT, "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return Template(wrap_tokenizer(tokenizer, eos=EOS, pad=PAD, chat_template=CHAT_TEMPLATE), "new tokenizer")


def character_tokenizer(characters: str) -> Template:
    """One token a character and nothing else: no chat template, anything unknown is one unknown token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    specials = [PAD, EOS, UNKNOWN]
    vocabulary = {piece: number for number, piece in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    return Template(wrap_tokenizer(tokenizer, eos=EOS, pad=PAD, chat_template=""), "new tokenizer")
