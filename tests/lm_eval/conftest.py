from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lm_eval") else ["test_*.py"]  # its environment is that of `make test-vllm`


def pytest_report_header() -> list[str]:
    return ["lm_eval is not installed: tests/lm_eval is for `make test-vllm`"] if collect_ignore_glob else []
