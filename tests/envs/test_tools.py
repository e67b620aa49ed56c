"""The grammar of actions, and the editor on a real working copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.coding import actions, tools
from envs.coding.actions import Edit, Malformed, RunTests, Search, Submit, View, ViewLines, parse_action
from envs.coding.tools import Editor
from envs.coding.workspace import Template, Templates, WorkspacePathError
from tests.envs.tiny import SOURCE, tiny_tasks


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("test", RunTests()),
        ("submit", Submit()),
        ("  submit  ", Submit()),
        ("view clamp", View("clamp")),
        ("view Stack.push", View("Stack.push")),
        ("view tiny/__init__.py 3-9", ViewLines("tiny/__init__.py", 3, 9)),
        ("search a  b", Search("a  b")),
        ("edit 3", Edit(3, 3, ())),
        ("edit 3\n", Edit(3, 3, ())),
        ("edit 3\n\n", Edit(3, 3, ("",))),
        ("edit 3-5\n  x\ny", Edit(3, 5, ("  x", "y"))),
        ("edit 3\nx\n", Edit(3, 3, ("x",))),
        ("insert 0\nx", Edit(1, 0, ("x",))),
    ],
)
def test_actions(text: str, action: actions.Action) -> None:
    assert parse_action(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "nonsense",
        "edit",
        "edit x\ny",
        "edit 5-3\ny",
        "edit -1",
        "insert 3",
        "insert 1-2\nx",
        "view",
        "view a b",
        "view ../x 1-",
        "search",
        "test now",
        "submit\nedit 1",
        "edit 1" + "x" * 30_000,
        "edit 99999999999\nx",
        "edit 1\nx = '\ud800'",
    ],
)
def test_malformed_actions_say_why(text: str) -> None:
    action = parse_action(text)
    assert isinstance(action, Malformed)
    assert 3 < len(action.why) < 60


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_some_action(text: str) -> None:
    assert parse_action(text) is not None


def test_windows_fold_docstrings_and_number_real_lines() -> None:
    first, last = tools.locate(SOURCE, "clamp") or (0, 0)
    assert tools.render(SOURCE, first, last) == (
        "1|def clamp(value, low, high):\n"
        '2|    """...\n'
        "7|    if value < low:\n"
        "8|        return low\n"
        "9|    if value > high:\n"
        "10|        return high\n"
        "11|    return value"
    )


def test_a_method_is_found_by_either_name_and_its_docstring_too() -> None:
    text = "class A:\n    def f(self):\n        '''Doc.\n\n        More.\n        '''\n        return 1\n"
    assert tools.locate(text, "A.f") == tools.locate(text, "f") == (2, 7)
    assert tools.render(text, 2, 7) == '1|    def f(self):\n2|        """...\n6|        return 1'


def test_definitions_are_found_in_a_file_that_does_not_parse() -> None:
    text = "@deco\ndef f(a):\n    if a\n        return 1\n\n    return 2\n\ndef g():\n    pass\n"
    assert tools.locate(text, "f") == (2, 6)
    assert tools.locate(text, "h") is None


def test_cut_keeps_whole_lines_of_head_and_tail_within_the_limit() -> None:
    text = "\n".join(f"line {n}" for n in range(100))
    short = tools.cut(text, 120)
    assert len(short) <= 120
    assert short.startswith("line 0\nline 1\n")
    assert short.endswith("line 99")
    assert "lines cut]" in short
    assert len(tools.cut("x" * 500, 120)) <= 120
    assert tools.cut("short", 120) == "short"


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    from envs.coding.tasks import load_tasks

    templates = Templates(tiny_tasks())
    task = next(t for t in load_tasks(tiny_tasks()) if t["qualname"] == "Stack.push")
    yield templates.get(task)
    templates.close()


@pytest.fixture
def editor(template: Template) -> Iterator[Editor]:
    package = template.package
    workspace = template.workspace()
    yield Editor(workspace, sources=package.sources, tests=package.tests, observation_chars=480)
    workspace.close()


pytestmark = pytest.mark.confined


def window(editor: Editor) -> str:
    return editor.show().partition("\n")[2]


