"""Corpus, questions and demonstrations of the tiny search task, from real facts; the same output every time.

    python recipes/search_tiny/make_data.py                  # corpus.jsonl, train.parquet, validation.parquet
    python recipes/search_tiny/make_data.py --demos 100000    # also demos*.jsonl, for the supervised start

Passages state where airports are and what capitals and currencies countries have. Questions are split by
entity: countries first, airports with their country; validation asks only about countries and airports that no
training question and no demonstration mentions, so that their answers can only come from searching.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
# Names of plain words: a comma, a slash or a bracket would make the answer ambiguous.
PLAIN = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*")
PER_COUNTRY = 25
VALIDATION_SHARE = 0.2
TRAIN_QUESTIONS = 2000
VALIDATION_QUESTIONS = {"city": 60, "country": 60, "capital": 40, "country_capital": 80, "country_currency": 60}
HOPS = {"city": 1, "country": 1, "capital": 1, "country_capital": 2, "country_currency": 2}


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    currency: str

    @property
    def passage(self) -> tuple[str, str]:
        """Title and text."""
        return self.name, (
            f"The capital of {self.name} is {self.capital}. The currency of {self.name} is {self.currency}."
        )


@dataclass(frozen=True)
class Airport:
    iata: str
    name: str
    city: str
    country: Country

    @property
    def passage(self) -> tuple[str, str]:
        return f"{self.name} ({self.iata})", f"{self.iata} is the airport of {self.city} in {self.country.name}."


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


def ask(kind: str, airport: Airport) -> Question:
    """A question of `kind` about the airport or its country."""
    country, code = airport.country, airport.iata
    texts = {
        "city": (f"Which city does {code} airport serve?", airport.city),
        "country": (f"In which country is {code} airport?", country.name),
        "capital": (f"What is the capital of {country.name}?", country.capital),
        "country_capital": (f"What is the capital of the country of {code} airport?", country.capital),
        "country_currency": (f"What is the currency of the country of {code} airport?", country.currency),
    }
    return Question(kind, *texts[kind])


def load_facts(folder: Path) -> tuple[list[Country], list[Airport]]:
    """The facts that can be asked about without ambiguity, at most `PER_COUNTRY` airports a country."""
    raw = json.loads((folder / "countries.json").read_text(encoding="utf-8"))
    countries = {
        code: Country(c["name"], c["capital"], c["currencycode"])
        for code, c in sorted(raw.items())
        if c["currencycode"] and PLAIN.fullmatch(c["name"]) and PLAIN.fullmatch(c["capital"])
    }
    with open(folder / "airports.csv", encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["country"] in countries]
    rows = [r for r in rows if "Airport" not in r["city"]]
    rows = [r for r in rows if PLAIN.fullmatch(r["city"]) and len(r["city"]) <= 20 and 0 < len(r["name"]) <= 40]
    # A code that is also a word of some passage (THE, AND) could not be searched for.
    words = Counter(w for r in rows for w in re.findall(r"\w+", f"{r['name']} {r['city']}".lower()))
    words += Counter(w for c in countries.values() for w in re.findall(r"\w+", " ".join(c.passage).lower()))
    words.update(["is", "the", "airport", "of", "in"])
    rows = sorted((r for r in rows if r["iata"].lower() not in words), key=lambda r: r["iata"])
    random.Random("airports").shuffle(rows)
    taken: Counter[str] = Counter()
    airports = []
    for row in rows:
        taken[row["country"]] += 1
        if taken[row["country"]] <= PER_COUNTRY:
            airports.append(Airport(row["iata"], row["name"], row["city"], countries[row["country"]]))
    return list(countries.values()), sorted(airports, key=lambda a: a.iata)


def split(countries: list[Country], airports: list[Airport]) -> tuple[list[Airport], list[Airport]]:
    """Training and validation airports; no country is on both sides."""
    order = sorted(countries, key=lambda c: c.name)
    random.Random("countries").shuffle(order)
    held_out = set(order[: round(VALIDATION_SHARE * len(order))])
    return [a for a in airports if a.country not in held_out], [a for a in airports if a.country in held_out]


def askable(kind: str, airport: Airport, others: list[Airport]) -> bool:
    """A currency that also a country of the other side has could be answered from memory."""
    return kind != "country_currency" or all(airport.country.currency != a.country.currency for a in others)


def questions(airports: list[Airport], others: list[Airport], counts: dict[str, int], name: str) -> list[Question]:
    """`counts[kind]` distinct questions of each kind, in a fixed random order."""
    rng = random.Random(f"questions {name}")
    out: list[Question] = []
    for kind, count in counts.items():
        pool = [a for a in airports if askable(kind, a, others)]
        distinct = list(dict.fromkeys(ask(kind, a) for a in rng.sample(pool, len(pool))))
        out += distinct[:count]
    rng.shuffle(out)
    return out


def rows(asked: list[Question], split_name: str) -> pa.Table:
    """The questions in the verl / Search-R1 schema."""
    return pa.Table.from_pylist([
        {
            "data_source": f"airports_{HOPS[q.kind]}hop",
            "prompt": [{"role": "user", "content": q.text}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [q.answer]}},
            "extra_info": {"split": split_name, "index": i, "kind": q.kind, "hops": HOPS[q.kind]},
        }
        for i, q in enumerate(asked)
    ])  # fmt: skip


def write_data(out: Path) -> None:
    """corpus.jsonl, train.parquet, validation.parquet."""
    countries, airports = load_facts(HERE / "facts")
    train, validation = split(countries, airports)
    passages = [c.passage for c in countries] + [a.passage for a in airports]
    with open(out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for number, (title, text) in enumerate(passages):
            row = {"id": str(number), "contents": f'"{title}"\n{text}'}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    counts = {
        kind: TRAIN_QUESTIONS * n // sum(VALIDATION_QUESTIONS.values()) for kind, n in VALIDATION_QUESTIONS.items()
    }
    asked = questions(train, validation, counts, "train")
    held_out = questions(validation, train, VALIDATION_QUESTIONS, "validation")
    pq.write_table(rows(asked, "train"), out / "train.parquet")
    pq.write_table(rows(held_out, "validation"), out / "validation.parquet")
    print(f"{len(passages)} passages, {len(asked)} training and {len(held_out)} validation questions in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (default: beside this script)")
    parser.add_argument("--demos", type=int, default=0, help="also write this many demonstrations")
    arguments = parser.parse_args()
    write_data(arguments.out)
    if arguments.demos:
        from demonstrations import AIMLESS, CARELESS, write_demonstrations

        write_demonstrations(arguments.out / "demos_aimless.jsonl", arguments.demos, AIMLESS)
        write_demonstrations(arguments.out / "demos_held_out.jsonl", max(1, arguments.demos // 100), AIMLESS)
        write_demonstrations(arguments.out / "demos_careless.jsonl", max(1, arguments.demos // 5), CARELESS)


if __name__ == "__main__":
    main()
