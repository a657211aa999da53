"""Structure of an episode: think -> (search -> information -> think)* -> answer, only white space between."""

from __future__ import annotations

import re

from spaniel.rewards.base import Transcript

_BLOCKS = re.compile(r"\s*<(think|search|answer)>(?:(?!</?(?:think|search|answer|information)>).)*?</\1>", re.DOTALL)
_INFORMATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)
_NEXT = {"start": {"think"}, "think": {"search", "answer"}, "search": {"information"}, "information": {"think"}}


def well_structured(transcript: Transcript) -> bool:
    """Whether the response has the structure. Blocks of the policy count only in its own spans, the information
    block only in the world's: who wrote a span is known, so no marker has to be looked for."""
    state = "start"
    for by_policy, text in transcript.response:
        for block in _policy_blocks(text) if by_policy else _world_blocks(text):
            if block not in _NEXT.get(state, set()):
                return False
            state = block
    return state == "answer"


def _policy_blocks(text: str) -> list[str]:
    """Names of the blocks in a turn; `other` for anything else than white space between or after them."""
    blocks, at = [], 0
    while match := _BLOCKS.match(text, at):
        blocks.append(match[1])
        at = match.end()
    return blocks if not text[at:].strip() else [*blocks, "other"]


def _world_blocks(text: str) -> list[str]:
    return ["information"] if _INFORMATION.fullmatch(text) else ["other"]


def retrieved(transcript: Transcript) -> list[str]:
    """What the world gave back to each search."""
    found = [_INFORMATION.fullmatch(text) for by_policy, text in transcript.response if not by_policy]
    return [match[1] for match in found if match]
