import json
import math
import runpy
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_worlds import word_tokenizer

from course_lib.models import tiny_model, word_level_tokenizer
from course_lib.research import (
    NO_ACTION,
    NO_HITS,
    NO_PAGE,
    Corpus,
    Document,
    Library,
    Question,
    RandomLibraries,
    ResearchTask,
    expert_reply,
    expert_trajectory,
    follow,
)
from course_lib.sampling import sample_trajectories
from course_lib.training import GRPOConfig
from course_lib.trajectories import Call, Trajectory, segments

DATA = Path(__file__).parents[1] / "data" / "research"
LIBRARY = Library(
    [
        Document("Ada Lee", "Ada Lee is a baker. Her boss is Otto Kern.", {"boss": "Otto Kern"}),
        Document("Otto Kern", "Otto Kern likes tea.", {"drink": "tea"}),
        Document("Sea Wren", "A ship. Its captain is Otto Kern.", {"captain": "Otto Kern", "colour": "blue"}),
    ],
    {"ship": "ship captain {}"},
)
QUESTION = Question(
    "What is the drink of the boss of Ada Lee?", "tea", 2, asked="drink of boss of Ada Lee", library=LIBRARY
)
SHIP = Question("Which colour?", "blue", 3, asked="colour of ship of boss of Ada Lee", library=LIBRARY)


