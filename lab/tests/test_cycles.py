"""scripts/cycles: import circles between the modules of a Rust crate.

Two modules of one parent are in a circle if each uses something of the other, directly or through further modules. The
tests write small crates: a keyword argument is a file of `src`, so `lib="mod a;"` is src/lib.rs, `a__x` src/a/x.rs.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cycles():
    """Loads the script as a module. Its name has no .py, so an import statement cannot do that."""
    path = str(ROOT / "scripts/cycles")
    loader = importlib.machinery.SourceFileLoader("cycles", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("cycles", loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def find_circles(cycles, tmp_path):
    """Returns the circles of a crate that has these files, by the parent of their modules ("" is the crate)."""

    def find_circles(**files):
        for name, text in files.items():
            file = tmp_path / "src" / (name.replace("__", "/") + ".rs")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        edges = cycles.Crate(tmp_path / "src/lib.rs").edges()
        return {"::".join(parent): list(map(set, cycles.circles(pairs))) for parent, pairs in edges.items()}

    return find_circles


LIB = "pub mod a;\npub mod b;\n"


@pytest.mark.parametrize(
    "of_a",
    [
        "use crate::b::X;",
        "use super::b;",
        "use crate::{b as other};",
        "use crate::b::*;",
        "pub(crate) use crate::{\n    self,\n    b::{X, Y as _},\n};",
        "fn f() { crate::b::g() }",
        "fn f() { super::b::g() }",
        "mod inner { use super::super::b::X; }",
        "const C: char = '\"'; fn f<'a>(x: &'a str) -> crate::b::X { r#\"\"#; todo!() }",
    ],
)
def test_two_modules_that_import_each_other_are_a_circle(find_circles, of_a):
    """Module b uses a; module a uses b in each way that Rust has."""
    assert find_circles(lib=LIB, a=of_a, b="use crate::a::Y;") == {"": [{"a", "b"}]}


@pytest.mark.parametrize(
    "of_a",
    [
        "// use crate::b::X;\n/* /* */ crate::b::X */",
        'const TEXT: &str = "use crate::b::X;\\"crate::b::X";',
        "#[cfg(test)]\n#[allow(unused)]\nmod tests {\n    use crate::b::X;\n}",
        "#[cfg(test)]\nuse crate::b::{X, Y};\nfn f() {}",
        "#[cfg(test)]\nfn f<A, B>(a: A, b: B) -> crate::b::X { crate::b::X }",
        "enum E {\n    #[cfg(test)]\n    X(crate::b::X),\n    Y,\n}",
        "use b::X;",
        "use crate::a::inner::b;\nmod inner { pub mod b {} }",
    ],
)
def test_what_imports_nothing_is_no_circle(find_circles, of_a):
    """Comments, strings, tests and modules of the same name elsewhere do not make a use b."""
    assert not any(find_circles(lib=LIB, a=of_a, b="use crate::a::Y;").values())


def test_a_module_and_its_child_may_import_each_other(find_circles):
    """Only modules of the same parent count."""
    assert not any(find_circles(lib="mod a;", a="mod x;\nuse x::X;", a__x="use super::Y;\nuse crate::a::Z;").values())


def test_a_re_export_counts_as_its_origin(find_circles):
    """Uses of what the crate re-exports are uses of the module that has it."""
    lib = "mod a;\nmod b;\npub use a::A;\npub use b::*;\n"
    assert find_circles(lib=lib, a="use crate::B;", b="pub struct B;\nuse super::A;") == {"": [{"a", "b"}]}
    assert find_circles(lib=lib, a="pub struct A;\nuse crate::b::B;", b="use super::A;") == {"": [{"a", "b"}]}


def test_a_circle_of_three_in_children_of_modules_is_found(find_circles):
    files = {"a": "mod x;", "a__x": "use crate::b::y::Y;", "b": "pub mod y;\nmod z;", "b__z": "use crate::c::C;"}
    assert find_circles(lib=LIB + "mod c;\n", **files, b__y="", c="use crate::a::A;") == {"": [{"a", "b", "c"}]}


def test_no_crate_has_a_circle(cycles, capsys):
    assert cycles.main([]) == 0, capsys.readouterr().out
