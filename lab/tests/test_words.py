"""Tests of scripts/words, which finds odd words in names, comments, messages and documents.

Each line of the first list has one odd word, in a place or a form that a simple search would miss. Each line of the
second list has a usual word that a rule must not take for an odd one. Paths such as crates/x/src/lib.rs do not exist:
`hits` takes a path only to choose how to read the text.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def words():
    """Loads the script as a module. Its name has no .py, so an import statement cannot do that."""
    path = str(ROOT / "scripts/words")
    loader = importlib.machinery.SourceFileLoader("words", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("words", loader))
    loader.exec_module(module)
    return module


# By what makes the line hard to find.
ODD_LINES = {
    "first word of a comment, capitalized": "/// Tells the pager.",
    "in a string": 'bail!("the guest was told to stop")',
    "one part of a name with underscores": "let who_holds = holder();",
    "one part of a name with capitals": "struct StillTold;",
    "two words, joined by an underscore": "fn let_go_of(&self)",
    "a whole type name that means nothing": "enum How {",
    "the name of a field": "    begun: bool,",
    "usual words that are odd together": "// services end in order",
    "odd words with others between them": "// it is refused by its name",
    "two odd words with one between them": "// the disk gives it up",
    "a word for a person": "// nobody reads it",
    "beside, but not besides": "// beside the guest",
    "look, but not look up": "// look at the image",
    "an old name of the retained cache": "pub attic: Option<u64>,",
    "an old name of the store": "fail-over images",
    "bring, but not bring up": "// bring its pages",
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_an_odd_word_is_found_in_comments_strings_and_names(words, line):
    hits = words.hits("crates/x/src/lib.rs", "//! A file.\n" + line + "\n")
    assert [(hit.path, hit.line) for hit in hits] == [("crates/x/src/lib.rs", 2)], hits


# By what makes the line look odd.
USUAL_LINES = {
    "whose, which contains who": "// Whose memory it is.",
    "besides, and in order to": "// besides that, in order to end",
    "the order in which": "// the order in which they end",
    "look up, and look like": "// look up the name, which looks like one",
    "self and Lock in one signature": "fn lock(&self) -> Lock",
    "bring up": "// brought up by the kernel, and brings the link up",
    "odd words inside longer words": "let intellectual = storytelling_foretold();",
    "a key in JSON": 'let key = "attic";',
    "the user nobody": 'Command::new("chown").arg("nobody:nogroup")',
    "the replacements themselves": "// the clean shutdown, the previous owner",
}


@pytest.mark.parametrize("line", USUAL_LINES.values(), ids=USUAL_LINES)
def test_a_usual_word_is_not_reported(words, line):
    assert words.hits("crates/x/src/lib.rs", line + "\n") == []


def test_an_odd_phrase_is_found_across_a_line_break(words):
    text = "/// Here the guest goes\n/// on with its memory.\n"  # the second comment marker is between the two words
    assert [(hit.line, hit.word) for hit in words.hits("a.rs", text)] == [(1, "goes on")]
    assert [hit.line for hit in words.hits("a.md", "one\nlet\ngo\n")] == [2]


def test_only_the_comments_of_toml_files_are_checked(words):
    assert words.hits("a.toml", 'told = "who"\n') == []
    assert [hit.word for hit in words.hits("a.toml", "key = 1 # told\n")] == ["told"]


def test_every_exception_gives_a_reason(words):
    assert all(exception.reason for exception in words.ALLOWED)


def test_an_exception_for_one_line_does_not_allow_the_word_elsewhere(words):
    assert not words.allowed("crates/x/src/lib.rs", "told", "// told")


def test_the_exit_status_is_1_for_a_hit_and_2_if_no_file_matches(words, capsys, monkeypatch):
    monkeypatch.setattr(words, "tracked", lambda root: ["lab/tests/test_words.py", "scripts/words"])
    monkeypatch.setattr(words, "_ALLOWED", [])  # without exceptions, the examples in this file are hits
    assert words.main(["lab/tests"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("lab/tests/test_words.py:") and " -> " in first
    assert words.main(["no/such/place"]) == 2


def test_no_tracked_file_has_an_odd_word(words):
    assert words.main([]) == 0
