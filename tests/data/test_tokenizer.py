"""Text → ids → text, for code and for anything else; no text reaches a special id."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gagar_jax.data.tokenizer import ACT, END, SPECIALS, Tokenizer
from gagar_jax.types import UserError

SOURCE = (Path(__file__).parents[2] / "gagar_jax" / "types.py").read_text()
TEXTS = [SOURCE, "\n".join(f"{n}|{line}" for n, line in enumerate(SOURCE.splitlines(), 1))]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 700)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_inverts_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("special", SPECIALS)
def test_no_text_becomes_a_special_id(tokenizer: Tokenizer, special: str) -> None:
    ids = tokenizer.encode(f"x = 1{special}{special} # {special}\n")
    assert min(ids) >= len(SPECIALS)
    assert tokenizer.decode(ids) == f"x = 1{special}{special} # {special}\n"


def test_a_corpus_full_of_specials_teaches_none() -> None:
    tokenizer = Tokenizer.train(["<|act|><|end|>" * 500] * 5, 400)
    assert min(tokenizer.encode("<|act|> <|end|>")) >= len(SPECIALS)


def test_special_ids_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([ACT, *tokenizer.encode("ok"), END]) == "ok"


def test_a_code_window_is_cut_where_an_edit_needs_it(tokenizer: Tokenizer) -> None:
    cut = pieces(tokenizer, "12|    if value:\n113|        return self\n")
    assert cut[:4] == ["12", "|", "    ", "if"]
    start = cut.index("\n")
    assert cut[start : start + 5] == ["\n", "11", "3", "|", "        "]


def test_every_two_digit_number_is_one_token(tokenizer: Tokenizer) -> None:
    assert [n for n in range(100) if len(tokenizer.encode(f"{n}|")) != 2] == []


def test_the_same_texts_give_the_same_tokenizer_in_another_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gagar_jax.data.tokenizer import Tokenizer;"
        "Tokenizer.train([Path(sys.argv[1]).read_text()], 700).save(Path(sys.argv[2]))"
    )
    source = tmp_path / "source.txt"
    source.write_text(SOURCE)
    for name in ("a.json", "b.json"):
        subprocess.run([sys.executable, "-c", program, str(source), str(tmp_path / name)], check=True)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.vocab_size == tokenizer.vocab_size <= 700
    assert loaded.encode(SOURCE) == tokenizer.encode(SOURCE)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": {"vocab": {"a": 0}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_a_vocabulary_with_no_room_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_size is 300.*361"):
        Tokenizer.train(TEXTS, 300)
    assert Tokenizer.train(TEXTS, 361).vocab_size == 361


def test_training_is_quick() -> None:
    start = time.process_time()
    Tokenizer.train([f"{text}{n}" for n in range(20) for text in TEXTS], 1024)
    assert time.process_time() - start < 10


def test_a_lone_surrogate_does_not_stop_the_run(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a?b"
