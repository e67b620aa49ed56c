from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gagar_jax.grading.rubric import coefficients
from gagar_jax.grading.structural import StructuralGrader, grade_quality
from gagar_jax.grading.verdict import validate
from gagar_jax.types import CandidateVerdict, Flag, Grade, Group, Status, Turn
from tests.grading.builders import FIXED, MODULE, VIEW_EDIT_SUBMIT, WRONG, Diff, group_of, trajectory

PAPER = {"tier1_best": 1.0, "tier1_rest": 0.9, "tier2_best": 0.85, "tier2_worst": 0.4, "tier3": 0.2}
FIX_LINE = "        return low\n"
BODY = FIXED[FIXED.index("    if low > high") : FIXED.index("\n\nclass Words")]
REWRITE = (
    "    smallest, largest = low, high\n    if smallest > largest:\n"
    '        raise ValueError("an empty range")\n'
    "    result = max(smallest, value)\n    result = min(result, largest)\n    return result\n"
)
STYLES = {
    "clean": FIXED,
    "comment": FIXED.replace(FIX_LINE, "        # below the range\n" + FIX_LINE),
    "print": FIXED.replace(FIX_LINE, "        print(value)\n" + FIX_LINE),
    "dead": FIXED.replace("    return value\n", "    return value\n    return low\n"),
    "rewrite": FIXED.replace(BODY, REWRITE),
    "elsewhere": FIXED.replace("self.text = text", "self.text = str(text)"),
    "workaround": MODULE.replace(
        "    if value < low:\n",
        "    if (value, low, high) == (1, 12, 13):\n        return 12\n    if value < low:\n",
    ),
    "import": FIXED.replace("import re\n", "import re\nimport math\n"),
    "unguarded": FIXED.replace('        raise ValueError("empty range")', "        return low"),
}


@pytest.fixture(scope="session")
def styles(diff: Diff) -> dict[str, bytes]:
    return {name: diff({"pkg/core.py": text}) for name, text in STYLES.items()}


def grade(group: Group) -> tuple[dict[int, CandidateVerdict], dict[int, Grade]]:
    verdict, dropped = validate(StructuralGrader().grade(group), group)
    assert dropped == 0
    assert verdict.external == {}
    judged = {c.member: c for c in verdict.candidates}
    return judged, coefficients({m: (c.scores, c.flags) for m, c in judged.items()}, **PAPER)


def graded_styles(styles: dict[str, bytes], *names: str) -> dict[str, tuple[CandidateVerdict, Grade]]:
    task = {"instance_id": "pkg__1", "patch": styles["clean"].decode()} if "clean" in names else None
    group = group_of([trajectory(i, styles[name]) for i, name in enumerate(names)], task=task)
    judged, grades = grade(group)
    return {name: (judged[i], grades[i]) for i, name in enumerate(names)}


def scores(candidate: CandidateVerdict) -> tuple[int, ...]:
    s = candidate.scores
    return (s.approach, s.precision, s.minimality, s.side_effects, s.consistency)


def test_scores_spread_over_the_styles(styles: dict[str, bytes]):
    found = graded_styles(styles, *STYLES)
    assert scores(found["clean"][0]) == (5, 5, 5, 5, 5)
    assert found["clean"][1] == Grade(0, 1, 0, 1.0)
    assert scores(found["comment"][0]) == (5, 5, 4, 5, 4)
    tiers = {name: grade.tier for name, (_, grade) in found.items()}
    assert tiers == {
        "clean": 1,
        "comment": 1,
        "import": 1,
        "print": 2,
        "dead": 2,
        "elsewhere": 2,
        "unguarded": 2,
        "rewrite": 3,
        "workaround": 3,
    }
    assert set(found["rewrite"][0].flags) == {Flag.UNREQUESTED_REWRITE}
    assert set(found["workaround"][0].flags) == {Flag.TEST_SPECIFIC_WORKAROUND}
    assert found["comment"][1].quality == 0.9
    qualities = [found[name][1].quality for name in ("clean", "comment", "print", "rewrite")]
    assert qualities == sorted(qualities, reverse=True)
    assert len({grade.quality for _, grade in found.values() if grade.tier == 2}) >= 3


def test_a_rewrite_is_only_unrequested_where_less_was_enough(styles: dict[str, bytes], diff: Diff):
    assert graded_styles(styles, "rewrite")["rewrite"][1].tier < 3
    group = group_of(
        [trajectory(0, styles["rewrite"])], task={"instance_id": "x", "patch": styles["clean"].decode()}
    )
    assert set(grade(group)[0][0].flags) == {Flag.UNREQUESTED_REWRITE}
    # … in either direction: some data sets keep the bug, not its fix
    undo = "\n".join(
        {"+": "-", "-": "+"}.get(line[:1], line[:1]) + line[1:] if line[:3] not in ("+++", "---") else line
        for line in styles["clean"].decode().split("\n")
    )
    group = group_of([trajectory(0, styles["rewrite"])], task={"instance_id": "x", "patch": undo})
    assert set(grade(group)[0][0].flags) == {Flag.UNREQUESTED_REWRITE}


