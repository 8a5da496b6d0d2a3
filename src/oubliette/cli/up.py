"""`oubliette up`: a server on this machine, with nothing to do before."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from oubliette.cli.options import AsJson, File, Home, settings
from oubliette.server.config import Settings

if TYPE_CHECKING:
    from oubliette.server.app import Ready


def up(
    *,
    home: Home = None,
    host: Annotated[str | None, Parameter(help="The address to listen on; else 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="The TCP port; else 8080; 0 takes a free one.")] = None,
    runtime: Annotated[
        Literal["bubblewrap", "process"] | None, Parameter(help="How boxes are made; else bubblewrap.")
    ] = None,
    unsafe_no_sandbox: Annotated[
        bool | None, Parameter(negative=(), help="Let any droid run without isolation. For throw-away machines only.")
    ] = None,
    file: File = None,
    as_json: AsJson = False,
    **others: Annotated[str, Parameter(help="Any other setting by its name: `--durability power`.")],
) -> None:
    """Run the server until it is told to stop (Ctrl-C), making its home first if there is none."""
    # Only here: help and other words need not load the server.
    import uvloop

    from oubliette.server.app import serve

    named = {"home": home, "host": host, "port": port, "runtime": runtime, "unsafe_no_sandbox": unsafe_no_sandbox}
    chosen = settings(file=file, **{name.replace("-", "_"): value for name, value in others.items()}, **named)

    def ready(started: "Ready") -> None:
        print(told_as_json(started, chosen) if as_json else told(started, chosen), flush=True)

    uvloop.run(serve(chosen, ready=ready))


def snippet(url: str, token: str | None) -> dict[str, Any]:
    """What an MCP client's configuration file wants to read."""
    headers = {"Authorization": f"Bearer {token or 'TOKEN'}"}
    return {"mcpServers": {"oubliette": {"type": "http", "url": url, "headers": headers}}}


def told_as_json(started: "Ready", chosen: Settings) -> str:
    what = {"url": started.url, "first_token": started.first_token, "home": str(chosen.home), "runtime": chosen.runtime}
    return json.dumps(what | snippet(started.url, started.first_token))


def told(started: "Ready", chosen: Settings) -> str:
    warning = " WITHOUT ISOLATION, for any droid" if chosen.unsafe_no_sandbox else ""
    token = (
        "There are tokens already. Another one: oubliette token create NAME"
        if started.first_token is None
        else f"The first admin token, shown this once:\n  {started.first_token}"
    )
    return (
        f"oubliette listens on {started.url}\n"
        f"  home {chosen.home}, boxes by {chosen.runtime}{warning}\n\n"
        f"{token}\n\n"
        f"For an MCP client:\n{json.dumps(snippet(started.url, started.first_token), indent=2)}\n\n"
        "Ctrl-C stops the server; droids in their boxes wait for it to come back."
    )
