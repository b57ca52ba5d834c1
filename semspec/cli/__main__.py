"""`python -m semspec.cli` is `semspec`, too."""

from semspec.__main__ import run

if __name__ == "__main__":
    run()
