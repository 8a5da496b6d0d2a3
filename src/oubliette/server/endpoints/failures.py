"""The one table of errors on the wire: for JSON-RPC, HTTP and MCP alike.

A domain error is translated here and nowhere else. What is not ours is a bug: it is logged with its traceback, once,
and answered as an internal error without a word of it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from oubliette.server import errors
from oubliette.wire import jsonrpc
from oubliette.wire.relay import ErrorData

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Codes:
    rpc: int
    http: HTTPStatus


CODES: Mapping[type[errors.OublietteError], Codes] = {
    errors.Unauthenticated: Codes(jsonrpc.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED),
    errors.Forbidden: Codes(jsonrpc.FORBIDDEN, HTTPStatus.FORBIDDEN),
    errors.NotFound: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.NOT_FOUND),
    errors.InvalidParams: Codes(jsonrpc.INVALID_PARAMS, HTTPStatus.BAD_REQUEST),
    errors.InvalidArguments: Codes(jsonrpc.INVALID_PARAMS, HTTPStatus.BAD_REQUEST),
    errors.UnknownTool: Codes(jsonrpc.INVALID_PARAMS, HTTPStatus.NOT_FOUND),
    errors.Conflict: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.CONFLICT),
    errors.CallKeyReused: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.CONFLICT),
    errors.TooMany: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.TOO_MANY_REQUESTS),
    errors.TooLarge: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    errors.Purged: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.GONE),
    errors.CallFailed: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.CallTimeout: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.GATEWAY_TIMEOUT),
    errors.CallerGone: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.CallerError: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.CallCancelled: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.CONFLICT),
    errors.ClientGone: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.OutcomeUnknown: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.MethodUnknown: Codes(jsonrpc.METHOD_NOT_FOUND, HTTPStatus.NOT_FOUND),
    errors.UpgradeRequired: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.UPGRADE_REQUIRED),
    errors.NotConfigured: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE),
    errors.BoxFailed: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.DroidFailed: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.BAD_GATEWAY),
    errors.StorageFailed: Codes(jsonrpc.SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE),
}

INTERNAL = "internal error: the server's log has the details"


def as_rpc(failure: Exception) -> jsonrpc.ErrorObject:
    """An exception as a JSON-RPC error."""
    if not isinstance(failure, errors.OublietteError):
        logger.error("an unexpected error reached a door", exc_info=failure)
        return problem(jsonrpc.INTERNAL_ERROR, "internal", INTERNAL)
    data = ErrorData(kind=failure.kind, retryable=failure.retryable, details=dict(failure.details) or None)
    return jsonrpc.ErrorObject(code=CODES[type(failure)].rpc, message=failure.message, data=_plain(data))


def problem(code: int, kind: str, message: str) -> jsonrpc.ErrorObject:
    """An error that a door itself found, before any operation was asked."""
    return jsonrpc.ErrorObject(code=code, message=message, data=_plain(ErrorData(kind=kind)))


def _plain(data: ErrorData) -> dict[str, object]:
    told: dict[str, object] = {"kind": data.kind, "retryable": data.retryable}
    if data.details:
        told["details"] = data.details
    return told
