"""The reference pages in docs/reference/, made from the code: `./run python -m tests.reference` writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from oubliette.server import config

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
NOTE = "<!-- Made from the code by `./run python -m tests.reference`; do not edit. -->\n\n"


def settings() -> str:
    lines = [
        "# Settings",
        "",
        "The file is `oubliette.toml` in the home, or what `--config` or `OUBLIETTE_CONFIG` names. In the environment",
        "a setting is `OUBLIETTE_` and its name in capitals, a list is separated by commas, and it wins over the file;",
        "a flag wins over both. A name in the file that is not here is refused.",
        "",
        "| setting | type | default | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {kind} | `{default}` | {what} |" for name, kind, default, what in config.table()]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {"settings.md": settings}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        FOLDER.joinpath(name).write_text(NOTE + page(), encoding="utf-8")


if __name__ == "__main__":
    main()
