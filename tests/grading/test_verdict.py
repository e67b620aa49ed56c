from __future__ import annotations

import dataclasses

import pytest

from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.grading.verdict import VoidVerdict, validate
from gagar_jax.types import CandidateVerdict, Evidence, Flag, Group, GroupVerdict, Scores, Status
from tests.grading.builders import FIXED, Diff, group_of, trajectory

GOOD = Scores(5, 5, 5, 5, 5)
FAKE = Evidence("patch", "pkg/core.py:14", "return high + 1")


@pytest.fixture
def group(diff: Diff) -> Group:
    patch = diff({"pkg/core.py": FIXED})
    return group_of([trajectory(0, patch), trajectory(1, patch), trajectory(2, b"", status=Status.FAILED)])


def verdict(*candidates: CandidateVerdict, **kwargs) -> GroupVerdict:
    return GroupVerdict("test", candidates, **kwargs)


def judged(member: int = 0, **kwargs) -> CandidateVerdict:
    return CandidateVerdict(member, **{"scores": GOOD} | kwargs)


def test_a_complete_verdict_is_returned_as_it_is(group: Group):
    given = verdict(judged(1), judged(0))
    assert validate(given, group) == (given, 0)
    structural = StructuralGrader().grade(group)
    assert validate(structural, group) == (structural, 0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (None, "NoneType, not a GroupVerdict"),
        ("T1", "str, not a GroupVerdict"),
        (verdict(), r"passed members \[0, 1\] are not judged"),
        (verdict(judged(0)), r"passed members \[1\] are not judged"),
        (verdict(judged(0), judged(1), judged(1)), "member 1 is judged 2 times"),
        (verdict(judged(0), judged(1), judged(2)), "member 2 did not pass"),
        (verdict(judged(0), judged(1), judged(7)), "member 7 is not in the group"),
        (verdict(judged(0), judged(1), external={9: ()}), "external: member 9 is not in the group"),
        (verdict(judged(0), judged(1), external={2: (FAKE,)}), "does not exist"),
        (verdict(judged(0), judged(1, evidence=(FAKE,))), "does not exist"),
        (verdict(judged(0), judged(1, flags={Flag.UNREQUESTED_REWRITE: (FAKE,)})), "does not exist"),
        (verdict(judged(0), judged(1, flags={"rewrite": ()})), "'rewrite' is not a flag"),
        (verdict(judged(0), judged(1, scores=(5, 5, 5, 5, 5))), "the scores are a tuple"),
        (verdict(judged(0), {"member": 1}), "not a CandidateVerdict"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_verdict_is_void(group: Group, bad, reason: str):
    with pytest.raises(VoidVerdict, match=reason):
        validate(bad, group)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Scores)])
@pytest.mark.parametrize("score", [0, 6, -1, 4.0, 4.5, True, "5", None, float("nan")])
def test_scores_are_rejected_never_clamped(group: Group, name: str, score):
    with pytest.raises(VoidVerdict, match=f"member 1: {name} is"):
        validate(verdict(judged(0), judged(1, scores=dataclasses.replace(GOOD, **{name: score}))), group)


def test_flags_and_claims_without_evidence_are_dropped_and_counted(group: Group):
    shown = (Evidence("patch", "pkg/core.py:14", "return low"),)
    flags = {Flag.UNREQUESTED_REWRITE: (), Flag.SEVERE_PROCESS_ISSUE: shown}
    clean, dropped = validate(verdict(judged(0, flags=flags), judged(1), external={1: (), 2: ()}), group)
    assert dropped == 3
    assert clean.candidates[0].flags == {Flag.SEVERE_PROCESS_ISSUE: shown}
    assert clean.external == {}


@pytest.mark.parametrize(
    ("evidence", "holds"),
    [
        (Evidence("patch", "pkg/core.py:14", "return low"), True),
        (Evidence("patch", "pkg/core.py:14", "return high"), True),  # the line it removes
        (Evidence("patch", "pkg/core.py:13", "return low"), False),
        (Evidence("patch", "pkg/core.py:14", ""), False),
        (Evidence("patch", "core.py:14", "return low"), False),
        (Evidence("patch", "pkg/core.py", "return low"), False),
        (Evidence("file", "pkg/core.py:6", "def clamp(value, low, high):"), True),
        (Evidence("file", "pkg/core.py:14", "return low"), True),
        (Evidence("file", "pkg/core.py:0", "def clamp(value, low, high):"), False),
        (Evidence("file", "pkg/core.py:999", ""), False),
        (Evidence("file", "pkg/other.py:1", "x"), False),
        (Evidence("step", "step 1", "view pkg/core.py"), True),
        (Evidence("step", "step 2", "edited"), True),
        (Evidence("step", "step 2", "deleted everything"), False),
        (Evidence("step", "step 4", "submit"), False),
        (Evidence("step", "step 0", "submit"), False),
        (Evidence("step", "first", "view"), False),
        (Evidence("step", "step 1", ""), False),
        (Evidence("command", "pytest -q", "2 passed"), True),
        (Evidence("command", "pytest -q", "1 failed in 0.3 s"), True),  # as it was before
        (Evidence("command", "pytest -q", "0.3 s2 passed"), False),
        (Evidence("command", "pytest -q", "3 passed"), False),
        (Evidence("command", "pytest", "2 passed"), False),
        (Evidence("fact", "patch_lines", "2"), True),
        (Evidence("fact", "patch_lines", "20"), False),
        (Evidence("fact", "beauty", "None"), False),
        (Evidence("rumour", "x", "y"), False),  # type: ignore[arg-type]
        ("pkg/core.py:14", False),
    ],
)
def test_evidence_is_checked(group: Group, evidence, holds: bool):
    given = verdict(judged(0, evidence=(evidence,)), judged(1))
    given = dataclasses.replace(
        given, commands={0: {"pytest -q": ("1 failed in 0.3 s", "2 passed in 0.1 s")}}
    )
    if holds:
        assert validate(given, group) == (given, 0)
    else:
        with pytest.raises(VoidVerdict, match="does not exist"):
            validate(given, group)
