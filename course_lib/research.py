"""Deep research in miniature: questions whose answers take several look-ups, and an agent with little room to read.

A module of its own beside `tasks`, which holds the protocol and tasks of one reply: here is one environment of many
calls, used from a tiny transformer with a random library for each question to SmolLM2 with a corpus of English pages.

The agent acts and writes notes in turn. An action is one line: `search WORDS`, `open TITLE` or `answer WORDS`. What
comes back is shown to the next call, which writes notes; then the agent acts again. The mode decides what a call sees:

| mode | to act | to write notes |
|---|---|---|
| "edit_context" | question, notes | question, notes, page |
| "append_only" | the whole transcript | the whole transcript, page |

With "edit_context" the new notes take the place of the old ones and the page is gone, so whatever a later call must
know has to go through the notes. No context is ever longer than the budget: a page is cut to the room that is left,
and an episode with no room left for the next call ends unsolved. That is how an append-only agent fails on questions
whose transcript does not fit.

What the model writes is text that is compared with titles and words. Nothing of it is evaluated or used as a path.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, Protocol, get_args

from course_lib._tensors import require, require_number, require_whole
from course_lib.tasks import Episode, Problem, _shuffled
from course_lib.trajectories import Call, Trajectory

Mode = Literal["edit_context", "append_only"]

QUESTION, NOTES, ACTION, PAGE, NOTHING = "Question: {}\n", "Notes:", "Action:", "Page: {}\n", " none\n"
NO_ACTION = "Not an action. Write search WORDS or open TITLE or answer WORDS"
NO_PAGE = "No page has this title. Try search"
NO_HITS = "No page has these words"
FOUND = "Found: {}"
"""All that the environment says beside the pages. A word-level tokenizer needs these words."""


# ----------------------------------------------------------------------------------------------- pages and questions


@dataclass(frozen=True)
class Document:
    """A page: its title, its text, and what it says as `facts[relation] = value`, which only the expert reads."""

    title: str
    text: str
    facts: Mapping[str, str] = field(default_factory=dict)


class Library:
    """Pages that can be opened by title and searched by words.

    Args:
        documents: the pages; titles differ in more than case.
        searches: for a relation that the page of its subject does not tell, the words that find the page whose title
            is the value: {"ship": "ship captain {}"}. Only the expert reads it.

    Raises:
        ValueError: two pages have the same title.

    Example:
        >>> library = Library([Document("Ada Lee", "Her boss is Otto Kern."), Document("Sea Wren", "A blue ship.")])
        >>> library.page(" ada lee").text
        'Her boss is Otto Kern.'
        >>> [document.title for document in library.search("the ship, please")]
        ['Sea Wren']
    """

    def __init__(self, documents: Iterable[Document], searches: Mapping[str, str] | None = None):
        self.documents = tuple(documents)
        self.searches = dict(searches or {})
        self._by_title = {_plain(document.title): document for document in self.documents}
        if len(self._by_title) < len(self.documents):
            raise ValueError(f"documents: expected {len(self.documents)} different titles, got {len(self._by_title)}")

    def page(self, title: str) -> Document | None:
        """The page with this title, whatever the case; None where there is none."""
        return self._by_title.get(_plain(title))

    def search(self, words: str, count: int = 3) -> list[Document]:
        """The `count` pages that match best by BM25 over title and text, best first; pages without a match never.

        Source:
            Robertson and Zaragoza (2009), The probabilistic relevance framework: BM25 and beyond.
        """
        count = require_whole("count", count, 1)
        if not any(_words(f"{page.title} {page.text}") for page in self.documents):
            return []
        known = [word for word in _words(words) if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known).tolist()
        best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]
        return [self.documents[place] for place in best if scores[place] > 0]

    def without_relation(self, text: str) -> str:
        """ "friend noah mole" without the relation it begins with, if it does."""
        relation, _, name = text.partition(" ")
        return name if name and relation in self._relations else text

    @cached_property
    def _relations(self) -> frozenset[str]:
        return frozenset([*self.searches, *(relation for page in self.documents for relation in page.facts)])

    @cached_property
    def _index(self) -> Any:
        try:
            import bm25s
        except ImportError as error:
            raise ImportError("search needs the package bm25s: python -m pip install bm25s") from error
        index = bm25s.BM25()
        index.index([_words(f"{page.title} {page.text}") for page in self.documents], show_progress=False)
        return index


@dataclass(frozen=True, kw_only=True)
class Question(Problem):
    """A problem with the library it is asked in.

    Attributes:
        asked: the question in the short form the expert rewrites: "colour of boss of ada lee", innermost last.
        library: where the answer is.
    """

    asked: str
    library: Library = field(repr=False, compare=False)


class Questions(Protocol):
    """Where a `ResearchTask` gets its questions from."""

    def training_problem(self, index: int) -> Question:
        """The index-th of an endless stream, a function of seed and `index` alone."""
        ...

    def held_out_problems(self) -> Sequence[Question]:
        """A fixed list about entities that no training question and no training page mentions."""
        ...


class RandomLibraries:
    """Questions that cannot be known by heart: each comes with six people drawn for it alone.

    A page says a person's friend, boss and rival and the person's colour, pet and drink. A question
    of h hops asks for a colour, pet or drink h − 1 people further on: "pet of boss of ada lee" takes two look-ups.

    People have a first and a last name. A quarter of the pairs belong to the exam: every name is known from training,
    none of the people is.

    Args:
        hops: look-ups a question may take, each as likely.
        seed: of the training stream. The exam is the same for every seed.
        held_out: size of the exam.

    Example:
        >>> question = RandomLibraries().training_problem(0)
        >>> question.prompt, question.answer
        ('drink of boss of kate hare', 'juice')
        >>> question.library.page("kate hare").text
        'kate hare friend mia deer boss jack swan rival ida kite colour black pet hen drink tea'
    """

    FIRST = ("ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hugo",
             "ida", "jack", "kate", "leo", "mia", "noah", "olga", "paul")  # fmt: skip
    LAST = ("bear", "crow", "deer", "fox", "hare", "kite", "lamb", "lark",
            "lynx", "mole", "owl", "seal", "swan", "toad", "wolf", "wren")  # fmt: skip
    PEOPLE = ("friend", "boss", "rival")
    THINGS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "colour": ("red", "blue", "green", "black", "white", "pink", "brown", "grey"),
        "pet": ("cat", "dog", "hen", "rat", "pig", "frog", "goat", "bee"),
        "drink": ("tea", "milk", "juice", "water", "cider", "cocoa", "soup", "rum"),
    }

    def __init__(self, *, hops: int | Sequence[int] = 2, seed: int = 0, held_out: int = 1000):
        self.hops, self.seed = _hops(hops), seed
        places = range(require_whole("held_out", held_out, 0))
        self._held_out = tuple(self._question(f"exam/{place}", exam=True) for place in places)

    def training_problem(self, index: int) -> Question:
        """The index-th training question."""
        return self._question(f"{self.seed}/{require_whole('index', index, 0)}", exam=False)

    def held_out_problems(self) -> Sequence[Question]:
        """The exam."""
        return self._held_out

    @classmethod
    def vocabulary(cls) -> list[str]:
        """Every word that pages, questions and the environment use, sorted."""
        things = [word for kind, words in cls.THINGS.items() for word in (kind, *words)]
        frame = " ".join([QUESTION, NOTES, ACTION, PAGE, NOTHING, NO_ACTION, NO_PAGE, NO_HITS, FOUND, "search open"])
        spoken = [word for word in frame.split() if word != "{}"]
        return sorted({*cls.FIRST, *cls.LAST, *cls.PEOPLE, *things, *spoken, "answer", "of", ";"})

    def _question(self, key: str, *, exam: bool) -> Question:
        draw = Random(key).random  # the one method whose values Python promises never to change

        def one(values: Sequence[Any]) -> Any:
            return values[int(draw() * len(values))]

        def shuffled(values: Sequence[Any]) -> list[Any]:
            keys = [draw() for _ in values]
            return [values[place] for place in sorted(range(len(values)), key=keys.__getitem__)]

        people = []
        for first in shuffled(range(len(self.FIRST)))[:6]:
            last = one([place for place in range(len(self.LAST)) if ((first + place) % 4 == 0) == exam])
            people.append(f"{self.FIRST[first]} {self.LAST[last]}")
        facts = {}
        for person in people:
            others = shuffled([other for other in people if other != person])
            things = {relation: one(words) for relation, words in self.THINGS.items()}
            facts[person] = dict(zip(self.PEOPLE, others, strict=False)) | things
        library = Library(
            Document(person, " ".join([person, *(f"{relation} {value}" for relation, value in told.items())]), told)
            for person, told in facts.items()
        )
        hops = one(self.hops)
        relations = [one(tuple(self.THINGS)), *(one(self.PEOPLE) for _ in range(hops - 1))]
        asked = " of ".join([*relations, one(people)])
        return Question(asked, follow(asked, facts), hops, asked=asked, library=library)


class Corpus:
    """Questions about one corpus of English pages, such as the one in data/research.

    Args:
        folder: with documents.jsonl, questions.jsonl and searches.json as data/research/make.py writes them.
        hops: look-ups a question may take; questions that take another number are left out.
        seed: of the order of the training questions; every question comes once before any comes again.

    Raises:
        ValueError: a file is missing or a row of it is not as expected; no question is left.

    Example:
        >>> corpus = Corpus("data/research", hops=(1, 2))  # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike[str], *, hops: int | Iterable[int] = (1, 2, 3, 4), seed: int = 0):
        folder, hops = Path(folder), _hops(hops)
        documents = [
            Document(row["title"], row["text"], row["facts"])
            for row in _rows(folder / "documents.jsonl", {"title": str, "text": str, "facts": dict})
        ]
        searches = _json(_text(folder / "searches.json"))
        if not _names_words(searches) or any(set("{}") & set(words.replace("{}", "")) for words in searches.values()):
            expected = 'words for each relation, with "{}" for a name'
            raise ValueError(f"searches.json: expected {expected}, got {searches!r:.80}")
        library = Library(documents, searches)
        kinds = {"prompt": str, "answer": str, "hops": int, "asked": str, "held_out": bool}
        rows = _rows(folder / "questions.jsonl", kinds)
        split: dict[bool, list[Question]] = {False: [], True: []}
        for row in rows:
            if row["hops"] in hops:
                question = Question(row["prompt"], row["answer"], row["hops"], asked=row["asked"], library=library)
                split[row["held_out"]].append(question)
        self.library, self.seed = library, seed
        self._training, self._held_out = tuple(split[False]), tuple(split[True])
        if not self._training:
            raise ValueError(f"hops: expected some of {sorted({row['hops'] for row in rows})}, got {sorted(hops)}")

    def training_problem(self, index: int) -> Question:
        """The index-th training question."""
        epoch, place = divmod(require_whole("index", index, 0), len(self._training))
        return self._training[_shuffled(len(self._training), f"{self.seed}/{epoch}")[place]]

    def held_out_problems(self) -> Sequence[Question]:
        """The exam."""
        return self._held_out


