from __future__ import annotations

import time
from pathlib import Path

import pytest

from gagar_jax.grading import facts as facts_module
from gagar_jax.grading import syntax
from gagar_jax.grading.facts import Facts, trajectory_facts
from gagar_jax.grading.findings import Found
from gagar_jax.grading.transcript import kind
from gagar_jax.types import Evidence, Turn
from tests.grading.builders import FIXED, MODULE, RIGHT, WRONG, Diff, repository, trajectory

BASE = {"pkg/core.py": MODULE, "tests/test_core.py": "def test_clamp():\n    assert clamp(1, 2, 3) == 2\n"}
FIX_LINE = "        return low\n"


def facts_of(diff: Diff, after: str, **kwargs) -> Facts:
    return trajectory_facts(trajectory(0, diff({"pkg/core.py": after}), **kwargs), BASE)


def test_a_one_line_fix_has_nothing_to_hold_against_it(diff: Diff):
    facts = facts_of(diff, FIXED)
    assert facts.found == {}
    assert facts.files == ("pkg/core.py",)
    assert facts.functions == ("pkg/core.py::clamp",)
    assert (facts.lines_added, facts.lines_removed, facts.patch_lines) == (1, 1, 2)
    assert (facts.turns, facts.generated_tokens, facts.syntax_valid) == (3, 2, True)
    (change,) = facts.changes
    assert (change.function, change.lines) == ("pkg/core.py::clamp", 2)
    assert change.share == pytest.approx(
        1 / 8
    )  # header, seven statements' lines; the docstring is not counted


def test_an_empty_patch_is_no_change(diff: Diff):
    facts = trajectory_facts(trajectory(0, b""), {})
    assert (facts.files, facts.patch_lines, facts.found) == ((), 0, {})


RETURN_COUNT = '        return len(re.findall(r"\\w+", self.text))\n'
GUARDED = f"        try:\n    {RETURN_COUNT}        except Exception:\n            return 0\n"
SNIFFED = '        if "pytest" in sys.modules:\n            return low\n        return high\n'


def before_fix(line: str) -> tuple[str, str]:
    """(old, new) text that puts a line before the fixed one."""
    return FIX_LINE, f"        {line}\n{FIX_LINE}"


LEFTOVERS = [
    (Found.PRINT, *before_fix("print(value)"), 14, "print(value)"),
    (Found.PRINT, *before_fix("pprint.pprint(value)"), 14, "pprint.pprint(value)"),
    (Found.DEBUGGER, *before_fix("breakpoint()"), 14, "breakpoint()"),
    (Found.DEBUGGER, *before_fix("pdb.set_trace()"), 14, "pdb.set_trace()"),
    (Found.DEBUGGER, "import re\n", "import re\nimport pdb\n", 4, "import pdb"),
    (Found.COMMENT, *before_fix("# below the range"), 14, "# below the range"),
    (Found.COMMENT, FIX_LINE, "        return low  # fixed\n", 14, "return low  # fixed"),
    (Found.COMMENTED_CODE, *before_fix("# return high"), 14, "# return high"),
    (Found.COMMENTED_CODE, *before_fix("# value = max(value, low)"), 14, "# value = max(value, low)"),
    (Found.COMMENTED_CODE, *before_fix("# if value < high:"), 14, "# if value < high:"),
    (Found.UNREACHABLE, FIX_LINE, FIX_LINE + "        return high\n", 15, "return high"),
    (Found.UNREACHABLE, *before_fix("if False: value()"), 14, "if False: value()"),
    (Found.UNUSED_ASSIGNMENT, *before_fix("old = high"), 14, "old = high"),
    (Found.NO_EFFECT, *before_fix("pass"), 14, "pass"),
    (Found.NO_EFFECT, *before_fix("value = value"), 14, "value = value"),
    (Found.NO_EFFECT, *before_fix('value; "note"'), 14, 'value; "note"'),
    (Found.IMPORT, "import re\n", "import re\nimport math\n", 4, "import math"),
    (Found.DEPENDENCY, "import re\n", "import re\nimport numpy\n", 4, "import numpy"),
    (Found.SIGNATURE, "(value, low, high)", "(value, low, high, strict=False)", 6, None),
    (Found.CHECK_REMOVED, '        raise ValueError("empty range")\n', "        return low\n", 12, None),
    (Found.BROAD_EXCEPT, RETURN_COUNT, GUARDED, 27, "except Exception:"),
    (Found.FUNCTION_REMOVED, "    def count(self):\n", "    def size(self):\n", 24, None),
    (Found.SYNTAX_ERROR, "    return value\n", "    return value)\n", 17, "return value)"),
    (Found.SPECIAL_CASE, FIX_LINE, SNIFFED, 14, None),
]


