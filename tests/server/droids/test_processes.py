"""How a process ended."""

from oubliette.server.droids.processes import Exit


def test_an_end_is_worded() -> None:
    assert str(Exit(code=3, signal=None)) == "exit code 3"
    assert str(Exit(code=None, signal=9)) == "killed by signal 9"
