"""The break-once table is complete, and what it names is there."""

import ast
from collections.abc import Iterator

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant
from tests.seeds import IDS


def marks(mutant: Mutant) -> Iterator[str]:
    """The entries that the mutant's test says it proves."""
    path, _, name = mutant.node.partition("::")
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name.partition("[")[0]:
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.seed":
                    yield from (ast.literal_eval(argument) for argument in call.args)


def test_every_entry_of_the_manifest_has_a_mutant() -> None:
    assert sorted(IDS) == sorted({mutant.id for mutant in MUTANTS})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutants_text_stands_once_in_its_file_and_its_test_proves_its_entry(mutant: Mutant) -> None:
    times = (ROOT / mutant.path).read_text().count(mutant.old)
    assert times == 1, f"its text stands {times} times in {mutant.path}: name the place anew in tests/mutants.py"
    assert mutant.new != mutant.old
    assert mutant.id in set(marks(mutant))
