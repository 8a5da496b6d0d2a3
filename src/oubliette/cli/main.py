"""The command line: which words there are, and what becomes of a failure.

Exit codes: 0 it worked, 1 it failed, 2 it was asked wrongly. Nothing here prompts. Each group of commands is a file
of its own, read only when one of its words is used.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App, CycloptsError

from oubliette.server.errors import InvalidParams, NotConfigured, OublietteError

FAILED = 1
MISUSED = 2

app = App(
    name="oubliette",
    help="Coding agents in boxes, without network and secrets, using their caller's tools through one audited socket.",
    version=lambda: version("oubliette"),
    help_epilogue="Settings: `<home>/oubliette.toml`, then `OUBLIETTE_*` in the environment, then flags.",
    result_action="return_value",
)
app.command("oubliette.cli.up:up", name="up", help="Run the server on this machine, with nothing to do before.")
app.command("oubliette.cli.token:token", name="token", help="Make, list and revoke the keys to this installation.")
app.command("oubliette.cli.demo:demo", name="demo", help="Watch a droid in a box call its caller's tools.")


def run(words: Sequence[str]) -> int:
    try:
        code = app(list(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _told(f"{error}\nTry `oubliette --help`.", MISUSED)
    except (InvalidParams, NotConfigured) as error:
        return _told(error.message, MISUSED)
    except OublietteError as error:
        return _told(error.message, FAILED)
    except KeyboardInterrupt:
        return FAILED
    return code if isinstance(code, int) else 0


def _told(message: str, code: int) -> int:
    print(f"oubliette: {message}", file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))