@pytest.mark.parametrize(("found", "old", "new", "line", "text"), LEFTOVERS)
def test_each_finding_is_detected_and_shown(diff: Diff, found: Found, old: str, new: str, line, text):
    assert old in FIXED
    facts = facts_of(diff, FIXED.replace(old, new))
    (evidence,) = facts.found[found]
    assert evidence.where == f"pkg/core.py:{line}"
    assert text is None or evidence.text == text
    assert facts.syntax_valid == (found is not Found.SYNTAX_ERROR)


def test_what_was_there_before_is_not_added(diff: Diff):
    noisy = MODULE.replace(
        "    if value < low:\n", "    print(value)  # shown\n    pass\n    if value < low:\n"
    )
    patch = diff({"pkg/core.py": noisy})
    assert set(trajectory_facts(trajectory(0, patch), BASE).found) == {
        Found.PRINT,
        Found.COMMENT,
        Found.NO_EFFECT,
    }
    # The other way round it is taken away; and a changed line that keeps its print has added none.
    kept = noisy.replace("print(value)", "print(low)").replace(WRONG, RIGHT)
    added, removed = (10, 14), (10, 14)
    lines = noisy.split("\n")
    numbers = tuple(i for i, line in enumerate(lines, 1) if line != kept.split("\n")[i - 1])
    assert len(numbers) == len(added) == len(removed)
    assert syntax.compare(noisy, kept, numbers, numbers).proofs == ()


def test_files_are_classified(diff: Diff):
    patch = diff(
        {
            "pkg/core.py": FIXED,
            "pkg/logo.bin": bytes(200),
            "tests/test_core.py": "def test_clamp():\n    pass\n",
            "tests/test_new.py": "x = 1\n",
            "notes.md": "print(1)\n",
        }
    )
    facts = trajectory_facts(trajectory(0, patch), BASE)
    assert facts.found[Found.TEST_EDITED] == (Evidence("patch", "tests/test_core.py:2", "pass"),)
    assert facts.found[Found.BINARY] == (Evidence("file", "pkg/logo.bin", ""),)
    assert {e.where for e in facts.found[Found.NEW_FILE]} == {"tests/test_new.py:1", "notes.md:1"}
    assert Found.PRINT not in facts.found  # a document is not code


def test_a_rewrite_shows_its_share(diff: Diff):
    body = FIXED[FIXED.index("    if low > high") : FIXED.index("class Words")]
    facts = facts_of(
        diff,
        FIXED.replace(
            body,
            "    smallest, largest = low, high\n    if smallest > largest:\n"
            '        raise ValueError("an empty range")\n    return max(smallest, min(largest, value))\n\n\n',
        ),
    )
    (change,) = facts.changes
    assert change.share == 7 / 8  # all but the header
    assert change.lines == 7 + 5 - 1 or change.lines == 7 + 4


BRANCH = '        if self.text == "two words":\n            return 2\n'
COUNT = '        return len(re.findall(r"\\w+", self.text))\n'


@pytest.mark.parametrize(
    ("observation", "action", "found"),
    [
        ("E  assert count('two words') == 2", "edit pkg/core.py", Found.SPECIAL_CASE),
        ("1 failed", 'edit pkg/core.py\n+ if self.text == "two words"', Found.LITERAL_BRANCH),
    ],
)
def test_answering_a_test_input_needs_the_input_to_have_been_seen(diff: Diff, observation, action, found):
    turns = [Turn("test", observation), Turn(action, "two words"), Turn("submit", "")]
    facts = facts_of(diff, MODULE.replace(COUNT, BRANCH + COUNT), turns=turns)
    assert [e.text for e in facts.found[found]] == ['if self.text == "two words":']
    assert {Found.SPECIAL_CASE, Found.LITERAL_BRANCH} & facts.found.keys() == {found}


def test_a_table_of_answers_needs_no_witness(diff: Diff):
    facts = facts_of(diff, MODULE.replace(COUNT, BRANCH + BRANCH.replace("two words", "one more") + COUNT))
    assert len(facts.found[Found.SPECIAL_CASE]) == 2


@pytest.mark.parametrize(
    "branch", ["if value == 0:\n            return 0", 'if value == "":\n            return 1']
)
def test_ordinary_edge_cases_are_not_special_cases(diff: Diff, branch: str):
    facts = facts_of(diff, MODULE.replace(COUNT, f"        value = self.text\n        {branch}\n" + COUNT))
    assert facts.found == {}


