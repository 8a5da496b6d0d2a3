"""Parameters that several operations share."""

from typing import Annotated

from msgspec import Meta

from oubliette.server.sessions.messages import Autonomy

ChosenAutonomy = Annotated[
    Autonomy,
    Meta(
        description="What a droid that asks for permission is allowed: off nothing, low to look and to call tools,"
        " medium to edit and run commands too, high everything."
    ),
]
