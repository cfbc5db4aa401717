"""scripts/words: odd words in names, comments, messages and documents."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def words():
    path = str(ROOT / "scripts/words")
    loader = importlib.machinery.SourceFileLoader("words", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("words", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "/// Tells the pager.",
        'bail!("the guest was told to stop")',
        "let who_holds = holder();",
        "struct StillTold;",
        "fn let_go_of(&self)",
        "enum How {",
        "    begun: bool,",
        "// services end in order",
        "// it is refused by its name",
        "// the disk gives it up",
        "// nobody reads it",
        "// beside the guest",
        "// look at the image",
        "pub attic: Option<u64>,",
        "fail-over images",
        "// bring its pages",
    ],
)
def test_an_odd_word_is_found_in_comments_strings_and_names(words, line):
    hit = words.hits("crates/x/src/lib.rs", "//! A file.\n" + line + "\n")
    assert [(one.path, one.line) for one in hit] == [("crates/x/src/lib.rs", 2)], hit


@pytest.mark.parametrize(
    "line",
    [
        "// Whose memory it is.",
        "// besides that, in order to end",
        "// the order in which they end",
        "// look up the name, which looks like one",
        "fn lock(&self) -> Lock",
        "// brought up by the kernel, and brings the link up",
        "let intellectual = storytelling_foretold();",
        'let key = "attic";',
        'Command::new("chown").arg("nobody:nogroup")',
        "// the clean shutdown, the previous owner",
    ],
)
def test_a_usual_word_is_none(words, line):
    assert words.hits("crates/x/src/lib.rs", line + "\n") == []


def test_a_sentence_over_two_lines_is_read_as_one(words):
    text = "/// Here the guest goes\n/// on with its memory.\n"
    assert [(hit.line, hit.word) for hit in words.hits("a.rs", text)] == [(1, "goes on")]
    assert [hit.line for hit in words.hits("a.md", "one\nlet\ngo\n")] == [2]


def test_of_toml_only_comments_are_read(words):
    assert words.hits("a.toml", 'told = "who"\n') == []
    assert [hit.word for hit in words.hits("a.toml", "key = 1 # told\n")] == ["told"]


def test_each_allowed_use_has_a_reason_and_is_no_rule_less(words):
    assert all(allowed.reason for allowed in words.ALLOWED)
    assert not words.allowed("crates/x/src/lib.rs", "told", "// told")


def test_a_hit_ends_in_exit_status_1_and_is_printed(words, capsys, monkeypatch):
    monkeypatch.setattr(words, "tracked", lambda root: ["lab/tests/test_words.py", "scripts/words"])
    monkeypatch.setattr(words, "_ALLOWED", [])
    assert words.main(["lab/tests"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("lab/tests/test_words.py:") and " -> " in first
    assert words.main(["no/such/place"]) == 2


def test_no_tracked_file_has_an_odd_word(words):
    assert words.main([]) == 0