# -------------------------------------------------------------------------------------------------- the environment


class ResearchTask:
    """The task: find the answer with at most `max_calls` calls and never more than `context_budget` tokens in view.

    Args:
        questions: `RandomLibraries(...)`, `Corpus(...)` or anything else with their two methods.
        mode: "edit_context" or "append_only", see the module.
        context_budget: the most tokens a call may see; its reply is not counted.
        max_calls: calls after which the episode ends; h look-ups take 2h + 1.

    Raises:
        ValueError: an unknown mode, or a number below 1.

    Source:
        Notes that overwrite themselves under a fixed budget: MemAgent, arXiv 2507.02259.

    Example:
        >>> task = ResearchTask(RandomLibraries(hops=2, seed=0))
        >>> task.training_problem(0).prompt
        'drink of boss of kate hare'
    """

    def __init__(
        self,
        questions: Questions,
        *,
        mode: Mode = "edit_context",
        context_budget: int = 48,
        max_calls: int = 7,
    ):
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
        for name, value in (("context_budget", context_budget), ("max_calls", max_calls)):
            require_whole(name, value, 1)
        self.questions, self.mode, self.context_budget, self.max_calls = questions, mode, context_budget, max_calls
        self.name = f"ResearchTask({type(questions).__name__}, {mode})"

    def training_problem(self, index: int) -> Question:
        """The index-th question of the training stream."""
        return self.questions.training_problem(index)

    def held_out_problems(self) -> Sequence[Question]:
        """The exam."""
        return self.questions.held_out_problems()

    def open(self, problem: Question, tokenizer: Any) -> "ResearchEpisode":
        """An episode at its first call."""
        return ResearchEpisode(self, problem, tokenizer)


