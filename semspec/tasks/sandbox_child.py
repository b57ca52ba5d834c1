"""The process that runs one program: it limits itself, then executes what comes on stdin.

Run by `sandbox.run` as a script. The first line on stdin is JSON: the limits, and the token that marks the report.
Uses the standard library only.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # flags of Linux's unshare(2)
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38  # PR_SET_PDEATHSIG and PR_SET_NO_NEW_PRIVS of Linux's prctl(2)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, on every architecture
EXECUTE, WRITE, REFER, TRUNCATE = 1, 2, 1 << 13, 1 << 14  # Landlock's names for what may be done with files
REMOVE_OR_MAKE = 0x1FF0
FORBIDDEN = (
    "socket.", "subprocess.", "ctypes.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.system", "os.putenv", "pty.", "resource.", "sqlite3.", "syslog.", "webbrowser.",
)  # fmt: skip
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
    """Die with the parent, and move to an empty network namespace, where Linux allows it; else `watch` has to do."""
    with contextlib.suppress(AttributeError, OSError):
        system = ctypes.CDLL(None)
        system.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        system.unshare(NEW_USER | NEW_NETWORK)


def confine() -> None:
    """Let the kernel refuse programs, TCP, signals to others, and changes to files outside the current folder, where
    Linux has Landlock. Unlike `watch`, a program cannot get around it."""
    system = ctypes.CDLL(None)
    version = system.syscall(CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0
    if version < 1:
        return
    files = EXECUTE | WRITE | REMOVE_OR_MAKE | (REFER if version > 1 else 0) | (TRUNCATE if version > 2 else 0)
    wanted = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # files, TCP, signals
    ruleset = system.syscall(CREATE_RULESET, wanted, len(wanted), 0)
    if ruleset < 0:
        return
    for path, allowed in ((".", files & ~EXECUTE), (os.devnull, files & (WRITE | TRUNCATE))):
        folder = os.open(path, os.O_PATH)
        system.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, folder), 0)
        os.close(folder)
    system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def watch() -> None:
    """Refuse processes, sockets, signals to others, and changes to files outside the current folder."""
    home = os.path.realpath(os.getcwd())
    # Names are bound here: the program can reach and change the globals of this file and of `os`.
    changes, forbidden, writing, devnull = dict(CHANGES), FORBIDDEN, WRITING, os.devnull
    realpath, fsdecode, is_a, integer = os.path.realpath, os.fsdecode, isinstance, int

    def inside(path: Any, folder: Any = -1) -> bool:
        if is_a(path, integer):
            return True  # a file that is open already
        base = f"/proc/self/fd/{folder}/" if is_a(folder, integer) and folder >= 0 else ""
        return (realpath(base + fsdecode(path)) + "/").startswith(home + "/")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & writing and path != devnull and not inside(path):
                raise PermissionError(f"{path!r} is outside the program's own folder")
        elif event in changes:
            for index, folder in changes[event]:
                if not inside(arguments[index], arguments[folder] if folder > 0 else -1):
                    raise PermissionError(f"{arguments[index]!r} is outside the program's own folder")
        elif event.startswith(forbidden):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)


def main() -> None:
    report = os.dup(1)
    header = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read().decode()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        detach()
        confine()
        limit(**header["limits"])
    except (OSError, ValueError, AttributeError) as error:
        os.write(report, (header["token"] + json.dumps({"refused": str(error)})).encode())
        os._exit(1)
    sys.argv[:] = [""]
    watch()
    reason = ""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # sys.exit() before the tests is a failure like any other
        reason = f"{type(error).__name__}: {str(error)[:300]}".strip(": ")
    os.write(report, (header["token"] + json.dumps({"passed": not reason, "reason": reason})).encode())
    os._exit(0)  # without waiting for threads of the program


if __name__ == "__main__":
    main()
