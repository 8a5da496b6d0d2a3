"""The table of permissions."""

import pytest

from oubliette.server.droids import permissions
from oubliette.server.droids.permissions import AUTONOMY, CANCELLED, Decision, decide

# What the module's docstring prints.
TABLE = {
    ("read", "search", "think", "fetch", "other", None): ("low", "medium", "high"),
    ("edit", "move", "execute"): ("medium", "high"),
    ("delete", "switch_mode", "dream"): ("high",),
}
OPTIONS = [
    {"optionId": "forever", "kind": "allow_always"},
    {"optionId": "no", "kind": "reject_once"},
    {"optionId": "yes", "kind": "allow_once"},
]


@pytest.mark.parametrize("autonomy", [*AUTONOMY, "nonsense"])
@pytest.mark.parametrize("kinds, allowed_at", TABLE.items())
def test_the_table_holds(autonomy: str, kinds: tuple[str | None, ...], allowed_at: tuple[str, ...]) -> None:
    for kind in kinds:
        decision = decide(autonomy, kind, OPTIONS)
        assert decision.option_id == ("yes" if autonomy in allowed_at else "no"), (autonomy, kind)


def test_the_docstring_prints_the_table() -> None:
    printed = permissions.__doc__ or ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line][2:]
    head = ["off", "low", "medium", "high"]
    for row in rows:
        for kind in ("read", "search", "think", "fetch", "other", "edit", "move", "execute", "delete", "switch_mode"):
            if kind in row[0].replace(",", " ").split():
                allowed = [level for level, cell in zip(head, row[1:], strict=True) if cell == "allow"]
                assert allowed == [level for level in head if permissions.allows(level, kind)], kind


@pytest.mark.parametrize(
    "autonomy, kinds, word",
    [
        ("high", ["allow_always", "reject_once"], "allow_always"),
        ("medium", ["allow_always", "reject_once"], "reject_once"),
        ("off", ["allow_once", "reject_always"], "reject_always"),
        ("medium", ["allow_always"], "cancelled"),
        ("high", [], "cancelled"),
        ("high", ["allow_later"], "cancelled"),
    ],
)
def test_without_the_fitting_option_the_next_best_is_taken(autonomy: str, kinds: list[str], word: str) -> None:
    assert decide(autonomy, "read", [{"optionId": kind, "kind": kind} for kind in kinds]).word == word


def test_a_decision_is_worded_as_acp_has_it() -> None:
    assert Decision(word="allow_once", option_id="yes").outcome == {
        "outcome": {"outcome": "selected", "optionId": "yes"}
    }
    assert CANCELLED.outcome == {"outcome": {"outcome": "cancelled"}}


def test_options_of_the_wrong_shape_are_passed_over() -> None:
    assert decide("high", "read", [{"kind": "allow_once", "optionId": 7}, {}]) == CANCELLED
