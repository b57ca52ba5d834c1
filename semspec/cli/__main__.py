"""`python -m semspec.cli` is `semspec`, too."""

from semspec.cli.main import run

if __name__ == "__main__":
    run()