class ResearchEpisode:
    """One attempt at one question.

    Contexts are joined from token ids: the environment's own pieces, each encoded once, and what the model sampled,
    as it was sampled.

    Attributes:
        question: what is asked.
        turn: "act" or "note", what the next call is for.
        notes: the latest notes as text, "" before there are any.
        page: the page the last action opened, or the best one it found; None where it did neither.
        done, reward: reward is 1 for the right answer, else 0.
    """

    stop = ("\n",)

    def __init__(self, task: ResearchTask, question: Question, tokenizer: Any):
        self.question = question
        self.turn: Literal["act", "note"] = "act"
        self.notes = ""
        self.page: Document | None = None
        self.done, self.reward = False, 0.0
        self._task = task
        self._encode = lambda text: list(_encode(tokenizer, text))
        self._calls = 0
        self._head = self._encode(QUESTION.format(question.prompt))
        self._memory = self._encode(NOTES) + self._encode(NOTHING)
        self._context = self._head + self._memory + self._encode(ACTION)
        self._end_if_full(self._context)

    def context(self) -> list[int]:
        """The token ids the model shall see now."""
        return list(self._context)

    def step(self, output_ids: list[int], text: str) -> None:
        """Take an action or notes; RuntimeError once the episode is done."""
        if self.done:
            raise RuntimeError("step: this episode is done")
        self._calls += 1
        written = [*output_ids, *([] if text.endswith("\n") else self._encode("\n"))]
        said = " ".join(text.split())
        if self.turn == "act":
            observation = self._act(said)
            if observation is None:
                return
            before = self._before(written)
            room = self._task.context_budget - len(before) - len(self._encode(NOTES))
            following = before + self._encode(PAGE.format(observation))[: max(0, room)] + self._encode(NOTES)
        else:
            self.notes = said
            self._memory = self._encode(NOTES) + written
            following = self._before(written) + self._encode(ACTION)
        self.turn = "note" if self.turn == "act" else "act"
        self._end_if_full(following)
        self.done = self.done or self._calls == self._task.max_calls
        self._context = following

    def _before(self, written: list[int]) -> list[int]:
        """What stays in view in front of what comes next."""
        return self._context + written if self._task.mode == "append_only" else self._head + self._memory

    def _end_if_full(self, context: list[int]) -> None:
        self.done = self.done or len(context) > self._task.context_budget

    def _act(self, action: str) -> str | None:
        """What the environment answers to an action; None when it was the answer to the question."""
        library = self.question.library
        verb, _, rest = action.partition(" ")
        self.page = None
        match verb.lower():
            case "answer":
                self.done = True
                self.reward = float(_plain(rest) == _plain(self.question.answer))
                return None
            case "open":
                self.page = library.page(rest)
                return NO_PAGE if self.page is None else self.page.text
            case "search":
                hits = library.search(rest)
                self.page = hits[0] if hits else None
                return FOUND.format(" ; ".join(page.title for page in hits)) if hits else NO_HITS
        return NO_ACTION


