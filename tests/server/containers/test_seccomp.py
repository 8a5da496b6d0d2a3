"""The filter of system calls, read back as the kernel would run it."""

import struct

import pytest

from oubliette.server.containers import seccomp

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOWED = 0x7FFF0000


def run(machine: str, architecture: int, number: int) -> int:
    """What the filter says of one call."""
    rules = seccomp.rules(machine)
    assert rules is not None
    lines = list(struct.iter_unpack("=HBBI", rules))
    at, value = 0, 0
    while True:
        code, yes, no, k = lines[at]
        at += 1
        if code == 0x20:
            value = {0: number, 4: architecture}[k]
        elif code == 0x06:
            return k
        else:
            at += yes if (value == k if code == 0x15 else value >= k) else no


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_exactly_the_named_calls_are_refused(machine: str, architecture: int) -> None:
    column = ["x86_64", "aarch64"].index(machine)
    named = {numbers[column] for numbers in seccomp._NUMBERS.values()}
    refused = {number for number in range(600) if run(machine, architecture, number) != ALLOWED}
    assert refused == named


def test_calls_of_another_convention_are_refused() -> None:
    assert run("x86_64", I386, 1) != ALLOWED
    assert run("x86_64", X86_64, 0x40000000 + 1) != ALLOWED
    assert run("aarch64", X86_64, 1) != ALLOWED


def test_a_machine_that_it_was_not_written_for_gets_none() -> None:
    assert seccomp.rules("riscv64") is None
