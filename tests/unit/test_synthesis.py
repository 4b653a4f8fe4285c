"""The filters of the prompts that a target writes. That it writes them is an integration test."""
# ruff: noqa: RUF001

import random

import pytest

from eagle3_lightning.prompts.synthesis import PromptFilter, is_loop


def ids_of(text):
    return [hash(word) % 50_000 for word in text.split()]


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat " * 12,
        "1 2 3 4 " * 30,
        "no no no no no no no no no no no no",
        "はい はい はい はい はい はい はい はい はい はい はい はい",
    ],
)
def test_loops_are_found_in_any_language(text):
    assert is_loop(ids_of(text), text)


@pytest.mark.parametrize(
    "text",
    [
        "Write a function that sorts a list of numbers without using the built-in sort, and explain how fast it is.",
        "Напиши короткое письмо другу о том, как прошло лето, и пригласи его в гости на выходные.",
        "What is 12 + 12?",
        "Yes",
    ],
)
def test_plain_questions_are_not_loops(text):
    assert not is_loop(ids_of(text), text)


def test_duplicates_exact_and_near():
    filters = PromptFilter(min_tokens=2)

    def refuse(text):
        return filters.refuse(ids_of(text), text)

    base = "Write a short story about a dog that learns to fly over the old town at night"
    assert refuse(base) is None
    assert refuse(base.upper()) == "duplicate"
    assert refuse(base + " please") == "duplicate"
    assert refuse("Write a short poem about rivers and the people who live beside them in spring") is None
    assert refuse("Hi") == "short"


def test_a_thousand_different_questions_pass():
    words = [f"w{i}" for i in range(3000)]
    rng = random.Random(0)
    filters = PromptFilter(min_tokens=4)
    texts = [" ".join(rng.choices(words, k=rng.randint(6, 40))) for _ in range(1000)]
    assert all(filters.refuse(ids_of(text), text) is None for text in texts)
