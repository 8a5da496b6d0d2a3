"""What an agent that asks may do, by the session's autonomy and the kind of the tool.

| kind of tool (ACP)                             | off  | low   | medium | high  |
| ---------------------------------------------- | ---- | ----- | ------ | ----- |
| read, search, think, fetch                     | deny | allow | allow  | allow |
| other (MCP tools, the caller's own among them) | deny | allow | allow  | allow |
| edit, move, execute                            | deny | deny  | allow  | allow |
| delete, switch_mode, and kinds unknown to us   | deny | deny  | deny   | allow |

A permission is for one call: the option is chosen by its kind, `allow_once` or `reject_once`, never by its place or
id. Where an agent offers no such option, `allow_always` is taken at `high` only and `reject_always` at any level;
with nothing that fits, the request is answered as cancelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOOKING = frozenset({"read", "search", "think", "fetch", "other"})
_WORKING = _LOOKING | {"edit", "move", "execute"}
AUTONOMY: Mapping[str, frozenset[str] | None] = {
    "off": frozenset(),
    "low": _LOOKING,
    "medium": _WORKING,
    "high": None,  # everything
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    word: str  # the kind of the option that was chosen, or "cancelled"
    option_id: str | None

    @property
    def outcome(self) -> dict[str, Any]:
        """As ACP carries it."""
        if self.option_id is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": self.option_id}}


CANCELLED = Decision(word="cancelled", option_id=None)


def allows(autonomy: str, kind: object) -> bool:
    """An autonomy that is not in the table allows nothing."""
    allowed = AUTONOMY.get(autonomy, frozenset())
    return allowed is None or (kind if kind is not None else "other") in allowed


def decide(autonomy: str, kind: object, options: Sequence[Mapping[str, Any]]) -> Decision:
    """Choose among the options that an agent offers."""
    if allows(autonomy, kind):
        wanted = ("allow_once", "allow_always") if autonomy == "high" else ("allow_once",)
    else:
        wanted = ()
    by_kind = {option.get("kind"): option.get("optionId") for option in reversed(options)}
    for word in (*wanted, "reject_once", "reject_always"):
        option_id = by_kind.get(word)
        if isinstance(option_id, str):
            return Decision(word=word, option_id=option_id)
    return CANCELLED
