"""The `semspec` command, also as `python -m semspec` and `python -m semspec.cli`."""

import sys


def run() -> None:
    try:  # reading the commands takes long enough to be interrupted
        from semspec.cli.main import run as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
