"""`semspec-lm-eval ...`, or `python -m semspec.lm_eval ...`, is `lm_eval ...` with the model `semspec`."""

from __future__ import annotations

import sys

from semspec.errors import SemspecError


def run() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate

        from semspec.lm_eval import model  # noqa: F401  registers itself
    except ImportError as error:
        sys.exit(f"semspec: lm-evaluation-harness cannot be imported ({error}); pip install 'semspec[lm_eval]'")
    try:
        cli_evaluate()
    except SemspecError as error:
        print(f"semspec: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run()
