from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["engine"]  # make test-vllm has an environment of its own


def pytest_report_header() -> list[str]:
    return ["vllm is not installed: tests/vllm/engine is for `make test-vllm`"] if collect_ignore else []