class Letters:
    """A token for each character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]


class Pairs:
    """A token for each two characters: what was sampled one by one is not what encoding its text would give."""

    def encode(self, text, add_special_tokens=True):
        return [1000 * ord(a) + ord(b) for a, b in zip(text[::2], (text + "~")[1::2], strict=False)]


def read(ids):
    return "".join(map(chr, ids))


def play(*texts, question=QUESTION, **options):
    """An episode after the agent wrote `texts`."""
    episode = ResearchTask(Source(question), **{"context_budget": 1000} | options).open(question, Letters())
    for text in texts:
        episode.step(Letters().encode(text), text)
    return episode


class Source:
    """Always the same question."""

    def __init__(self, question):
        self.question = question

    def training_problem(self, index):
        return self.question

    def held_out_problems(self):
        return [self.question]


@cache
def libraries(hops=2, seed=0):
    return RandomLibraries(hops=hops, seed=seed, held_out=50)


# --- what a call sees -----------------------------------------------------------------------------------------------


def test_contexts_of_an_agent_that_edits_its_context():
    question = "Question: What is the drink of the boss of Ada Lee?\n"
    assert read(play().context()) == question + "Notes: none\nAction:"
    page = "Page: Ada Lee is a baker. Her boss is Otto Kern.\n"
    assert read(play(" open Ada Lee\n").context()) == question + "Notes: none\n" + page + "Notes:"
    noted = play(" open Ada Lee\n", " drink of Otto Kern\n")
    assert read(noted.context()) == question + "Notes: drink of Otto Kern\nAction:"
    again = play(" open Ada Lee\n", " drink of Otto Kern\n", " open otto kern\n")
    assert read(again.context()) == question + "Notes: drink of Otto Kern\nPage: Otto Kern likes tea.\nNotes:"


def test_an_append_only_agent_sees_everything_and_gives_one_segment():
    texts = (" open Ada Lee\n", " drink of Otto Kern\n", " open Otto Kern\n", " tea\n")
    seen = read(play(*texts, mode="append_only").context())
    assert seen == (
        "Question: What is the drink of the boss of Ada Lee?\nNotes: none\nAction: open Ada Lee\n"
        "Page: Ada Lee is a baker. Her boss is Otto Kern.\nNotes: drink of Otto Kern\nAction: open Otto Kern\n"
        "Page: Otto Kern likes tea.\nNotes: tea\nAction:"
    )
    for mode, count in (("append_only", 1), ("edit_context", 5)):
        task = ResearchTask(Source(QUESTION), mode=mode, context_budget=1000)
        attempt = expert_trajectory(task, QUESTION, Letters())
        assert (len(segments(attempt)), len(attempt.calls), attempt.reward) == (count, 5, 1.0)


@pytest.mark.parametrize("mode", ["edit_context", "append_only"])
def test_what_was_sampled_is_kept_as_it_was_sampled(mode):
    task = ResearchTask(Source(QUESTION), mode=mode, context_budget=1000)
    episode = task.open(QUESTION, Pairs())
    sampled = [7, 8, 9]  # not what Pairs would make of the text
    episode.step([5], " open Ada Lee\n")
    episode.step(sampled, " tea\n")
    context = episode.context()
    assert any(context[at : at + 3] == sampled for at in range(len(context)))


def test_a_reply_without_an_end_is_closed():
    assert read(play(" open Ada Lee\n", " cut of").context()).endswith("Notes: cut of\nAction:")
    assert read(play("", mode="append_only").context()).endswith(f"Action:\nPage: {NO_ACTION}\nNotes:")


# --- budget ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.sampled_from(["edit_context", "append_only"]), st.integers(0, 20))
def test_no_context_is_longer_than_the_budget(budget, mode, index):
    task = ResearchTask(libraries(hops=(1, 2, 3)), mode=mode, context_budget=budget, max_calls=9)
    attempt = expert_trajectory(task, task.training_problem(index), Letters())
    assert all(len(call.context) <= budget for call in attempt.calls)


def test_a_page_is_cut_to_the_room_that_is_left():
    assert read(play(" open Ada Lee\n", context_budget=90).context()).endswith("Page: Ada Lee is a bNotes:")


def test_a_transcript_that_outgrows_the_budget_ends_unsolved_and_notes_do_not():
    source = libraries()
    lengths = {}
    for mode in ("edit_context", "append_only"):
        task = ResearchTask(source, mode=mode, context_budget=10_000)
        problem = task.training_problem(0)
        lengths[mode] = max(len(call.context) for call in expert_trajectory(task, problem, Letters()).calls)
    assert lengths["edit_context"] < lengths["append_only"]
    for mode, reward in (("edit_context", 1.0), ("append_only", 0.0)):
        task = ResearchTask(source, mode=mode, context_budget=lengths["edit_context"])
        assert expert_trajectory(task, problem, Letters()).reward == reward


def test_an_episode_without_room_is_over_before_it_begins():
    assert play(context_budget=10).done


def test_calls_are_counted():
    texts = (" open Ada Lee\n", " drink of Otto Kern\n")
    assert not play(*texts, max_calls=3).done
    assert play(*texts, max_calls=2).done
    with pytest.raises(RuntimeError, match="done"):
        play(*texts, " answer tea\n", max_calls=2)


# --- actions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("", NO_ACTION),
        (" walk home\n", NO_ACTION),
        (" open\n", NO_PAGE),
        (" open ../../README.md\n", NO_PAGE),
        (" open /etc/hostname\n", NO_PAGE),
        (" search\n", NO_HITS),
        (" search zebra {0.__class__}\n", NO_HITS),
        (" OPEN  ada  LEE.\n", "Ada Lee is a baker. Her boss is Otto Kern."),
        (" search captain Otto Kern\n", "Found: Sea Wren ; Otto Kern ; Ada Lee"),
    ],
)
def test_every_action_gets_an_answer(action, observation):
    episode = play(action)
    assert read(episode.context()).endswith(f"Page: {observation}\nNotes:")
    assert not episode.done
    assert episode.turn == "note"


@pytest.mark.parametrize(("reply", "reward"), [(" answer tea\n", 1), (" Answer  Tea.\n", 1), (" answer\n", 0),
                                               (" answer green tea\n", 0), (" answer tea tea\n", 0)])  # fmt: skip
def test_reward_is_binary(reply, reward):
    episode = play(reply)
    assert (episode.done, episode.reward) == (True, reward)


@given(st.lists(st.text(max_size=30), min_size=7, max_size=7))
def test_no_text_raises(texts):
    episode = play(max_calls=7)
    for text in texts:
        if not episode.done:
            episode.step([1, 2], text)
    assert episode.done
    assert episode.reward in (0, 1)


# --- the expert -----------------------------------------------------------------------------------------------------


def test_expert_searches_for_what_no_page_of_its_subject_tells():
    task = ResearchTask(Source(SHIP), context_budget=1000)
    attempt = expert_trajectory(task, SHIP, Letters())
    assert [read(call.output).strip() for call in attempt.calls] == [
        "open Ada Lee", "colour of ship of boss Otto Kern", "search ship captain Otto Kern", "colour of ship Sea Wren",
        "open Sea Wren", "colour blue", "answer blue",
    ]  # fmt: skip
    assert attempt.reward == 1


def test_noise_writes_down_a_fact_of_the_right_kind():
    question = libraries().training_problem(0)
    episode = ResearchTask(libraries(), context_budget=1000).open(question, Letters())
    episode.step([1], expert_reply(episode))
    page = episode.page.facts
    draws = iter([0.3, 0.0, 0.3, 0.5, 0.3, 0.99, 0.9])
    written = [expert_reply(episode, noise=0.5, draw=lambda: next(draws)).split(" of ") for _ in range(4)]
    people = [f"{relation} {name}" for relation, name in page.items() if relation in RandomLibraries.PEOPLE]
    relation = question.asked.split(" of ")[1]
    assert [note[1].strip() for note in written] == [*people, f"{relation} {page[relation]}"]


def test_expert_goes_on_after_a_page_that_is_not_there():
    episode = play(" open Nobody\n")
    assert expert_reply(episode) == " drink of boss of Ada Lee\n"


# --- random libraries -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 4))
def test_random_questions(index, seed, hops):
    source = libraries(hops, seed)
    question = source.training_problem(index)
    again = RandomLibraries(hops=hops, seed=seed, held_out=0).training_problem(index)
    assert (question, question.library.documents) == (again, again.library.documents)
    assert question.level == hops
    facts = {page.title: page.facts for page in question.library.documents}
    assert follow(question.asked, facts) == question.answer
    task = ResearchTask(source, context_budget=64, max_calls=2 * hops + 1)
    words = word_level()
    attempt = expert_trajectory(task, question, words)
    assert (attempt.reward, len(attempt.calls)) == (1.0, 2 * hops + 1)
    assert words.unk_token_id not in {token for call in attempt.calls for token in call.context + call.output}


@cache
def word_level():
    return word_level_tokenizer(RandomLibraries.vocabulary())


def test_people_of_the_exam_are_never_met_in_training():
    def people(questions):
        return {page.title for question in questions for page in question.library.documents}

    source = libraries()
    training, exam = people(map(source.training_problem, range(2000))), people(source.held_out_problems())
    assert not training & exam
    assert len(training) == 192
    assert {name for person in training for name in person.split()} >= {n for person in exam for n in person.split()}
    assert exam == people(libraries(seed=5).held_out_problems())


def test_searching_a_random_library():
    question = libraries().training_problem(0)
    title = question.library.documents[3].title
    assert title in [page.title for page in question.library.search(title)]


# --- the corpus -----------------------------------------------------------------------------------------------------


@cache
def corpus():
    return Corpus(DATA)


def all_questions():
    source = corpus()
    return [*map(source.training_problem, range(2000)), *source.held_out_problems()]


def test_the_corpus_is_what_its_generator_writes(tmp_path):
    runpy.run_path(str(DATA / "make.py"))["main"](tmp_path)
    names = ["documents.jsonl", "questions.jsonl", "searches.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
    assert sum((DATA / name).stat().st_size for name in names) < 1_500_000


def test_the_corpus_is_as_large_as_it_says():
    assert len(corpus().library.documents) >= 500
    assert len({question.prompt for question in all_questions()}) == 2500
    levels = Counter(question.level for question in corpus().held_out_problems())
    assert levels == {1: 125, 2: 125, 3: 125, 4: 125}


def test_entities_of_the_exam_stand_on_no_page_and_in_no_question_of_training():
    source = corpus()
    pages = {page.title: page for page in source.library.documents}

    def reachable(questions):
        found = {title for question in questions for title in question.asked.split(" of ") if title in pages}
        new = found
        while new:  # pages link both ways: captains to ships, ships to captains
            linked = {title for t in pages for title in [t, *pages[t].facts.values()]
                      if title in pages and not {t, *pages[t].facts.values()}.isdisjoint(new)}  # fmt: skip
            new, found = linked - found, found | linked
        return found

    training = reachable(map(source.training_problem, range(2000)))
    exam = reachable(source.held_out_problems())
    assert not training & exam
    assert training | exam == set(pages)
    assert not any(title in pages[other].text for title in exam for other in training)


def test_pages_say_what_their_facts_say():
    for page in corpus().library.documents:
        assert all(value in page.text for value in page.facts.values())
        assert len(set(page.facts.values())) == len(page.facts)


def test_every_question_has_one_answer_and_the_expert_finds_it():
    source = corpus()
    task = ResearchTask(source, context_budget=1000, max_calls=9)
    owners = Counter((relation, value) for page in source.library.documents for relation, value in page.facts.items()
                     if relation in ("captain", "author"))  # fmt: skip
    assert max(owners.values()) == 1  # so that "the ship of" and "the book of" mean one
    for question in all_questions():
        attempt = expert_trajectory(task, question, Letters())
        assert (attempt.reward, len(attempt.calls)) == (1.0, 2 * question.level + 1)


def test_the_training_stream_is_an_order_of_all_questions():
    source = Corpus(DATA, hops=(2, 3), seed=1)
    first = [source.training_problem(index).prompt for index in range(1000)]
    assert len(set(first)) == 1000
    assert first != [Corpus(DATA, hops=(2, 3), seed=2).training_problem(index).prompt for index in range(1000)]
    assert {question.level for question in source.held_out_problems()} == {2, 3}
    assert source.training_problem(1000) in map(source.training_problem, range(1000))


def test_a_broken_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"documents\.jsonl"):
        Corpus(tmp_path)
    (tmp_path / "documents.jsonl").write_text('{"title": "Ada"}\n')
    with pytest.raises(ValueError, match="line 1: expected title, text, facts"):
        Corpus(tmp_path)
    with pytest.raises(ValueError, match=r"hops: expected some of \[1, 2, 3, 4\], got \[9\]"):
        Corpus(DATA, hops=[9])


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="mode: expected one of edit_context, append_only, got 'both'"):
        ResearchTask(libraries(), mode="both")
    with pytest.raises(ValueError, match="context_budget: expected a whole number of at least 1, got 0"):
        ResearchTask(libraries(), context_budget=0)
    with pytest.raises(ValueError, match="hops"):
        RandomLibraries(hops=())
    with pytest.raises(ValueError, match="index"):
        libraries().training_problem(-1)
    with pytest.raises(ValueError, match="documents: expected 2 different titles, got 1"):
        Library([Document("Ada", ""), Document("ADA", "")])


# --- with a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["edit_context", "append_only"])
def test_a_model_that_writes_nonsense_can_play(mode):
    tokenizer = word_tokenizer()  # knows none of the environment's words and no newline
    task = ResearchTask(libraries(), mode=mode, context_budget=200)
    episodes = [task.open(task.training_problem(index), tokenizer) for index in range(4)]
    played = sample_trajectories(tiny_model(vocab_size=len(tokenizer)), tokenizer, episodes, max_new_tokens=4)
    assert all(t.reward in (0, 1) and 1 <= len(t.calls) <= task.max_calls for t in played)


# --- the recipes that lesson 08 compares ----------------------------------------------------------------------------

RECIPES = runpy.run_path(str(DATA.parent / "tiny_agent" / "train.py"))
ATTEMPTS = [
    Trajectory([Call([1, 9, 3], [20, 2]), Call([1, 9, 8, 4], [30, 2]), Call([1, 4, 30, 2, 3], [40, 2])], 1.0, "q"),
    Trajectory([Call([1, 9, 3], [41, 2])], 0.0, "q"),
]


def batch_of(method):
    tokenizer = word_level()
    model = tiny_model(vocab_size=len(tokenizer))
    config = GRPOConfig(scale="none", eval_problems=1)
    return RECIPES["METHODS"][method](model, tokenizer, ResearchTask(libraries()), config).make_batch(ATTEMPTS)


def test_stepwise_trains_every_call_where_it_was_made():
    batch = batch_of("stepwise")
    assert batch.tokens[:, :7].masked_fill(~batch.mask[:, :7], 0).tolist() == [
        [0, 0, 0, 20, 2, 0, 0], [0, 0, 0, 0, 30, 2, 0], [0, 0, 0, 0, 0, 40, 2], [0, 0, 0, 41, 2, 0, 0],
    ]  # fmt: skip
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_final_transcript_trains_notes_without_their_page_and_no_earlier_call():
    batch = batch_of("final-transcript")
    assert batch.tokens.tolist() == [[1, 4, 30, 2, 3, 40, 2], [1, 9, 3, 41, 2, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_step_mixed_takes_its_baseline_over_calls():
    batch = batch_of("step-mixed")
    assert batch.tokens.equal(batch_of("stepwise").tokens)
    assert batch.advantages.tolist() == [0.25, 0.25, 0.25, -0.75]


@pytest.mark.parametrize("value", [None, "2", 1.5, math.nan, -1, [1.5], 10**400])
def test_numbers_of_the_environment_are_whole(value):
    for name, make in {
        "hops": lambda: RandomLibraries(hops=value, held_out=0),
        "held_out": lambda: RandomLibraries(held_out=value),
        "index": lambda: RandomLibraries(held_out=0).training_problem(value),
        "max_calls": lambda: ResearchTask(RandomLibraries(held_out=0), max_calls=value),
        "count": lambda: Library([Document("a", "b")]).search("b", count=value),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: expected a whole number of at least"):
            make()


@pytest.mark.parametrize("pages", [[], [Document("", "")]])
def test_a_library_without_words_finds_nothing(pages):
    assert Library(pages).search("anything") == []


@pytest.mark.parametrize("noise", [None, math.nan, -0.1, 2, "0"])
def test_noise_is_a_probability(noise):
    task = ResearchTask(RandomLibraries(held_out=0))
    with pytest.raises(ValueError, match="noise: expected a probability"):
        expert_trajectory(task, task.training_problem(0), word_tokenizer(), noise=noise)


def test_what_the_facts_lack_is_named():
    with pytest.raises(ValueError, match="facts: expected the boss of ada, got none"):
        follow("pet of boss of ada", {"bob": {"pet": "cat"}})


def test_a_corpus_with_odd_rows(tmp_path):
    page = {"title": "Ada\u2028Lee", "text": "Her boss is Otto.", "facts": {"boss": "Otto"}}
    question = {"prompt": "Who?", "answer": "Otto", "hops": 1, "asked": "boss of Ada\u2028Lee", "held_out": False}

    def write(**changes):
        (tmp_path / "documents.jsonl").write_text(json.dumps(page, ensure_ascii=False) + "\n", encoding="utf-8")
        (tmp_path / "questions.jsonl").write_text(json.dumps(question | changes) + "\n", encoding="utf-8")

    (tmp_path / "searches.json").write_text('{"ship": "ship captain {}"}')
    write()
    assert Corpus(tmp_path, hops=1).library.page("ada lee").text == "Her boss is Otto."
    for changes in ({"answer": " "}, {"prompt": ""}, {"prompt": "\ud800"}, {"hops": True}, {"hops": 0}):
        write(**changes)
        with pytest.raises(ValueError, match=r"questions.jsonl, line 1: expected prompt, answer"):
            Corpus(tmp_path)
    write()
    for template in ("{x}", "{", "{0.__class__}", "{:>99}"):
        (tmp_path / "searches.json").write_text(json.dumps({"ship": template}))
        with pytest.raises(ValueError, match=r"searches.json: expected words for each relation"):
            Corpus(tmp_path)
