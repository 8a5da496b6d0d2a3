"""One gate in front of every door: may this actor do this, to that?

`offered` is what a door lists, `call` is what it runs, and both ask the same `allowed`. The project of a thing is
resolved from the thing. Every refused call leaves an audit row of its own, at whatever door and whatever was wrong with
it; what is done leaves one in its transaction.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from oubliette.server import audit, ids
from oubliette.server.errors import Forbidden, InvalidParams, NotFound, OublietteError, StorageFailed, UnknownTool
from oubliette.server.operations.catalogue import OPERATIONS
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.sessions.rows import Session
from oubliette.server.storage.database import Tx
from oubliette.server.tokens.token import Actor

logger = logging.getLogger(__name__)

NAMED_CHARS = 64
_TOOL = re.compile(r"[a-z]+(?:_[a-z]+)+")


def allowed(operation: Operation[Any], actor: Actor) -> bool:
    """Whether this actor may ask for this operation at all, whatever its target."""
    if not actor.scope.covers(operation.scope):
        return False
    if actor.inside and not operation.inside:
        return False
    if actor.derived and not operation.derived:
        return False
    return not (actor.project_id is not None and operation.everywhere)


class Gate:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._operations = {operation.name: operation for operation in OPERATIONS}

    def offered(self, actor: Actor) -> Sequence[Operation[Any]]:
        """What this actor may call, by name."""
        return [one for _, one in sorted(self._operations.items()) if allowed(one, actor)]

    def find(self, name: str) -> Operation[Any] | None:
        return self._operations.get(name)

    async def call(self, asked: Asked, name: str, arguments: bytes | dict[str, Any]) -> msgspec.Struct:
        """Run an operation to its end, or raise why not. `arguments` is its parameters, or their JSON."""
        try:
            operation, params = await self._admitted(asked, name, arguments)
            result = await operation.run(self._rooms, asked, params)
            return result if operation.wait is None else await operation.wait(self._rooms, asked, params, result)
        except Exception as failure:
            await self._refused(asked, name, arguments, failure)
            raise

    async def effect(self, asked: Asked, name: str, arguments: bytes) -> msgspec.Struct:
        """Run an operation without waiting for what comes of it."""
        try:
            operation, params = await self._admitted(asked, name, arguments)
            return await operation.run(self._rooms, asked, params)
        except Exception as failure:
            await self._refused(asked, name, arguments, failure)
            raise

    async def waited(self, asked: Asked, operation: Operation[Any], arguments: bytes, outcome: bytes) -> msgspec.Struct:
        """Wait for what comes of an effect whose outcome is known; the asker was admitted with it."""
        told = msgspec.json.decode(outcome, type=operation.result)
        if operation.wait is None:
            return told
        try:
            return await operation.wait(self._rooms, asked, _params(operation, arguments), told)
        except Exception as failure:
            await self._refused(asked, operation.name, arguments, failure)
            raise

    async def _admitted(self, asked: Asked, name: str, arguments: bytes | dict[str, Any]) -> tuple[Operation[Any], Any]:
        operation = self._operations.get(name)
        if operation is None:
            raise UnknownTool(f"no tool is named {name[:128]!r}")
        if not allowed(operation, asked.actor):
            raise Forbidden(f"{name} is not allowed for this token's scope ({asked.actor.reach})")
        params = _params(operation, arguments)
        await self._check_target(operation, asked.actor, params)
        return operation, params

    async def _check_target(self, operation: Operation[Any], actor: Actor, params: Any) -> None:
        """A narrowed token sees its project and nothing else; a derived key in it, its own tree of sessions."""
        if operation.target is Target.NOTHING:
            return
        session_id: str | None = None if operation.target is Target.PROJECT else params.session_id
        if session_id is None:
            if params.project_id is not None and not actor.reaches(params.project_id):
                raise NotFound(f"no project {params.project_id!r}: project_list shows them")
            return
        session = await self._rooms.sessions.get(session_id)
        if not actor.reaches(session.project_id):
            raise NotFound(f"no session {session_id!r}: session_list shows them")
        if operation.target is Target.SESSION_OR_PROJECT and params.project_id not in (None, session.project_id):
            raise NotFound(f"no session {session_id!r} in project {params.project_id!r}: leave project_id out")
        if actor.derived and actor.session_id is not None:
            await self._rooms.sessions.check_descends(session_id, actor.session_id)
        if operation.target is Target.OWNED_SESSION:
            check_owner(actor, session)

    async def _refused(self, asked: Asked, name: str, arguments: bytes | dict[str, Any], failure: Exception) -> None:
        """Leave a row of its own: what a refused operation wrote is gone with it, its audit row included.

        A database that does not take it is no reason to tell anybody something else than why they were refused.
        """
        if isinstance(failure, StorageFailed):
            return  # nor would this be written
        kind = failure.kind if isinstance(failure, OublietteError) else "internal"
        operation = name if name in self._operations else named(name)
        target = target_of(arguments)
        entry = audit.entry(
            asked.actor, door=asked.door, operation=operation, outcome=f"refused: {kind}", target=target
        )
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> None:
            await audit.write(tx, now, entry)

        try:
            await self._rooms.database.write(write)
        except StorageFailed as fault:
            logger.error("a refusal is not in the audit", extra={"operation": operation, "reason": fault.message})


def named(tool: str) -> str:
    """A tool that may not exist, as far as it reads as a name of one: else it may be anything, a key even."""
    told = tool[:NAMED_CHARS]
    return told if _TOOL.fullmatch(told) else "unknown"


def check_owner(actor: Actor, session: Session) -> None:
    if actor.principal != session.owner or actor.derived:
        raise Forbidden(f"only the token that started session {session.id} may do this")


def _params(operation: Operation[Any], arguments: bytes | dict[str, Any]) -> Any:
    try:
        if isinstance(arguments, dict):
            # By way of JSON: parameters that pass on free-form JSON hold it raw.
            arguments = msgspec.json.encode(arguments)
        return msgspec.json.decode(arguments, type=operation.params)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"invalid parameters: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParams(f"invalid parameters: not JSON ({error})") from None


class _Named(msgspec.Struct):
    session_id: Any = None
    project_id: Any = None


def target_of(arguments: bytes | dict[str, Any]) -> str | None:
    """What a refused call was about, as far as that reads as an id of ours: else it may be anything, a key even."""
    try:
        encoded = msgspec.json.encode(arguments) if isinstance(arguments, dict) else arguments
        named = msgspec.json.decode(encoded, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(named.session_id, str) and ids.SESSION.match(named.session_id):
        return named.session_id
    return named.project_id if isinstance(named.project_id, str) and ids.is_uuid(named.project_id) else None
