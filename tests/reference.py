"""The reference pages in docs/reference/, made from the code: `./run python -m tests.reference` writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oubliette.server import config
from oubliette.server.caller_tools import ledger
from oubliette.server.operations.catalogue import OPERATIONS
from oubliette.server.operations.operation import Operation
from oubliette.server.operations.schemas import schema
from oubliette.server.sessions import lifecycle
from oubliette.wire import relay
from oubliette.wire.events import Known

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
NOTE = "<!-- Made from the code by `./run python -m tests.reference`; do not edit. -->\n\n"


def settings() -> str:
    lines = [
        "# Settings",
        "",
        "The file is `oubliette.toml` in the home, or what `--config` or `OUBLIETTE_CONFIG` names. In the environment",
        "a setting is `OUBLIETTE_` and its name in capitals, and it wins over the file; a flag of `oubliette up`, like",
        "`--idle-after-s 600`, wins over both. In these two a list is separated by commas. A name that is not here is",
        "refused.",
        "",
        "| setting | type | default | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {kind} | `{default}` | {what} |" for name, kind, default, what in config.table()]
    return "\n".join(lines) + "\n"


def operations() -> str:
    lines = [
        "# Operations",
        "",
        "Over MCP an operation is a tool by its name; in a box it is `oubliette_` and its name. Both show those that",
        "the key's scope allows. *Scope* is the least that is needed; *target* is what the gate looks up to decide;",
        "*in a box* is which keys may ask for it there: any, only one that a caller passed in (own), or none.",
        "",
        "A token has the scope `admin`, `write` or `read`, or is narrowed to one project: `project:<id>` writes there,",
        "`project:<id>:ro` reads. For a narrowed token nothing else is there, and a target of *everything* is refused.",
        "",
        "| operation | scope | target | in a box | |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| [`{one.name}`](#{one.name}) | {one.scope} | {_target(one)} | {_in_a_box(one)} | {_first(one.summary)} |"
        for one in OPERATIONS
    ]
    for one in OPERATIONS:
        lines += ["", f"## {one.name}", "", one.summary, "", *_parameters(schema(one.params))]
    return "\n".join(lines) + "\n"


def events() -> str:
    lines = [
        "# Events",
        "",
        "What a session's log holds. A reader sees one flat JSON object: `session_id`, `index`, `at` (seconds), `type`",
        "and the fields below; fields that are not set are left out. An event over 256 kB is pushed without its",
        "largest fields, which `left_out` then names: `session_events` from the index before it has it whole.",
    ]
    for tag, kind in Known.BY_TAG.items():
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__) or "none"
        lines += ["", f"## {tag}", "", *([kind.__doc__.strip(), ""] if kind.__doc__ else []), f"Fields: {fields}."]
    return "\n".join("\n".join(part.strip() for part in line.splitlines()) for line in lines) + "\n"


def errors() -> str:
    lines = [
        "# Errors",
        "",
        "The machine word that every error carries as `kind`, beside a text for people and `retryable`, whether the",
        "same request may succeed a moment later.",
        "",
        "| kind | what it means |",
        "| --- | --- |",
    ]
    return "\n".join(lines + [f"| `{kind}` | {what} |" for kind, what in relay.KINDS.items()]) + "\n"


def states() -> str:
    lines = ["# States", "", "Every move that there is; what is not here is refused.", ""]
    for title, moves in (
        ("A session", lifecycle.MOVES),
        ("A turn", lifecycle.TURN_MOVES),
        ("A call of a caller's tool", ledger.MOVES),
    ):
        lines += [f"## {title}", "", "| state | on | becomes |", "| --- | --- | --- |"]
        for state, ways in moves.items():
            lines += [f"| {state} | {on} | {to} |" for on, to in ways.items()] or [f"| {state} | | |"]
        lines.append("")
    return "\n".join(lines)


def _target(one: Operation[Any]) -> str:
    return "everything" if one.everywhere else one.target


def _in_a_box(one: Operation[Any]) -> str:
    if not one.inside:
        return "none"
    return "any" if one.derived else "own"


def _first(summary: str) -> str:
    return summary.split(". ")[0].rstrip(".") + "."


def _parameters(of: dict[str, Any]) -> list[str]:
    properties: dict[str, dict[str, Any]] = of.get("properties", {})
    if not properties:
        return ["No parameters."]
    needed = of.get("required", [])
    lines = ["| parameter | type | |", "| --- | --- | --- |"]
    for name, one in properties.items():
        required = " **Required.**" if name in needed else ""
        lines.append(f"| `{name}` | {_type(one)} | {_described(one)}{required} |")
    return lines


def _described(one: dict[str, Any]) -> str:
    found = [one.get("description", ""), *(_described(choice) for choice in one.get("anyOf", []))]
    return next((text for text in found if text), "").replace("\n", " ")


def _type(one: dict[str, Any]) -> str:
    if "enum" in one:
        return " or ".join(f"`{choice}`" for choice in one["enum"])
    if "anyOf" in one:
        return " or ".join(_type(choice) for choice in one["anyOf"] if choice.get("type") != "null")
    if "$ref" in one:
        return "object"
    if one.get("type") == "array":
        return f"list of {_type(one.get('items', {}))}"
    return str(one.get("type", "any"))


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "operations.md": operations,
    "events.md": events,
    "errors.md": errors,
    "states.md": states,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        FOLDER.joinpath(name).write_text(NOTE + page(), encoding="utf-8")


if __name__ == "__main__":
    main()
