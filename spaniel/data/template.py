"""Text and token ids: the only place where text becomes ids, and ids text.

One `Template` serves training, rollouts, validation, supervised learning and chat, so that the same text has
the same ids everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spaniel.errors import BadInput
from spaniel.types import Message


class Template:
    """A tokenizer with its chat template.

    `eos_ids`: the tokens that end a completion (chat models have several; `more_eos` names those beside the
    tokenizer's own). `pad_id` fills tensors behind `lengths` and is never looked at.
    """

    def __init__(self, tokenizer: Any, name: str = "tokenizer", more_eos: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.name = name
        eos = tokenizer.eos_token_id
        if eos is None:
            raise BadInput(f"tokenizer {name}: has no eos token; expected one, so that the policy can end its turn")
        self.eos_ids: frozenset[int] = frozenset([int(eos), *more_eos])
        self.eos_id = int(eos)
        self.pad_id = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos)
        self._pieces: dict[int, str] = {}
        self._encoded: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.tokenizer)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a prompt, ending where the policy is to speak.

        A tokenizer without a chat template (a base model) gets the contents joined by line ends.
        """
        if self.tokenizer.chat_template:
            chat = [dict(message) for message in messages]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            # The template writes its own BOS where the model wants one; adding specials again would double it.
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        if not ids:
            raise BadInput(f"tokenizer {self.name}: renders {list(messages)!r} to no token at all")
        return tuple(ids)

    def judged(self, messages: Sequence[Message], response: str) -> tuple[int, ...]:
        """Ids of a prompt, a response and the end token: what a reward model reads in training, evaluation and RL.

        They are those that the policy itself would have written after this prompt. Without messages the response
        stands alone.
        """
        before = self.render(messages) if messages else tuple(self.tokenizer("")["input_ids"])
        if before and before[-1] in self.eos_ids and not messages:
            before = before[:-1]  # a tokenizer that closes every text
        return (*before, *self.encode(response), self.eos_id)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text that the world appends. Names of special tokens in it are text, not control."""
        found = self._encoded.get(text)
        if found is None:
            found = tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
            if len(self._encoded) > 50_000:  # passages repeat a lot within a run; the memory stays bounded
                self._encoded.clear()
            self._encoded[text] = found
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, nothing cleaned up."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids without the special tokens (what an environment or a reward reads)."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str:
        """Text of one token by itself."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.decode([token])
        return found

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer files into a model folder."""
        self.tokenizer.save_pretrained(str(folder))


def load_template(folder: str | Path) -> Template:
    """The tokenizer of a Hugging Face folder."""
    from transformers import AutoTokenizer

    path = Path(folder)
    if not path.is_dir():
        raise BadInput(f"tokenizer folder {path}: not found; expected a Hugging Face folder with tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"tokenizer folder {path}: cannot be loaded: {error}") from error
    return Template(tokenizer, str(path), _generation_eos(path))


def _generation_eos(folder: Path) -> list[int]:
    """The end tokens that the model's generation_config.json lists, if it has one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    listed = found if isinstance(found, list) else [found]
    return [int(token) for token in listed if token is not None]


def wrap_tokenizer(tokenizer: Any, *, eos: str, pad: str, chat_template: str) -> Any:
    """A `tokenizers.Tokenizer` as a transformers one, which a Hugging Face folder can hold."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=chat_template
    )
