"""The names of what the facts can find, each with the line or step that proves it. Nothing detects here."""

from __future__ import annotations

import enum


class Found(enum.StrEnum):
    """One kind of finding. "Added" means more of it in a function than before, on a line the patch adds."""

    # in the patch, any file
    NEW_FILE = "new_file"
    BINARY = "binary"
    TEST_EDITED = "test_edited"  # an existing test file is changed or deleted
    SYNTAX_ERROR = "syntax_error"  # a Python file parsed before and does not now
    # left over
    PRINT = "print"
    DEBUGGER = "debugger"  # breakpoint(), set_trace(), import pdb
    COMMENT = "comment"
    COMMENTED_CODE = "commented_code"
    UNREACHABLE = "unreachable"  # after return, raise, break, continue; under `if False`
    UNUSED_ASSIGNMENT = "unused_assignment"
    NO_EFFECT = "no_effect"  # `pass` beside other statements, `x = x`, a bare constant
    # reach
    IMPORT = "import"
    DEPENDENCY = "dependency"  # an import of neither the standard library nor anything the file knew
    SIGNATURE = "signature"  # an existing function's parameters changed
    FUNCTION_REMOVED = "function_removed"
    BROAD_EXCEPT = "broad_except"  # bare, Exception or BaseException
    CHECK_REMOVED = "check_removed"  # a function raises or asserts less often than before
    LITERAL_BRANCH = "literal_branch"  # one literal input is answered by a literal
    SPECIAL_CASE = "special_case"  # … that a tool reply had shown, or several, or a test run is sniffed out
    # in the transcript
    MALFORMED = "malformed"
    REPEATED_CALL = "repeated_call"  # the same action again with no edit in between
    NEEDLESS_VIEW = "needless_view"  # of a file that is neither changed nor a test
    OVERWRITTEN_EDIT = "overwritten_edit"  # an edit of which the final patch keeps no line
