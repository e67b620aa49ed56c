from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gagar_jax.grading.rubric import coefficients, tier, weighted
from gagar_jax.types import Flag, Scores

PAPER = {"tier1_best": 1.0, "tier1_rest": 0.9, "tier2_best": 0.85, "tier2_worst": 0.4, "tier3": 0.2}
SCORES = st.builds(Scores, *[st.integers(1, 5)] * 5)
ENTRIES = st.dictionaries(st.integers(0, 40), st.tuples(SCORES, st.sets(st.sampled_from(Flag))), max_size=8)


def test_weighted_is_the_rubrics_sum_in_hundredths():
    assert weighted(Scores(5, 4, 3, 2, 1)) == 30 * 5 + 25 * 4 + 20 * 3 + 15 * 2 + 10 * 1


@pytest.mark.parametrize(
    ("scores", "flags", "expected"),
    [
        ((5, 5, 5, 5, 5), (), 1),
        ((4, 4, 4, 4, 4), (), 1),
        ((4, 4, 4, 4, 3), (), 2),
        ((1, 5, 5, 5, 5), (), 3),
        ((2, 5, 5, 5, 5), (), 2),
        ((5, 1, 5, 5, 1), (), 2),
        ((5, 5, 2, 2, 5), (), 3),
        ((5, 5, 2, 3, 5), (), 2),
        ((5, 5, 3, 2, 5), (), 2),
        ((5, 5, 5, 5, 5), (Flag.UNREQUESTED_REWRITE,), 3),
        ((5, 5, 5, 5, 5), (Flag.TEST_SPECIFIC_WORKAROUND,), 3),
        ((5, 5, 5, 5, 5), (Flag.SEVERE_PROCESS_ISSUE,), 2),
        ((5, 5, 5, 5, 5), (Flag.UNRESOLVED_REGRESSION,), 2),
        ((5, 5, 5, 5, 5), (Flag.SEVERE_PROCESS_ISSUE, Flag.UNREQUESTED_REWRITE), 3),
    ],
)
def test_tier_table(scores: tuple[int, ...], flags: tuple[Flag, ...], expected: int):
    assert tier(Scores(*scores), flags) == expected


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        # the f that the paper's own run shows for its passed members
        ([(5, 5, 5, 5, 5), (5, 5, 5, 5, 3), (3, 3, 3, 3, 3)], [1.0, 0.85, 0.4]),
        ([(5, 5, 5, 5, 5), (5, 5, 5, 5, 3), (4, 4, 4, 4, 3), (3, 3, 3, 3, 3)], [1.0, 0.85, 0.625, 0.4]),
        ([(5, 5, 5, 5, 5), (5, 5, 5, 5, 5), (1, 5, 5, 5, 5)], [1.0, 1.0, 0.2]),
        ([(5, 5, 5, 5, 5), (5, 5, 5, 5, 3), (3, 3, 3, 3, 3), (5, 5, 1, 1, 5)], [1.0, 0.85, 0.4, 0.2]),
        ([(5, 5, 5, 5, 5), (4, 4, 4, 4, 4), (5, 4, 4, 4, 4)], [1.0, 0.9, 0.9]),
        ([(5, 5, 5, 5, 3)], [0.85]),
        ([(5, 5, 5, 5, 3), (5, 5, 5, 5, 3)], [0.85, 0.85]),
        ([(1, 1, 1, 1, 1)], [0.2]),
        ([], []),
    ],
)
def test_golden_coefficients(scores: list[tuple[int, ...]], expected: list[float]):
    grades = coefficients({i: (Scores(*s), ()) for i, s in enumerate(scores)}, **PAPER)
    assert [grades[i].quality for i in range(len(scores))] == pytest.approx(expected, abs=1e-12)


def test_equal_weighted_scores_tie_even_when_they_differ():
    # 0.30 + 0.20 = 0.25 + 0.15 + 0.10: equal as integers, unequal as sums of floats
    grades = coefficients({0: (Scores(5, 4, 5, 4, 4), ()), 1: (Scores(4, 5, 4, 5, 5), ())}, **PAPER)
    assert (grades[0].rank, grades[1].rank) == (0, 0)
    assert grades[0].quality == grades[1].quality == 1.0


@given(ENTRIES)
def test_order_of_members_does_not_matter(entries: dict):
    expected = coefficients(entries, **PAPER)
    assert coefficients(dict(reversed(entries.items())), **PAPER) == expected


@given(ENTRIES)
def test_ranks_are_dense_and_agree_with_quality(entries: dict):
    grades = coefficients(entries, **PAPER)
    assert grades.keys() == entries.keys()
    assert {g.rank for g in grades.values()} == set(range(len({g.rank for g in grades.values()})))
    for a, b in itertools.permutations(grades.values(), 2):
        assert 0 < a.quality <= 1
        if a.rank < b.rank:
            assert (a.tier, b.quality) <= (b.tier, a.quality)
        if a.rank == b.rank:
            assert (a.tier, a.quality) == (b.tier, b.quality)
