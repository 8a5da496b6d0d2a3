"""`oubliette token`: the keys to this installation."""

import json
import math
import sys
import time
from typing import Annotated, Any

from cyclopts import App, Parameter

from oubliette.cli.local import ask
from oubliette.cli.options import AsJson, File, Home, settings
from oubliette.server.errors import InvalidParams
from oubliette.server.limits import LIST_MAX

DAY_S = 86_400.0

token = App(name="token", help="Make, list and revoke the keys to this installation.")


@token.command
def create(
    name: Annotated[str, Parameter(help="What it is for; `revoke` takes it too.")],
    *,
    scope: Annotated[
        str,
        Parameter(help="What its bearer may do: admin, write, read; in one project project:<id> or project:<id>:ro."),
    ] = "write",
    days: Annotated[
        float | None, Parameter(help="Let it expire after so many days; else it lives until revoked.")
    ] = None,
    home: Home = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and show it, this once: alone on standard output, so that a script can take it."""
    expires_in_s = None if days is None else days * DAY_S
    if expires_in_s is not None and not math.isfinite(expires_in_s):
        # JSON knows no such number: it would be left out, and the token would live for ever.
        raise InvalidParams(f"--days {days:g}: not a number of days")
    made = ask(settings(home=home, file=file), "token_create", name=name, scope=scope, expires_in_s=expires_in_s)
    if as_json:
        print(json.dumps(made))
    else:
        print(made["token"])
        print(f"{made['id']} ({made['scope']}); it is not shown again", file=sys.stderr)


@token.command(name="list")
def list_(*, home: Home = None, file: File = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    chosen, tokens = settings(home=home, file=file), list[dict[str, Any]]()
    while len(page := ask(chosen, "token_list", limit=LIST_MAX, offset=len(tokens))["tokens"]) == LIST_MAX:
        tokens += page
    tokens += page
    print(json.dumps({"tokens": tokens}) if as_json else _table(tokens, time.time()))


@token.command
def revoke(
    which: Annotated[str, Parameter(help="Its id (tok_…) or its name.")],
    *,
    home: Home = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """End a token at once, and its streams within a second."""
    revoked = ask(settings(home=home, file=file), "token_revoke", token_id=which)
    print(json.dumps(revoked) if as_json else f"revoked {revoked['id']} ({revoked['name']})")


def _table(tokens: list[dict[str, Any]], now: float) -> str:
    rows = [("ID", "NAME", "SCOPE", "ENDS IN", "STATE", "CREATED", "LAST USED")]
    rows += [
        (
            one["id"],
            one["name"],
            one["scope"],
            f"…{one['hint']}",
            _state(one, now),
            _day(one["created_at"]),
            _day(one["last_used_at"]),
        )
        for one in tokens
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _state(one: dict[str, Any], now: float) -> str:
    if one["revoked_at"] is not None:
        return "revoked"
    return "expired" if one["expires_at"] is not None and one["expires_at"] <= now else "live"


def _day(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d", time.localtime(at))
