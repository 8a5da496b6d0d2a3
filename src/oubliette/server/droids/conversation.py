"""An ACP conversation as it is stored: all that a server needs to go on where another one stopped.

| stage | waits for | then |
| --- | --- | --- |
| `initialize` | the answer to `initialize` | `session` |
| `session` | the answer to `session/new`, `session/resume` or `session/load` | `mode`, or `ready` without one |
| `mode` | the answer to `session/set_mode` | `ready` |
| `ready` | prompts | `session` again, before a prompt, for an agent that would not see that the tools changed |

Text is not in here: it would be written anew with every chunk. It lives in pieces beside the process.
"""

from typing import Literal

import msgspec

from oubliette.server.droids.peer import OpenRequests
from oubliette.server.droids.translation import Call

Stage = Literal["initialize", "session", "mode", "ready"]


class Waiting(msgspec.Struct, frozen=True):
    """A prompt that came before the conversation was open."""

    turn: int
    text: str


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    requests: OpenRequests
    stage: Stage = "initialize"
    needs_key: bool = False  # the session's key is part of `session/new`, and only in memory
    continues: str | None = None  # the agent's own session of an earlier process in this box
    method: str = "session/new"
    again: str | None = None  # how this agent opens a session that it had, if it can
    tools: str | None = None  # those that were declared when its session was opened last
    agent_session: str | None = None
    turn: int | None = None  # the open one
    last_turn: int = 0
    waiting: Waiting | None = None
    began_at: float | None = None  # the open turn, by the wall clock
    cancelled: str | None = None  # why the open turn was asked to stop: "asked", "silence" or "too_long"
    worked: bool = False  # whether the open turn said or called anything
    calls: dict[str, Call] = {}

    @property
    def is_replaying(self) -> bool:
        """Whether updates are history: a loaded session's come before the answer to the load."""
        return self.stage == "session" and self.method == "session/load"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Conversation).decode


def stored(conversation: Conversation) -> str:
    return _encode(conversation).decode()


def restored(text: str, epoch: int) -> Conversation:
    """What was stored, under this server's epoch: ids that it gives out were never given before."""
    conversation = _decode(text)
    requests = msgspec.structs.replace(conversation.requests, epoch=epoch)
    return msgspec.structs.replace(conversation, requests=requests)
