"""`oubliette token`: the keys to this installation."""

import json
import time
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from oubliette.cli.local import ask
from oubliette.cli.options import AsJson, File, Home, settings

token = App(name="token", help="Make, list and revoke the keys to this installation.")


@token.command
def create(
    name: Annotated[str, Parameter(help="What it is for; `revoke` takes it too.")],
    *,
    scope: Annotated[Literal["admin", "write", "read"], Parameter(help="What its bearer may do.")] = "write",
    project: Annotated[str | None, Parameter(help="Narrow it to this project, by id.")] = None,
    days: Annotated[float | None, Parameter(help="Let it expire after so many days; else it does not.")] = None,
    home: Home = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and show it, this once."""
    expires_at = None if days is None else time.time() + days * 86_400
    params = {"name": name, "scope": scope, "project_id": project, "expires_at": expires_at}
    made = ask(settings(home=home, file=file), "token_create", **params)
    print(json.dumps(made) if as_json else f"{made['token']}\n")


@token.command(name="list")
def list_(*, home: Home = None, file: File = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    listed = ask(settings(home=home, file=file), "token_list")
    print(json.dumps(listed) if as_json else _table(listed["tokens"]))


@token.command
def revoke(
    token: Annotated[str, Parameter(help="Its id (tok_…) or its name.")],
    *,
    home: Home = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """End a token at once, and every stream that it opened within a second."""
    revoked = ask(settings(home=home, file=file), "token_revoke", token=token)
    print(json.dumps(revoked) if as_json else f"revoked {token}")


def _table(tokens: list[dict[str, Any]]) -> str:
    rows = [("ID", "NAME", "SCOPE", "STATE")]
    rows += [(one["id"], one["name"], one["scope"], "revoked" if one.get("revoked_at") else "live") for one in tokens]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