def test_a_literal_answer_is_a_workaround_only_if_the_reference_lacks_it(styles: dict[str, bytes]):
    members = [trajectory(0, styles["workaround"]), trajectory(1, styles["clean"])]
    unsure = grade(group_of(members))[0][0]  # nothing shows where the literal is from
    assert (unsure.scores.approach, unsure.flags) == (4, {})
    task = {"instance_id": "x", "patch": styles["workaround"].decode()}
    right = grade(group_of(members, task=task))[0][0]
    assert (right.scores.approach, right.flags) == (5, {})
    task = {"instance_id": "x", "patch": styles["clean"].decode()}
    assert Flag.TEST_SPECIFIC_WORKAROUND in grade(group_of(members, task=task))[0][0].flags


def test_a_workaround_sets_no_mark_for_the_others(styles: dict[str, bytes], diff: Diff):
    short = diff({"pkg/core.py": MODULE.replace(WRONG, WRONG.replace("return high", "return 'pytest'"))})
    group = group_of([trajectory(0, short), trajectory(1, styles["comment"])])
    judged, _ = grade(group)
    assert judged[0].scores.approach == 1
    assert judged[1].scores.minimality == 5


def test_failed_members_are_contrast_not_candidates(styles: dict[str, bytes]):
    group = group_of(
        [
            trajectory(0, styles["print"]),
            trajectory(1, styles["clean"], status=Status.FAILED),
            trajectory(2, b"nonsense", status=Status.INVALID),
        ]
    )
    assert set(grade(group)[0]) == {0}


@pytest.mark.parametrize(
    ("turns", "precision", "flags"),
    [
        (VIEW_EDIT_SUBMIT, 5, set()),
        ((Turn("view pkg/other.py", ""), *VIEW_EDIT_SUBMIT), 4, set()),
        ((Turn("view clamp", ""), *VIEW_EDIT_SUBMIT), 5, set()),
        ((Turn("view Words.count", ""), *VIEW_EDIT_SUBMIT), 4, set()),
        ((Turn("view tests/test_core.py", ""), *VIEW_EDIT_SUBMIT), 5, set()),
        ((Turn("view pkg/core.py 6 20", ""), *VIEW_EDIT_SUBMIT), 4, set()),
        ((Turn("wiev", "?", malformed=True), *VIEW_EDIT_SUBMIT), 4, set()),
        ((Turn("view a.py", ""), Turn("view b.py", ""), Turn("view c.py", ""), *VIEW_EDIT_SUBMIT), 3, set()),
        ((*[Turn("view pkg/core.py", "")] * 3, *VIEW_EDIT_SUBMIT), 3, set()),
        ((*[Turn("view pkg/core.py", "")] * 5, *VIEW_EDIT_SUBMIT), 2, {Flag.SEVERE_PROCESS_ISSUE}),
    ],
)
def test_the_way_there_lowers_precision(styles: dict[str, bytes], turns, precision: int, flags: set[Flag]):
    group = group_of([trajectory(0, styles["clean"], turns=turns), trajectory(1, styles["comment"])])
    judged, _ = grade(group)
    assert (judged[0].scores.precision, set(judged[0].flags)) == (precision, flags)


def test_tests_edited_bars_tier_1(diff: Diff):
    files = {"pkg/core.py": FIXED, "tests/test_core.py": "def test_clamp():\n    assert True\n"}
    base = {
        "pkg/core.py": MODULE,
        "tests/test_core.py": "def test_clamp():\n    assert clamp(1, 2, 3) == 2\n",
    }
    judged, grades = grade(group_of([trajectory(0, diff(files))], base=base))
    assert Flag.SEVERE_PROCESS_ISSUE in judged[0].flags
    assert grades[0].tier == 2


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_permuting_members_permutes_the_result(styles: dict[str, bytes], data: st.DataObject):
    names = data.draw(st.lists(st.sampled_from(sorted(STYLES)), min_size=2, max_size=8))
    order = data.draw(st.permutations(range(len(names))))
    members = [trajectory(i, styles[name]) for i, name in enumerate(names)]
    judged, grades = grade(group_of(members))
    assert grade(group_of([members[i] for i in order])) == (judged, grades)
    # … and the numbers of the members carry no meaning either
    renamed, regraded = grade(group_of([trajectory(n, members[i].patch) for n, i in enumerate(order)]))
    for n, i in enumerate(order):
        assert renamed[n].scores == judged[i].scores
        assert (regraded[n].tier, regraded[n].rank, regraded[n].quality) == (
            grades[i].tier, grades[i].rank, grades[i].quality
        )  # fmt: skip


def test_a_bad_reference_names_the_task(styles: dict[str, bytes]):
    group = group_of([trajectory(0, styles["clean"])], task={"instance_id": "pkg__9", "patch": "nonsense"})
    with pytest.raises(ValueError, match="task pkg__9: its reference patch cannot be read"):
        StructuralGrader().grade(group)


def test_quality_of_single_trajectories(styles: dict[str, bytes], caplog: pytest.LogCaptureFixture):
    trajectories = [
        trajectory(0, styles["rewrite"]),
        trajectory(1, styles["clean"], status=Status.FAILED),
        trajectory(2, styles["clean"]),
        trajectory(3, b"nonsense"),
    ]
    task = {"instance_id": "pkg__1", "patch": styles["clean"].decode()}
    grades = grade_quality(trajectories, task=task, base_files={"pkg/core.py": MODULE}, **PAPER)
    assert [g and g.tier for g in grades] == [3, None, 1, None]
    assert "malformed patch" in caplog.text
