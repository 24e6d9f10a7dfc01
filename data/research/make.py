# ruff: noqa: SIM905 (lists of words read best as text)
"""Writes the corpus of the research agent again, byte for byte: `python data/research/make.py [FOLDER]`.

Everything in it is invented: people, towns, companies, ships and books, a page for each. Entities fall into two sets
that never mention each other; training questions are about one, the exam about the other.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

SIZES = {  # of the set for training and of the set for the exam
    "person": (220, 80), "town": (40, 16), "company": (40, 16), "ship": (70, 26), "book": (70, 26),
}  # fmt: skip
QUESTIONS = (2000, 500)
HOPS = (1, 2, 3, 4)
SEARCHES = {"ship": "ship captain {}", "book": "book author {}"}

FIRST = """Ada Anton Bela Boris Clara Cyril Dora Edgar Elsa Emil Fanny Felix Greta Gustav Hanna Hugo Ilse Ivan Jana
Jonas Karla Kurt Lena Ludo Marta Milan Nora Oskar Paula Petra Ralf Rosa Simon Stella Thea Tomas Vera Viktor Wanda
Xaver""".split()
LAST = """Abel Bauer Croft Dahl Eller Frost Gray Hahn Irwin Jansen Keller Lund Marsh Nagel Olsen Pratt Quist Reed Sauer
Thorn Ulmer Vogt Weber Yates Zander""".split()
TOWN = ("Ash Birch Cold Deep Elm Fern Gold High Long Mill Oak Stone".split(),
        "brook dale field ford gate ham haven mouth ridge stead well wick".split())  # fmt: skip
COMPANY = ("Amber Bronze Copper Crystal Iron Ivory Jade Marble Pearl Ruby".split(),
           "Anvil Bell Compass Kettle Lantern Loom Needle Wheel".split())  # fmt: skip
SHIP = ("Bold Brave Calm Fair Gentle Merry Noble Proud Quick Silent Swift Wild".split(),
        "Gull Heron Kestrel Osprey Otter Petrel Puffin Seal Tern Wren".split())  # fmt: skip
BOOK = ("Broken Burning Distant Empty Frozen Hidden Hollow Last Lost Paper Secret Velvet".split(),
        "Bridge Candle Door Garden Island Letter Mirror Orchard River Tower".split())  # fmt: skip
THINGS = {
    "job": "baker brewer carpenter doctor farmer gardener glazier mason miller painter tailor teacher weaver".split(),
    "pet": "canary cat donkey goat goose hen parrot pony rabbit spaniel tortoise turtle".split(),
    "river": "Arrow Bourne Calder Dove Esk Fleet Glen Isla Kenn Lark Mole Nene Otter Severn Tamar Wye".split(),
    "product": "bells boots bricks candles carpets clocks glass hats knives lamps paper ropes soap violins".split(),
    "colour": "black blue brown gray green orange red white yellow".split(),
    "year": list(map(str, range(1801, 1990))),
}
# What a page tells of its subject: another entity's kind, or a thing; and two ways to say it.
RELATIONS = {
    "person": {
        "town": ("town", "Home is the town {}.", "The town {} is home."),
        "employer": ("company", "The employer is {}.", "The firm {} is the employer."),
        "boss": ("person", "The boss is {}.", "{} is the boss."),
        "friend": ("person", "An old friend is {}.", "{} is a good friend."),
        "cousin": ("person", "A cousin is {}.", "{} is a cousin."),
        "neighbour": ("person", "The neighbour is {}.", "{} is the neighbour."),
        "job": ("job", "The job is {}.", "The job on the card is {}."),
        "pet": ("pet", "The pet is a {}.", "A {} is the pet."),
    },
    "town": {
        "mayor": ("person", "The mayor is {}.", "{} is the mayor."),
        "judge": ("person", "The judge is {}.", "{} is the judge."),
        "river": ("river", "It lies on the river {}.", "The river {} runs through it."),
    },
    "company": {
        "director": ("person", "The director is {}.", "{} is the director."),
        "seat": ("town", "The seat is {}.", "It has its seat in {}."),
        "product": ("product", "The product is {}.", "Its best known product is {}."),
    },
    "ship": {
        "captain": ("person", "The captain is {}.", "{} is the captain."),
        "port": ("town", "The home port is {}.", "{} is the home port."),
        "colour": ("colour", "The colour is {}.", "It has the colour {}."),
    },
    "book": {
        "author": ("person", "The author is {}.", "{} is the author."),
        "publisher": ("company", "The publisher is {}.", "{} is the publisher."),
        "year": ("year", "It came out in the year {}.", "The year on the first page is {}."),
    },
}
OPENINGS = {
    "person": "{} lives in the county.", "town": "{} is a town.", "company": "{} is a company.",
    "ship": "{} is a ship.", "book": "{} is a book.",
}  # fmt: skip


class Draw:
    """Choices by way of `Random.random`, the one method whose values Python promises never to change."""

    def __init__(self, seed: str):
        self.random = Random(seed).random

    def one(self, values: Sequence[Any]) -> Any:
        return values[int(self.random() * len(values))]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        keys = [self.random() for _ in values]
        return [values[place] for place in sorted(range(len(values)), key=keys.__getitem__)]


def names(draw: Draw) -> dict[str, list[str]]:
    """All the names of each kind in random order."""
    pairs = {"person": (FIRST, LAST), "company": COMPANY, "ship": SHIP, "book": BOOK}
    found = {
        kind: draw.shuffled([f"{a} {b}" for a in first for b in second]) for kind, (first, second) in pairs.items()
    }
    return found | {"town": draw.shuffled([a + b for a in TOWN[0] for b in TOWN[1]])}


def facts_of(own: dict[str, list[str]], draw: Draw) -> dict[str, dict[str, str]]:
    """facts[title][relation] of one set of entities; a captain has one ship, an author one book."""
    sailors, writers = draw.shuffled(own["person"]), draw.shuffled(own["person"])
    facts = {}
    for kind, titles in own.items():
        for place, title in enumerate(titles):
            told = {}
            for relation, (of, *_) in RELATIONS[kind].items():
                unlike = {title, *told.values()}
                told[relation] = draw.one([value for value in own.get(of, THINGS.get(of)) if value not in unlike])
            told |= {"ship": {"captain": sailors[place]}, "book": {"author": writers[place]}}.get(kind, {})
            facts[title] = {relation: told[relation] for relation in draw.shuffled(list(told))}
    return facts


def page(kind: str, title: str, told: dict[str, str], draw: Draw) -> dict[str, Any]:
    """A row of documents.jsonl."""
    sentences = [draw.one(RELATIONS[kind][relation][1:]).format(value) for relation, value in told.items()]
    return {"title": title, "text": " ".join([OPENINGS[kind].format(title), *sentences]), "facts": told}


def questions(facts: dict[str, dict[str, str]], people: Sequence[str], count: int, held_out: bool, draw: Draw):
    """Rows of questions.jsonl, as many for each number of hops, no two alike."""
    graph = {title: dict(told) for title, told in facts.items()}
    for title, told in facts.items():
        for relation, inverse in (("captain", "ship"), ("author", "book")):
            if relation in told:
                graph[told[relation]][inverse] = title
    rows, seen, titles = [], set(), list(facts)
    while len(rows) < count:
        hops = HOPS[len(rows) % len(HOPS)]
        chain, relations = [draw.one(titles)], []
        while len(relations) < hops and chain[-1] in graph:
            relations.insert(0, draw.one(list(graph[chain[-1]])))
            chain.append(graph[chain[-1]][relations[0]])
        asked = " of ".join([*relations, chain[0]])
        # A chain that comes by a page twice would have a shorter way.
        if len(relations) < hops or len(set(chain)) < len(chain) or asked in seen:
            continue
        seen.add(asked)
        who = "Who" if chain[-1] in people else "What"
        prompt = f"{who} is the {' of the '.join(relations)} of {chain[0]}?"
        rows.append({"prompt": prompt, "answer": chain[-1], "hops": hops, "asked": asked, "held_out": held_out})
    return rows


def main(folder: Path) -> None:
    """Writes documents.jsonl, questions.jsonl and searches.json."""
    draw = Draw("research")
    every = names(draw)
    documents, asked = [], []
    for side, count in enumerate(QUESTIONS):
        first = {kind: sizes[0] * side for kind, sizes in SIZES.items()}
        own = {kind: every[kind][first[kind] : first[kind] + sizes[side]] for kind, sizes in SIZES.items()}
        facts = facts_of(own, draw)
        documents += [page(kind, title, facts[title], draw) for kind, titles in own.items() for title in titles]
        asked += questions(facts, set(own["person"]), count, bool(side), draw)
    documents = draw.shuffled(documents)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("documents", documents), ("questions", asked)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    (folder / "searches.json").write_text(json.dumps(SEARCHES, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
