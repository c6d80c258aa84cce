"""Codes of problems: the source and docs/problems.md have the same ones, and a code outlives what is said around it."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

from fivefold.job.config import SECTION_KEYS
from fivefold.layout.rules import RULES
from fivefold.support.errors import Problem, UserError
from tests.layers import modules, nodes

ROOT = Path(__file__).parents[2]


def codes_in(module: str) -> Iterator[str]:
    """Of `Problem(code, ...)` and of errors with a sentence and a code; what is filled in stands as an X."""
    errors = {node.name for node in nodes(module) if isinstance(node, ast.ClassDef) and _is_error(node)}
    for node in nodes(module):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        place = 0 if name == "Problem" else 1
        known = {"Problem", "UserError", "Damaged", "problem", *errors} | ({"super().__init__"} if errors else set())
        if name in known and len(node.args) > place:
            yield from _texts(node.args[place])


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Call(ast.Name("super")), "__init__"):
            return "super().__init__"
    return ""


def _is_error(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "UserError" for base in node.bases)


def _texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(parts):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in parts)
        case ast.IfExp():
            yield from _texts(node.body)
            yield from _texts(node.orelse)


SETTINGS = {f"{section}.{key}" for section, keys in SECTION_KEYS.items() for key in (*keys, "X")}


def same(code: str, row: str) -> bool:
    """Whether a row is that of a code; a name that is filled in, on either side, may be any."""
    if row.startswith("SETTING."):
        setting, _, what = code.rpartition(".")
        return what == row.partition(".")[2] and (setting.startswith("X") or setting in SETTINGS)
    if code.startswith("X"):
        return False
    code, row = re.sub(r"\bX\b", "[a-z_]+", code), re.sub("[A-Z]+", "X", row)
    return bool(re.fullmatch(code, row.replace("X", "x")))


def test_the_docs_have_the_codes_of_the_source_and_no_others() -> None:
    codes = {code for module in modules() for code in codes_in(module)} | RULES.keys()
    rows = re.findall(r"^\| `([\w.]+)` \| \S", (ROOT / "docs/problems.md").read_text(), re.M)
    assert len(rows) == len(set(rows))
    exact = codes & {*rows}
    codes_left, rows_left = codes - exact, [row for row in rows if row not in exact]
    assert [code for code in codes_left if not any(same(code, row) for row in rows)] == []
    assert [row for row in rows_left if not any(same(code, row) for code in codes)] == []
    assert all(re.fullmatch(r"[a-zX]\w*(\.\w+)+", code) for code in codes)


def test_no_sentence_is_raised_without_a_code() -> None:
    """Of sentences that stand where they are raised; of those in lists, tests/conftest.py sees to it."""
    bare = []
    for module in modules():
        own = {node.name for node in nodes(module) if isinstance(node, ast.ClassDef) and _is_error(node)}
        own -= {"UnpredictableRow"}  # accuracy/spelling.py: it has one code for all of its sentences
        for node in nodes(module):
            if not isinstance(node, ast.Call) or len(node.args) != 1:
                continue
            said = isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            if said and _called(node) in {"UserError", "Missing", "Damaged", *own}:
                bare.append(f"{module}:{node.lineno}")
    assert bare == []


def test_a_code_stays_with_its_sentence() -> None:
    first = UserError([Problem("layout.tp.heads", "tp=3\x1b"), "a remark"])
    assert (first.problems, first.codes) == (["tp=3\\x1b", "a remark"], ["layout.tp.heads"])
    assert [type(problem) for problem in first.problems] == [str, str]  # what encoders take
    sent = pickle.loads(pickle.dumps(first))
    assert (sent.problems, sent.codes) == (first.problems, first.codes)
    again = UserError(first.framed("job.toml: ", "; mend it"), "job.file")
    assert again.problems == ["job.toml: tp=3\\x1b; mend it", "job.toml: a remark; mend it"]
    assert again.codes == ["layout.tp.heads", "job.file"]
    flood = UserError(Problem("record.text", f"line {number}") for number in range(1000))
    assert (flood.codes[-1], set(flood.codes[:-1])) == ("problems.more", {"record.text"})
    assert UserError(flood.coded).codes == flood.codes
