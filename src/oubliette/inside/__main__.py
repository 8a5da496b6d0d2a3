"""What runs in the box: `python -I -S PROGRAM client|keeper|droid`.

Each program is the module of its name; its `main(arguments)` returns the exit status.
"""

import sys


def main() -> int:
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    # Imported only when asked for: the client must answer within a few milliseconds.
    if name == "client":
        from oubliette.inside import client as program
    elif name == "keeper":
        from oubliette.inside import keeper as program
    elif name == "droid":
        from oubliette.inside import droid as program
    else:
        print("usage: client | keeper | droid", file=sys.stderr)
        return 2
    return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
