"""The process that compares answers with math-verify: one question per line on stdin, one answer per line on stdout.

Run by `math_worker` as a script, with its limits as arguments. A question is a JSON list: two answers to compare, or
one expression to evaluate. The first line out says that it is ready.
"""

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy import Basic, I, MatrixBase, Rational

NORMALIZE = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
CONVERT = ConversionConfig(lowercase_symbols=False)  # math_verify.parse takes r and R for one
DECIMALS = 12  # math-verify's own 6 accept rounded answers
_I = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def parse(text: str, real: bool) -> Any:
    """The expression, or the text itself where it is none. Unlike math_verify.parse, nothing here calls eval."""
    text = normalize_latex(text, NORMALIZE)
    try:
        found = latex2sympy(
            text, is_real=real, convert_degrees=False, normalization_config=None, conversion_config=CONVERT
        )
    except Exception:  # the parser raises plain exceptions
        return text
    if real or not isinstance(found, Basic | MatrixBase):
        return found
    return found.xreplace({symbol: I for symbol in found.free_symbols if symbol.name == "i"})


def answer(question: list[str]) -> bool | str | None:
    try:
        if len(question) == 1:
            return rational(question[0])
        real = not any(map(_I.search, question))
        given, reference = (parse(text, real) for text in question)
        return bool(verify(reference, given, float_rounding=DECIMALS, timeout_seconds=None))
    except Exception:  # SymPy raises anything; what cannot be compared is not equal
        return None


def rational(text: str) -> str | None:
    value = parse(text, real=True).doit()
    value = Rational(str(value)) if value.is_Float else value
    return f"{value.p}/{value.q}" if value.is_Rational else None


def limit(megabytes: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system has no such limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = megabytes << 20 if hard == resource.RLIM_INFINITY else min(megabytes << 20, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main() -> None:
    seconds = float(sys.argv[1])
    limit(int(sys.argv[2]))
    logging.disable()
    out = sys.stdout
    print("ready", file=out, flush=True)
    sys.stdout = sys.stderr = io.StringIO()  # answers only; errors are read until it is ready
    for line in sys.stdin:
        if os.name == "posix":  # CPU time, so that a busy machine changes no score; the signal ends the process
            signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(answer(json.loads(line)))
        if os.name == "posix":
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=out, flush=True)


if __name__ == "__main__":
    main()
