"""Search: the policy thinks, queries a retriever, reads the reply, and answers (the format of Search-R1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spaniel.envs.base import Action, Reply, Step
from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage, Retriever
from spaniel.types import Failure, Message, Prompt

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"<(?=/?(?:think|search|information|answer)>)")
_MAX_QUERY = 1_000

CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_OPENING, _CLOSING = "\n\n<information>", "</information>\n\n"


class SearchEnv:
    """At most `max_turns` search turns; then one last turn may only answer.

    `on_retriever_failure`: `reply` tells the policy that the search failed and goes on; `end` ends the episode
    as an environment error. Both are counted.
    """

    stop = ("</search>", "</answer>")

    def __init__(
        self, retriever: Retriever, *, topk: int = 3, max_turns: int = 4, on_retriever_failure: str = "reply"
    ) -> None:
        if topk < 1 or max_turns < 1:
            raise BadInput(f"env: topk {topk}, max_turns {max_turns}; expected 1 or more of each")
        if on_retriever_failure not in ("reply", "end"):
            raise BadInput(f"env.on_retriever_failure: {on_retriever_failure!r}; expected reply or end")
        self.retriever = retriever
        self.topk = topk
        self.search_turns = max_turns
        self.end_on_failure = on_retriever_failure == "end"

    @property
    def max_turns(self) -> int:
        """Search turns and the last one, which may only answer."""
        return self.search_turns + 1

    def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    def step(self, actions: Sequence[Action]) -> list[Step]:
        """One step of each episode; all their queries go to the retriever in one call."""
        parsed = [parse_action(action.text) for action in actions]
        wanted = [i for i, (kind, _) in enumerate(parsed) if kind == "search" and not self._last(actions[i])]
        found = self._search([parsed[i][1] for i in wanted])
        replies: dict[int, list[Passage] | Failure] = dict(zip(wanted, found, strict=True))
        return [self._step(actions[i], parsed[i][0], replies.get(i)) for i in range(len(actions))]

    def _last(self, action: Action) -> bool:
        return action.turn >= self.search_turns

    def _step(self, action: Action, kind: str, found: list[Passage] | Failure | None) -> Step:
        if kind == "answer":
            return Step("answer", None, done=True)
        if self._last(action):
            # Too late to search: the turn was for an answer only, so anything else is no valid action.
            return Step("invalid", None, done=True)
        if found is None:
            return Step("invalid", Reply(closing=CORRECTION), done=False)
        if isinstance(found, Failure):
            reply = Reply(_OPENING, "The search failed; no documents are available.", _CLOSING)
            return Step("search", reply, done=False, failure=found, fatal=self.end_on_failure)
        return Step("search", Reply(_OPENING, passages_text(found), _CLOSING), done=False)

    def _search(self, queries: list[str]) -> Sequence[list[Passage] | Failure]:
        if not queries:
            return []
        try:
            found = self.retriever.search(queries, self.topk)
            if len(found) != len(queries):
                raise ValueError(f"{len(found)} results for {len(queries)} queries")
        except Exception as error:  # the retriever boundary: recorded with each search, never an empty result
            return [Failure("retriever", f"{type(error).__name__}: {error}")] * len(queries)
        return found


def parse_action(text: str) -> tuple[str, str]:
    """The first complete action of a turn: ("search", query), ("answer", text) or ("invalid", "").

    Which one closes first decides. An empty query is no action.
    """
    found = min(_ACTION.finditer(text), key=lambda match: match.end(), default=None)
    if found is None:
        return "invalid", ""
    content = found[2].strip()
    if found[1] == "search":
        return ("search", content[:_MAX_QUERY]) if content else ("invalid", "")
    return "answer", content


def passages_text(passages: Sequence[Passage]) -> str:
    """`Doc 1(Title: ...) text` a line, as Search-R1 shows them.

    Tags of the format inside a passage lose their `<`: a passage must not be able to close the information
    block or to look like an action, whoever reads it.
    """
    if not passages:
        return "No documents were found."
    lines = [f"Doc {i}(Title: {p.title.strip()}) {p.text.strip()}" for i, p in enumerate(passages, 1)]
    return _TAG.sub("‹", "\n".join(lines))
