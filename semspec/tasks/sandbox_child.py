"""The process that runs one program: it binds its own hands, then executes what comes on stdin.

Run by `sandbox.run` as a script, with the limits as JSON in its first argument; uses the standard library only.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # flags of Linux's unshare(2)
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl(2)
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "ctypes.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.system",
    "os.putenv",
    "pty.",
    "resource.",
    "syslog.",
    "webbrowser.",
)
"""Beginnings of the names of audit events that no solution has a reason to cause."""
CHANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((0, 2), (1, 3)),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.removexattr": ((0, -1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.setxattr": ((0, -1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, -1),),
    "os.utime": ((0, 3),),
}
"""Audit events that change files: where among their arguments each path is, and the open folder it is relative to."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(seconds: float, memory: int, file: int) -> None:
    """Hard limits, which a process cannot raise again. The kernel does not count root's processes, but see `watch`."""
    cpu = int(seconds) + 1
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def detach() -> None:
    """Die with the parent, and move to a network that leads nowhere, where Linux lets us; else `watch` has to do."""
    with contextlib.suppress(AttributeError, OSError):
        system = ctypes.CDLL(None)
        system.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        system.unshare(NEW_USER | NEW_NETWORK)


def watch() -> None:
    """Refuse processes, sockets, signals to others, and changes to files outside the folder we stand in."""
    home = os.path.realpath(os.getcwd())

    def inside(path: Any, folder: Any = -1, realpath: Any = os.path.realpath, fsdecode: Any = os.fsdecode) -> bool:
        if isinstance(path, int):
            return True  # a file that is open already
        base = f"/proc/self/fd/{folder}/" if isinstance(folder, int) and folder >= 0 else ""
        return bool((realpath(base + fsdecode(path)) + "/").startswith(home + "/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & WRITING and path != os.devnull and not inside(path):
                raise PermissionError(f"{path!r} is outside the program's own folder")
        elif event in CHANGES:
            for place, folder in CHANGES[event]:
                if not inside(arguments[place], arguments[folder] if folder > 0 else -1):
                    raise PermissionError(f"{arguments[place]!r} is outside the program's own folder")
        elif event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)


def main() -> None:
    report = os.dup(1)
    program = sys.stdin.buffer.read().decode()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        detach()
        limit(**json.loads(sys.argv[1]))
    except (OSError, ValueError, AttributeError) as error:
        os.write(report, json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    sys.argv[:] = [""]
    watch()
    reason = ""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # sys.exit() before the tests is a failure like any other
        reason = f"{type(error).__name__}: {str(error)[:300]}".strip(": ")
    os.write(report, json.dumps({"passed": not reason, "reason": reason}).encode())
    os._exit(0)  # threads that the program left behind are not waited for


if __name__ == "__main__":
    main()
