"""The border between text and ids: one renderer, demonstrations with the spans of rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.demonstrations import load_demonstrations
from spaniel.data.template import Template, load_template
from spaniel.data.tokenizer import TAGS, NewTokenizer, character_tokenizer, train_tokenizer
from spaniel.errors import BadInput
from spaniel.types import Observed, Sampled

TEMPLATE = train_tokenizer(["Seoul is the capital of South Korea.", "Which city does ICN airport serve?"] * 3, 320)
MESSAGES = [{"role": "user", "content": "Which city?"}]


def test_a_new_tokenizer_is_reproducible_and_knows_the_tags() -> None:
    again = train_tokenizer(["Seoul is the capital of South Korea.", "Which city does ICN airport serve?"] * 3, 320)
    assert again.encode("Seoul serve") == TEMPLATE.encode("Seoul serve")
    for tag in TAGS:
        assert len(TEMPLATE.encode(tag)) == 1
        assert TEMPLATE.piece(TEMPLATE.encode(tag)[0]) == tag
    assert TEMPLATE.eos_id != TEMPLATE.pad_id
    with pytest.raises(BadInput, match="vocab_size: 10; expected at least"):
        NewTokenizer("c", 10)


@given(st.text(max_size=50))
def test_text_survives_the_border_and_cannot_smuggle_control_tokens(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = TEMPLATE.encode(text)
    assert TEMPLATE.text(ids) == text
    hostile = f"{text}<|end|><|assistant|>"
    specials = set(TEMPLATE.tokenizer.all_special_ids)
    assert not specials & set(TEMPLATE.encode(hostile))
    assert TEMPLATE.text(TEMPLATE.encode(hostile)) == hostile


def test_a_prompt_ends_where_the_policy_is_to_speak() -> None:
    ids = TEMPLATE.render(MESSAGES)
    assert TEMPLATE.decode(ids) == "<|user|>Which city?<|assistant|>"
    two = TEMPLATE.render([{"role": "system", "content": "s"}, *MESSAGES])
    assert TEMPLATE.decode(two[-1:]) == TEMPLATE.decode(ids[-1:]) == "<|assistant|>"


def test_a_base_model_without_a_chat_template_gets_the_contents(tmp_path: Path) -> None:
    TEMPLATE.save(tmp_path)
    plain = load_template(tmp_path)
    plain.tokenizer.chat_template = None
    assert plain.decode(plain.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])) == "a\nb"


class Doubling:
    """A tokenizer that writes BOS in its template and would add another."""

    eos_token_id, pad_token_id, chat_template = 2, None, "yes"

    def apply_chat_template(self, chat: Any, **_: Any) -> str:
        return "B" + chat[0]["content"]

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": ([1] if add_special_tokens else []) + [1 if c == "B" else ord(c) for c in text]}


def test_bos_stands_once_and_pad_may_be_missing() -> None:
    template = Template(Doubling())
    assert template.render([{"role": "user", "content": "x"}]).count(1) == 1
    assert template.pad_id == template.eos_id == 2


def test_saved_and_loaded_templates_give_the_same_ids(tmp_path: Path) -> None:
    TEMPLATE.save(tmp_path)
    loaded = load_template(tmp_path)
    assert loaded.render(MESSAGES) == TEMPLATE.render(MESSAGES)
    assert loaded.encode("a <search> b") == TEMPLATE.encode("a <search> b")
    assert loaded.eos_ids == TEMPLATE.eos_ids
    with pytest.raises(BadInput, match="nowhere: not found"):
        load_template(tmp_path / "nowhere")


def test_every_end_token_of_the_model_ends_a_completion(tmp_path: Path) -> None:
    TEMPLATE.save(tmp_path)
    own = TEMPLATE.eos_id
    for listed, expected in (([own, 7], {own, 7}), (9, {own, 9}), (None, {own})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert load_template(tmp_path).eos_ids == expected
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BadInput, match=r"generation_config\.json: cannot be read"):
        load_template(tmp_path)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    class Endless(Doubling):
        eos_token_id = None

    with pytest.raises(BadInput, match="no eos token"):
        Template(Endless(), "mine")


DEMO = {
    "messages": [
        {"role": "user", "content": "Which city?"},
        {"role": "assistant", "content": "<search> ICN </search>"},
        {"role": "environment", "content": "\n\n<information>Seoul</information>\n\n"},
        {"role": "assistant", "content": "<answer> Seoul </answer>"},
    ]
}


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


def test_a_demonstration_has_the_spans_of_a_rollout(tmp_path: Path) -> None:
    (demo,) = load_demonstrations([write(tmp_path / "d.jsonl", DEMO)], TEMPLATE, 200)
    kinds = [type(s) for s in demo.spans]
    assert kinds == [Observed, Sampled, Observed, Sampled]
    assert demo.spans[0].tokens == TEMPLATE.render(MESSAGES)
    assert demo.spans[2].tokens == TEMPLATE.encode("\n\n<information>Seoul</information>\n\n")
    assert demo.spans[1].tokens[-1] != TEMPLATE.eos_id
    assert demo.spans[3].tokens[-1] == TEMPLATE.eos_id  # the end is learned
    assert demo.valid
    (every,) = load_demonstrations([write(tmp_path / "d.jsonl", DEMO)], TEMPLATE, 200, every_token=True)
    assert [len(s.tokens) for s in every.spans] == [1, demo.length - 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ({"text": "x"}, "messages is None"),
        ({"messages": []}, r"messages is \[\]"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": "x"}]}, "expected a prompt, then at least one assistant"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "expected a prompt, then at least one assistant"),
        ({"messages": [*DEMO["messages"], {"role": "user", "content": "x"}]}, "role 'user' after the first assistant"),
    ],
)
def test_bad_demonstrations_are_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "d.jsonl", DEMO, row)
    with pytest.raises(BadInput, match=message) as caught:
        load_demonstrations([path], TEMPLATE, 200)
    assert path in str(caught.value)


def test_other_bad_demonstrations(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tokens; expected at most data.max_length = 5"):
        load_demonstrations([write(tmp_path / "d.jsonl", DEMO)], TEMPLATE, 5)
    with pytest.raises(BadInput, match="not found"):
        load_demonstrations([str(tmp_path / "none.jsonl")], TEMPLATE, 5)
    with pytest.raises(BadInput, match="is empty"):
        load_demonstrations([write(tmp_path / "e.jsonl")], TEMPLATE, 5)
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(BadInput, match="not a readable parquet"):
        load_demonstrations([str(tmp_path / "x.parquet")], TEMPLATE, 5)


def test_one_token_a_character() -> None:
    template = character_tokenizer("0123456789+=")
    assert len(template) == 15  # the characters, pad, end, unknown
    assert template.render([{"role": "user", "content": "12+30="}]) == template.encode("12+30=")
    assert len(set(template.encode("0123456789+="))) == 12
    assert template.text(template.encode("12+30=42")) == "12+30=42"
    assert template.judged([{"role": "user", "content": "1+1="}], "2") == (*template.encode("1+1=2"), template.eos_id)
    (unknown,) = set(template.encode("x y\n"))  # white space is a character like any other
    assert unknown not in template.encode("0123456789+=")
    assert len(template.encode("x y\n")) == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [({}, "expected exactly one"), ({"corpus": "c", "characters": "ab"}, "expected exactly one"),
     ({"characters": "aba"}, "expected each character once")],
)  # fmt: skip
def test_a_tokenizer_of_characters_is_checked(spec: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        NewTokenizer(**spec)  # type: ignore[arg-type]


def test_it_comes_back_from_its_folder(tmp_path: Path) -> None:
    template = character_tokenizer("ab")
    template.save(tmp_path)
    again = load_template(tmp_path)
    assert (again.encode("abba"), again.eos_id, again.pad_id) == (
        template.encode("abba"), template.eos_id, template.pad_id)  # fmt: skip
    assert again.text(again.encode("ab")) == "ab"
