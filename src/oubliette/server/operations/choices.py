"""Parameters that several operations share."""

from typing import Annotated

from msgspec import Meta

from oubliette.server.limits import LIST_MAX, OFFSET_MAX
from oubliette.server.sessions.messages import Autonomy

ChosenAutonomy = Annotated[
    Autonomy,
    Meta(
        description="What a droid that asks for permission is allowed: off nothing, low to look and to call tools,"
        " medium to edit and run commands too, high everything."
    ),
]
Limit = Annotated[int, Meta(ge=1, le=LIST_MAX, description="At most so many.")]
Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX, description="Skip so many: the next page is offset + limit.")]
