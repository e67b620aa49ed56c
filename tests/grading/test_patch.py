from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gagar_jax.grading.patch import apply, apply_all, count_lines, parse
from tests.grading.builders import FIXED, MODULE, Diff, git, repository

TEXTS = st.lists(
    st.sampled_from(["a", "b", "", "-- x", "++ y", "\\ z", "é", "\x0c", "c\r"]), max_size=12
).flatmap(lambda lines: st.sampled_from(["\n".join(lines), "\n".join(lines) + "\n"]))


def test_a_real_patch_applies_to_the_text_it_was_made_of(diff: Diff):
    ((file, base, after),) = apply_all(diff({"pkg/core.py": FIXED}), {"pkg/core.py": MODULE})
    assert (file.path, base, after) == ("pkg/core.py", MODULE, FIXED)
    assert [(x.number, x.text) for x in file.added] == [(14, "        return low")]
    assert [(x.number, x.text) for x in file.removed] == [(14, "        return high")]


@settings(max_examples=40, deadline=None)
@given(before=TEXTS, after=TEXTS)
def test_applying_gives_what_git_saw(tmp_path_factory: pytest.TempPathFactory, before: str, after: str):
    folder: Path = tmp_path_factory.mktemp("texts")
    (folder / "before").write_bytes(before.encode())
    (folder / "after").write_bytes(after.encode())
    try:
        git(folder, "diff", "--no-index", "before", "after")
    except subprocess.CalledProcessError as difference:  # that is how git reports one
        (file,) = parse(difference.stdout)
        assert not file.binary
        assert apply(file, before) == after
    else:
        assert before == after


def test_every_kind_of_change_is_read(diff: Diff):
    files = parse(
        diff(
            {
                "pkg/core.py": None,
                "new one.py": "x = 1\n",
                "naïve.txt": "a\n",
                "empty.py": "",
                "pkg/logo.bin": bytes(255),
                "added.bin": bytes(range(255, -1, -1)),
                "notes with space.txt": "a\nc\n",
            }
        )
    )
    kinds = {f.path: (f.new, f.deleted, f.binary) for f in files}
    assert kinds == {
        "pkg/core.py": (False, True, False),
        "new one.py": (True, False, False),
        "naïve.txt": (True, False, False),
        "empty.py": (True, False, False),
        "pkg/logo.bin": (False, False, True),
        "added.bin": (True, False, True),
        "notes with space.txt": (False, False, False),
    }


def test_a_rename_keeps_both_names(tmp_path: Path):
    repository(tmp_path / "work", {"a.py": MODULE})
    git(tmp_path / "work", "mv", "a.py", "b.py")
    (file,) = parse(git(tmp_path / "work", "diff", "--binary", "--cached", "-M"))
    assert (file.old_path, file.path, file.hunks) == ("a.py", "b.py", ())
    assert apply(file, MODULE) == MODULE


def test_lines_are_counted(diff: Diff):
    assert count_lines(diff({"pkg/core.py": FIXED, "new.py": "a\nb\n"})) == 4
    assert count_lines(b"") == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: b"hello\n" + p, "expected 'diff --git'"),
        (lambda p: p.replace(b"@@ -11,7 +11,7 @@", b"@@ nonsense @@"), "unreadable hunk header"),
        (lambda p: p.replace(b"-        return high", b"*        return high"), "starts with"),
        (lambda p: p[: p.rindex(b"\n", 0, -1) + 1], "ends in the middle"),
        (lambda p: p.replace(b"index ", b"wat "), "unknown line"),
    ],
)
def test_a_malformed_patch_says_where(diff: Diff, spoil, message: str):
    patch = diff({"pkg/core.py": FIXED})
    spoiled = spoil(patch)
    assert spoiled != patch
    with pytest.raises(ValueError, match=message):
        parse(spoiled)


def test_a_patch_for_another_text_is_refused(diff: Diff):
    patch = diff({"pkg/core.py": FIXED})
    with pytest.raises(ValueError, match=r"pkg/core\.py: the patch does not apply .* line 11"):
        list(apply_all(patch, {"pkg/core.py": FIXED}))
    with pytest.raises(ValueError, match="base text is missing"):
        list(apply_all(patch, {}))
