# ruff: noqa: PTH108, PTH114, PTH118, PTH123, PTH208, SIM115
"""Run inside a box: try every way out that we can think of, and say as JSON what came of each.

Standard library only; it must not depend on anything of the test kit. Nothing is ever written to what may turn out to
be the host's: files are opened for writing and closed again.
"""

import contextlib
import json
import os
import socket
import sys


def attempt(action, *arguments):
    try:
        return {"did": repr(action(*arguments))[:200]}
    except Exception as problem:
        return {"failed": type(problem).__name__, "errno": getattr(problem, "errno", None)}


def opened(path, flags=os.O_WRONLY):
    os.close(os.open(path, flags))
    return path


def created(folder):
    path = os.path.join(folder, "probe-file")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.unlink(path)
    return path


def connected(family, kind, address):
    with contextlib.closing(socket.socket(family, kind)) as one:
        one.settimeout(2)
        one.connect(address)
        if kind == socket.SOCK_DGRAM:
            one.send(b"x")
        return "connected"


def writable_below(top, skip):
    found = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in skip and not name.isdigit()]
        for name in files:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if not os.path.islink(path):
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    found.append(path)
    return found


def readable_processes():
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def libc():
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def called(name, *arguments):
    import ctypes

    result = getattr(libc(), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def status(field):
    with open("/proc/self/status") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith(field + ":"))


def main():
    told = json.loads(sys.argv[1])
    facts = {
        "tcp": attempt(connected, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", told["port"])),
        "tcp to an address of the host": attempt(
            connected, socket.AF_INET, socket.SOCK_STREAM, (told["address"], told["port"])
        ),
        "udp": attempt(connected, socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
        "ipv6": attempt(connected, socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8::1", 80)),
        "dns": attempt(socket.getaddrinfo, "example.com", 80),
        "an abstract socket of the host": attempt(
            connected, socket.AF_UNIX, socket.SOCK_STREAM, "\0" + told["abstract"]
        ),
        "raw socket": attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
        "packet socket": attempt(socket.socket, getattr(socket, "AF_PACKET", 17), socket.SOCK_RAW, 0),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "hidden": {path: os.path.lexists(path) for path in told["hidden"]},
        "seen": {path: sorted(os.listdir(path)) for path in ("/", "/home", "/opt", "/mcp", "/dev", "/etc", "/var")},
        "read-only": {folder: attempt(created, folder) for folder in told["read_only"]},
        "writable": {folder: attempt(created, folder) for folder in ("/workspace", "/tmp", "/home/box", "/dev/shm")},
        "replace the socket": attempt(os.unlink, "/mcp/relay.sock"),
        "kernel settings": writable_below("/proc", ("/proc/self", "/proc/thread-self", "/proc/pressure")),
        "processes": readable_processes(),
        "the keeper's memory": attempt(opened, "/proc/1/mem", os.O_RDONLY),
        "the keeper's environment": attempt(lambda: open("/proc/1/environ").read()),
        "the keeper's files": attempt(os.readlink, "/proc/1/fd/0"),
        "the keeper's root": attempt(os.listdir, "/proc/1/root"),
        "trace the keeper": attempt(called, "ptrace", 16, 1, 0, 0),
        "new user namespace": attempt(called, "unshare", 0x10000000),
        "new mount namespace": attempt(called, "unshare", 0x00020000),
        "mount": attempt(called, "mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "unmount a cover": attempt(called, "umount2", b"/proc/sys", 2),
        "become root": attempt(os.setuid, 0),
        "chroot": attempt(os.chroot, "/tmp"),
        "set the host's name": attempt(socket.sethostname, "escaped"),
        "device": attempt(os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0)),
        "terminal": attempt(opened, "/dev/tty", os.O_RDWR),
        "signal beyond the box": attempt(os.kill, told["host_pid"], 0),
        "keyring": attempt(called, "syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -3, 1),
        "io_uring": attempt(called, "syscall", 425, 1, 0),
        "a call of another convention": attempt(called, "syscall", 0x40000000 + 39),
        "kernel keys": attempt(lambda: open("/proc/keys").read()),
        "hostname": socket.gethostname(),
        "user": [os.getuid(), os.getgid(), os.getgroups()],
        "capabilities": [status(name) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
        "no new privileges": status("NoNewPrivs"),
        "environment": dict(os.environ),
        "passwd": open("/etc/passwd").read(),
        "hosts": open("/etc/hosts").read(),
        "open files": sorted(os.listdir("/proc/self/fd"), key=int),
    }
    print(json.dumps(facts))


main()