# ------------------------------------------------------------------------------------------------------ the expert


def expert_reply(episode: ResearchEpisode, *, noise: float = 0.0, draw: Callable[[], float] | None = None) -> str:
    """What the expert would write now, a function of what the call sees.

    Its notes are the question that is left: after the page of kate hare, "drink of boss of kate hare" becomes "drink of
    boss jack swan", and after his, "drink juice". It acts on its notes alone: it looks up the innermost name, and
    answers once nothing is left to look up. With `noise` it notes, so often, a random fact of the page in place of the
    one that was asked for, of the right kind: another person, or another thing.

    Args:
        episode: at any call.
        noise: probability of a random fact.
        draw: numbers in [0, 1); needed where `noise` is not 0.

    Raises:
        ValueError: `noise` is no probability, or has no `draw`.
    """
    noise = require_number("noise", noise, "a probability, 0 to 1", lambda p: 0 <= p <= 1)
    require(noise == 0 or draw is not None, "draw", "a function that draws numbers, since noise is not 0", draw)
    library = episode.question.library
    left = episode.notes or episode.question.asked
    *relations, name = left.split(" of ")
    if episode.turn == "act":
        name = library.without_relation(name)
        if not relations:
            return f" answer {name}\n"
        if relations[-1] in library.searches:
            return f" search {library.searches[relations[-1]].replace('{}', name)}\n"
        return f" open {name}\n"
    if not relations or episode.page is None:
        return f" {left}\n"
    *relations, relation = relations
    value = episode.page.title if relation in library.searches else episode.page.facts.get(relation)
    if value is None:
        return f" {left}\n"
    if noise and draw() < noise:
        is_page = library.page(value) is not None
        facts = [fact for fact in episode.page.facts.items() if (library.page(fact[1]) is not None) == is_page]
        relation, value = facts[int(draw() * len(facts))]
    return " " + " of ".join([*relations, f"{relation} {value}"]) + "\n"


