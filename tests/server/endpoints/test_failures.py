import logging

import pytest

from oubliette.server import errors
from oubliette.server.endpoints.failures import CODES, as_rpc
from oubliette.wire import jsonrpc
from oubliette.wire.relay import KINDS


def subclasses(kind: type[errors.OublietteError]) -> set[type[errors.OublietteError]]:
    found = set(kind.__subclasses__())
    return found | {deeper for one in found for deeper in subclasses(one)}


def test_every_error_has_a_place_on_the_wire():
    assert set(CODES) == subclasses(errors.OublietteError)


def test_the_seeds_codes_are_theirs():
    assert as_rpc(errors.Unauthenticated()).code == -32001
    assert as_rpc(errors.Unauthenticated()).message == "invalid or expired API key"
    assert as_rpc(errors.Forbidden("no")).code == -32002


def test_every_error_says_its_machine_word_and_whether_to_try_again():
    for kind in CODES:
        told = as_rpc(kind() if kind is errors.Unauthenticated else kind("text"))
        assert told.data == {"kind": kind.kind, "retryable": kind.retryable}


def test_every_machine_word_is_explained():
    assert {kind.kind for kind in CODES} - {"internal"} <= set(KINDS)


def test_a_bug_is_logged_once_and_not_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        told = as_rpc(ValueError("secret detail"))
    assert told.code == jsonrpc.INTERNAL_ERROR
    assert "secret detail" not in told.message
    (record,) = caplog.records
    assert record.exc_info is not None
