"""A tokenizer that a person can read: one id a character, tags and the end token single ids."""

from __future__ import annotations

from collections.abc import Sequence

from spaniel.types import Message

TAGS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")


class CharTemplate:
    """Ids: 0 end, 1 pad, 2.. the tags, then code points shifted by 100."""

    eos_id, pad_id = 0, 1
    eos_ids = frozenset([0])

    def __len__(self) -> int:
        return 100 + 0x110000

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def encode(self, text: str) -> tuple[int, ...]:
        out: list[int] = []
        at = 0
        while at < len(text):
            tag = next((t for t in TAGS if text.startswith(t, at)), None)
            out.append(2 + TAGS.index(tag) if tag else 100 + ord(text[at]))
            at += len(tag) if tag else 1
        return tuple(out)

    def piece(self, token: int) -> str:
        if token < 2:
            return ("<|end|>", "<|pad|>")[token]
        return TAGS[token - 2] if token < 100 else chr(token - 100)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.piece(token) for token in ids)

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.piece(token) for token in ids if token > 1)