def expert_trajectory(
    task: ResearchTask, question: Question, tokenizer: Any, *, noise: float = 0.0, seed: int | str = 0
) -> Trajectory:
    """The expert's attempt at one question, call by call, for a warm start.

    Example:
        >>> from course_lib.research import RandomLibraries, ResearchTask
        >>> class Letters:
        ...     def encode(self, text, add_special_tokens): return list(map(ord, text))
        >>> task = ResearchTask(RandomLibraries(), context_budget=500)
        >>> attempt = expert_trajectory(task, task.training_problem(0), Letters())
        >>> ["".join(map(chr, call.output)).strip() for call in attempt.calls]
        ['open kate hare', 'drink of boss jack swan', 'open jack swan', 'drink juice', 'answer juice']
        >>> attempt.reward
        1.0
    """
    draw = Random(f"expert/{seed}/{question.prompt}").random
    episode: Episode = task.open(question, tokenizer)
    calls = []
    while not episode.done:
        text = expert_reply(episode, noise=noise, draw=draw)
        calls.append(Call(episode.context(), tokenizer.encode(text, add_special_tokens=False)))
        episode.step(calls[-1].output, text)
    return Trajectory(calls, episode.reward, question.prompt)


def follow(asked: str, facts: Mapping[str, Mapping[str, str]]) -> str:
    """The answer to a question in its short form: relations followed from the innermost name outwards.

    Raises:
        ValueError: a name without facts, or without this relation.

    Example:
        >>> follow("pet of boss of ada", {"ada": {"boss": "bob"}, "bob": {"pet": "cat"}})
        'cat'
    """
    *relations, name = asked.split(" of ")
    for relation in reversed(relations):
        require(relation in facts.get(name, ()), "facts", f"the {relation} of {name}", "none")
        name = facts[name][relation]
    return name


# --------------------------------------------------------------------------------------------------------- helpers


def _hops(hops: int | Iterable[int]) -> tuple[int, ...]:
    several = isinstance(hops, Iterable) and not isinstance(hops, str | bytes)
    checked = tuple(require_whole("hops", hop, 1) for hop in (hops if several else (hops,)))
    require(bool(checked), "hops", "one or more whole numbers of at least 1", hops)
    return checked


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


@lru_cache(maxsize=4096)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _rows(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    rows = []
    # Not splitlines: it also cuts at characters that JSON allows within a string.
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), start=1):
        row = _json(line)
        good = isinstance(row, dict) and all(type(row.get(key)) is kind for key, kind in kinds.items())
        good = good and all(_is_written(row[key]) for key, kind in kinds.items() if kind is str)
        good = good and row.get("hops", 1) >= 1
        if not good or not _names_words(row.get("facts", {})):
            raise ValueError(f"{path.name}, line {number}: expected {', '.join(kinds)}, got {line[:80]!r}")
        rows.append({key: row[key] for key in kinds})
    if not rows:
        raise ValueError(f"{path.name}: expected at least one row, got none")
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"folder: expected {path.name} in {path.parent}, found none that can be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: expected UTF-8 text, got {error}") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_written(text: str) -> bool:
    """Has it anything to read, and no half of a surrogate pair, which no tokenizer takes?"""
    return bool(text.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _names_words(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(words, str) for words in value.values())
