"""The system calls that no program in a box needs: doors into the kernel that namespaces do not close.

Keyrings are shared across namespaces, the rest is where kernels are broken out of. What is refused fails like a thing
that is not permitted, so that programs fall back.
"""

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: ld abs, jeq, jge, ret
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
# Another calling convention of the same machine has other numbers: none of its calls pass.
_X32_FROM = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64)
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
}


def rules(machine: str | None = None) -> bytes | None:
    """The filter as the kernel reads it; None for a machine that it was not written for."""
    name = machine or platform.machine()
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        return None
    column = list(_ARCHITECTURES).index(name)
    refused = sorted(numbers[column] for numbers in _NUMBERS.values())
    # Jumps count the instructions to skip: the two returns stand at the end.
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, len(refused) + 1, 0, _X32_FROM),
        *((_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
