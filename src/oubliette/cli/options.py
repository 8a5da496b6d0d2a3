"""Flags that several commands share."""

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from oubliette.server.config import Settings, read

Home = Annotated[
    Path | None,
    Parameter(name="--home", help="The folder of the installation; else OUBLIETTE_HOME, else ~/.oubliette."),
]
File = Annotated[
    Path | None, Parameter(name="--config", help="A settings file to read instead of `<home>/oubliette.toml`.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Answer in JSON.")]


def settings(*, file: Path | None = None, **flags: Any) -> Settings:
    return read(os.environ, flags, file=file)
