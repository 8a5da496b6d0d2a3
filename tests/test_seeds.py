"""Nothing that was asked for is without a test, and no test claims to prove what nobody asked for."""

import ast
from collections import Counter
from pathlib import Path

from tests.seeds import IDS, MANIFEST

TESTS = Path(__file__).parent


def claims() -> Counter[str]:
    """Every id in a `pytest.mark.seed(...)` of the tests, and how often it stands there."""
    found: Counter[str] = Counter()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.seed":
                found.update(ast.literal_eval(argument) for argument in node.args)
    return found


def test_ids_are_unique_and_every_entry_says_what_happens() -> None:
    assert [name for name, times in Counter(IDS).items() if times > 1] == []
    assert all(len(entry.behaviour) > 15 and entry.source for entry in MANIFEST)


def test_every_entry_has_a_test() -> None:
    assert sorted(set(IDS) - set(claims())) == []


def test_every_marker_names_an_entry() -> None:
    assert sorted(set(claims()) - set(IDS)) == []