def test_view_search_and_their_failures(editor: Editor) -> None:
    assert editor.edit(Edit(1, 1, ("x",))) == "no window is open: view NAME first"
    assert editor.view("count_above").startswith("tiny/__init__.py count_above\n1|def count_above(")
    assert editor.view("test_clamp_edge").startswith("tests/test_tiny.py test_clamp_edge\n")
    assert editor.view("nothing") == "no function or class nothing"
    assert editor.view_lines("tests/test_tiny.py", 1, 1) == "tests/test_tiny.py 1-1\n" + (
        "1|from tiny import Stack, clamp, count_above"
    )
    assert editor.view_lines("tests/test_tiny.py", 900, 901).startswith("tests/test_tiny.py has lines 1-")
    assert editor.view_lines("nope.py", 1, 2) == "no file nope.py"
    assert editor.search("size = len").startswith("1 hit\ntiny/__init__.py:")
    assert editor.search("clamp").startswith("9 hits, first 4:\ntiny/__init__.py:")
    assert editor.search("qqq") == "no hits"


def test_edits_count_in_the_window_and_the_window_follows(editor: Editor) -> None:
    editor.view("count_above")
    assert editor.edit(Edit(2, 2, ("    total = 0  # sum", "    limit = limit"))) == "ok, 7 lines"
    assert window(editor).splitlines()[1:3] == ["2|    total = 0  # sum", "3|    limit = limit"]
    assert window(editor).splitlines()[-1] == "7|    return total"
    assert editor.edit(Edit(3, 3, ())) == "ok, 6 lines"
    assert editor.edit(Edit(7, 6, ("    # end",))) == "ok, 7 lines"
    assert editor.edit(Edit(7, 7, ("    # end",))) == "ok, nothing changed"
    assert editor.edit(Edit(8, 8, ("x",))) == "the window has lines 1-7"
    assert editor.edit(Edit(0, 0, ("x",))) == "the window has lines 1-7"
    expected = SOURCE.replace("total = 0", "total = 0  # sum").replace(
        "return total", "return total\n    # end"
    )
    now = editor.workspace.read("tiny/__init__.py") or ""
    cut = slice(expected.index("def count_above"), expected.index("class Stack"))
    assert expected[cut] in now


def test_syntax_errors_are_told_by_window_line_and_can_be_mended(editor: Editor) -> None:
    editor.view("Stack.top")
    good = (editor.workspace.read("tiny/__init__.py") or "").splitlines()
    assert editor.edit(Edit(2, 2, ("        if not self.items",))).startswith(
        "ok; syntax error at 2: expected ':'"
    )
    assert editor.edit(Edit(2, 2, ("      if not self.items:",))).startswith("ok; syntax error at ")
    assert editor.edit(Edit(2, 2, ("        if not self.items:",))) == "ok"
    assert (editor.workspace.read("tiny/__init__.py") or "").splitlines() == good


def test_an_indent_that_only_parses_alone_is_an_error(editor: Editor) -> None:
    editor.view("Stack.top")
    body = [line.partition("|")[2] for line in window(editor).splitlines()]
    assert "syntax error" in editor.edit(Edit(1, len(body), tuple("  " + line for line in body)))


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", ".git/config", "a/../../x", "tiny/.GIT/x", "a//b", "", "a\0b"]
)
def test_paths_out_of_the_working_copy_are_refused(editor: Editor, path: str) -> None:
    with pytest.raises(WorkspacePathError):
        editor.workspace.read(path)
    with pytest.raises(WorkspacePathError):
        editor.workspace.write(path, "x")


def test_links_are_not_followed(editor: Editor, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    root = editor.workspace.root
    os.symlink(secret, f"{root}/tiny/link.py")
    os.symlink(tmp_path, f"{root}/out")
    for path in ("tiny/link.py", "out/secret"):
        with pytest.raises(WorkspacePathError, match="through a link"):
            editor.workspace.read(path)
        with pytest.raises(WorkspacePathError, match="through a link"):
            editor.workspace.write(path, "gone")
    assert secret.read_text() == "secret"
    assert "link" in editor.view_lines("tiny/link.py", 1, 2)


def test_line_ends_and_a_missing_last_newline_are_kept(editor: Editor) -> None:
    editor.workspace.write("tiny/dos.py", "def dos():\r\n    a = 1\r\n    return a")
    editor.paths.append("tiny/dos.py")
    assert editor.view("dos") == "tiny/dos.py dos\n1|def dos():\n2|    a = 1\n3|    return a"
    assert editor.edit(Edit(2, 2, ("    a = 2",))) == "ok"
    assert editor.workspace.read("tiny/dos.py") == "def dos():\r\n    a = 2\r\n    return a"
    assert editor.edit(Edit(4, 3, ("    # more",))) == "ok, 4 lines"
    assert editor.workspace.read("tiny/dos.py") == "def dos():\r\n    a = 2\r\n    return a\r\n    # more\r\n"
