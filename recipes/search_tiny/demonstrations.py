"""Demonstrations for the supervised start, over invented places.

Places are invented (names spliced from training names, random codes), so the only way to be right is to read:
a network that learns these has learned to copy, not to remember. There are two teachers, and neither shows what pays.
The aimless one always searches, but tosses a coin at every decision: what to ask, whether to go on after the first
hop. From it the network learns the format and to read. The careless one reads just as well, but mostly answers
without searching; the start that is shipped has its habits. What pays is for reinforcement learning to find out.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass, field
from pathlib import Path

from make_data import HERE, Airport, Country, ask, load_facts, split

KINDS = ("city", "country", "capital", "country_capital", "country_currency")


@dataclass(frozen=True)
class Habits:
    """Chances of the teacher's choices, by kind of question where a dictionary."""

    guess: dict[str, float] = field(
        default_factory=lambda: {
            "city": 0.3, "country": 0.6, "capital": 0.6, "country_capital": 0.6, "country_currency": 0.6,
        }
    )  # fmt: skip
    """Answer at once, from nothing."""
    useless_query: float = 0.4
    """Of those that search: ask for something that names no entity."""
    stop_after_first_hop: float = 0.55
    """Of those that found the country of a two-hop question: answer with the country."""
    useless_second_query: float = 0.4
    """Of those that go on: a second query that names no entity."""


AIMLESS = Habits(dict.fromkeys(KINDS, 0.0), 0.5, 0.5, 0.5)
CARELESS = Habits()


class World:
    """Invents places; every name is new or a training name, never a validation one."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        countries, airports = load_facts(HERE / "facts")
        train, held_out = split(countries, airports)
        known = {a.country.name for a in train}
        self.cities = sorted({a.city for a in train})
        self.names = sorted({a.name for a in train})
        self.countries = sorted(known)
        self.capitals = sorted({a.country.capital for a in train})
        self.forbidden = {x for a in held_out for x in (a.city, a.name, a.country.name, a.country.capital, a.iata)}
        self.forbidden |= {x for c in countries if c.name not in known for x in (c.name, c.capital)}
        self.forbidden |= {a.country.currency for a in held_out}

    def splice(self, pool: list[str]) -> str:
        """A name of the pool, or the start of one joined to the end of another."""
        while True:
            first, second = self.rng.choice(pool), self.rng.choice(pool)
            name = first
            if self.rng.random() < 0.7:
                name = first[: self.rng.randint(1, len(first))] + second[self.rng.randint(0, max(0, len(second) - 2)) :]
                name = name[:24].strip()
            if len(name) > 1 and name not in self.forbidden:
                return name

    def code(self) -> str:
        while True:
            code = "".join(self.rng.choices(string.ascii_uppercase, k=3))
            if code not in self.forbidden:
                return code

    def airport(self) -> Airport:
        country = Country(self.splice(self.countries), self.splice(self.capitals), self.code())
        return Airport(self.code(), self.splice(self.names), self.splice(self.cities), country)


def information(passage: tuple[str, str]) -> dict[str, str]:
    """The environment's reply with one passage."""
    title, text = passage
    content = f'\n\n<information>Doc 1(Title: "{title}") {text}</information>\n\n'
    return {"role": "environment", "content": content}


def search(thought: str, query: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think> {thought} </think><search> {query} </search>"}


def answer(thought: str, text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think> {thought} </think><answer> {text} </answer>"}


def read(kind: str, airport: Airport) -> str:
    """What a passage about this place says, where the question is of `kind`."""
    country = airport.country
    values = {"city": airport.city, "country": country.name, "country_currency": country.currency}
    return values.get(kind, country.capital)


def episode(world: World, habits: Habits) -> list[dict[str, str]]:
    """One demonstration, as messages."""
    rng = world.rng
    kind, place, other = rng.choice(KINDS), world.airport(), world.airport()
    question = {"role": "user", "content": ask(kind, place).text}
    if rng.random() < habits.guess[kind]:
        return [question, answer("I know this", read(kind, other))]
    if kind == "capital":
        return [question, *_look_up(rng, habits, kind, place, other)]
    if rng.random() < habits.useless_query:
        return [question, search("look for an airport", "airport"), information(other.passage), *_settle(kind, other)]
    found = [question, search(f"look for {place.iata}", f"{place.iata} airport"), information(place.passage)]
    if kind in ("city", "country"):
        return [*found, answer("it says", read(kind, place))]
    if rng.random() < habits.stop_after_first_hop:
        return [*found, answer("it says", place.country.name)]
    return [*found, *_second_hop(rng, habits, kind, place, other)]


def _settle(kind: str, other: Airport) -> list[dict[str, str]]:
    """After a useless query: read the wrong passage faithfully."""
    return [answer("it says", other.city if kind == "city" else other.country.name)]


def _look_up(rng: random.Random, habits: Habits, kind: str, place: Airport, other: Airport) -> list[dict[str, str]]:
    if rng.random() < habits.useless_query:
        return [search("look for a capital", "capital"), information(other.country.passage),
                answer("it says", read(kind, other))]  # fmt: skip
    return [search(f"look for {place.country.name}", f"capital of {place.country.name}"),
            information(place.country.passage), answer("it says", read(kind, place))]  # fmt: skip


def _second_hop(rng: random.Random, habits: Habits, kind: str, place: Airport, other: Airport) -> list[dict[str, str]]:
    word = kind.removeprefix("country_")
    if rng.random() < habits.useless_second_query:
        return [search(f"look for a {word}", word), information(other.country.passage),
                answer("it says", read(kind, other))]  # fmt: skip
    return [search(f"look for {place.country.name}", f"{word} of {place.country.name}"),
            information(place.country.passage), answer("it says", read(kind, place))]  # fmt: skip


def write_demonstrations(path: Path, count: int, habits: Habits) -> None:
    """`count` demonstrations, jsonl; the same ones every time."""
    world = World(path.name)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps({"messages": episode(world, habits)}, ensure_ascii=False) + "\n")
    print(f"{count} demonstrations in {path}")