def test_the_process_is_read_from_the_transcript(diff: Diff):
    turns = [
        Turn("view pkg/core.py", "…"),
        Turn("view pkg/core.py", "…"),  # 2: repeated
        Turn("view pkg/other.py", "…"),  # 3: needless
        Turn("view tests/test_core.py", "…"),
        Turn("run_tests", "1 failed"),
        Turn("edit pkg/core.py 14\n        return min(low, high)", "edited"),  # 6: overwritten
        Turn("run_tests", "1 failed"),  # after an edit: no repetition
        Turn("edlt pkg/core.py", "no such action", malformed=True),  # 8
        Turn("edit pkg/core.py 14\n        return low", "edited"),
        Turn("submit", ""),
    ]
    facts = facts_of(diff, FIXED, turns=turns)
    steps = {found: [e.where for e in evidence] for found, evidence in facts.found.items()}
    assert steps == {
        Found.REPEATED_CALL: ["step 2"],
        Found.NEEDLESS_VIEW: ["step 3"],
        Found.MALFORMED: ["step 8"],
        Found.OVERWRITTEN_EDIT: ["step 6"],
    }
    assert facts.turns == 10


def test_edits_by_line_number_are_followed(diff: Diff):
    """Actions that name no file and hold only the new lines, and a view by a function's name."""
    turns = [
        Turn("view clamp", "…"),
        Turn("edit 9", "deleted"),  # writes nothing: nothing to look for
        Turn("edit 9\n        return min(low, high)", "ok"),  # 3: overwritten by 4
        Turn("edit 9\n        return low", "ok"),
        Turn("view Words", "…"),  # 5: the patch leaves it alone
        Turn("submit", ""),
    ]
    found = facts_of(diff, FIXED, turns=turns).found
    steps = {kind: [e.where for e in evidence] for kind, evidence in found.items()}
    assert steps == {Found.OVERWRITTEN_EDIT: ["step 3"], Found.NEEDLESS_VIEW: ["step 5"]}


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("view a.py 1 9", "view"),
        ('<edit path="view.py">\nrun', "edit"),
        ('{"tool": "run_tests"}', "test"),
        ("```bash\nls\n```", "other"),
        ("SUBMIT", "submit"),
        ("", "other"),
    ],
)
def test_kinds_of_action(action: str, expected: str):
    assert kind(action) == expected


def test_a_bad_patch_names_the_trajectory(diff: Diff):
    with pytest.raises(ValueError, match=r"pkg__1 group 0 member 3: malformed patch, line 1"):
        trajectory_facts(trajectory(3, b"nonsense"), BASE)
    with pytest.raises(ValueError, match=r"member 3: pkg/core\.py: .*missing"):
        trajectory_facts(trajectory(3, diff({"pkg/core.py": FIXED})), {})


@pytest.mark.parametrize(("found", "old", "new", "line", "text"), LEFTOVERS)
def test_cutting_functions_out_finds_what_whole_modules_show(
    diff: Diff, monkeypatch: pytest.MonkeyPatch, found: Found, old: str, new: str, line, text
):
    patch = diff({"pkg/core.py": FIXED.replace(old, new)})
    quick = trajectory_facts(trajectory(0, patch), BASE)
    syntax.compare.cache_clear()
    facts_module._file_facts.cache_clear()
    monkeypatch.setattr(syntax, "local_units", lambda *_: None)
    assert trajectory_facts(trajectory(0, patch), BASE) == quick


@pytest.mark.parametrize("extra", ["", "import m{i}\n"])
def test_a_group_of_sixteen_is_quick(tmp_path: Path, extra: str):
    """Sixteen different patches of a thousand lines: about 10 ms; the bound is for busy machines."""
    filler = "".join(
        f"\n\ndef helper_{i}(a, b):\n    if a:\n        return [a, b, {i}]\n    return b\n"
        for i in range(160)
    )
    base = MODULE + filler
    diff = repository(tmp_path / "work", {"pkg/core.py": base})
    members = []
    for i in range(16):
        after = FIXED.replace(FIX_LINE, f"        note_{i} = {i}\n" + FIX_LINE) + filler
        after = after.replace("import re\n", "import re\n" + extra.format(i=i))
        members.append(trajectory(i, diff({"pkg/core.py": after})))
    start = time.thread_time()
    found = [trajectory_facts(t, {"pkg/core.py": base}) for t in members]
    seconds = time.thread_time() - start
    assert all(f.count(Found.UNUSED_ASSIGNMENT) == 1 for f in found)
    assert seconds < 0.1
