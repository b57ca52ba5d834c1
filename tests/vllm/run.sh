#!/usr/bin/env bash
# Tests that need vLLM or lm-evaluation-harness, in .venv-vllm. Each file has a process of its own: what vLLM is started
# with is decided when it is imported. With `install`, none of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=.venv-vllm/bin
log=.venv-vllm/install.log
failed=.venv-vllm/.failed

install() { # torchvision and its like are builds for GPUs on the index; text models do without
  "${PYTHON:-python3}" -m venv .venv-vllm &&
    timeout 600 $bin/pip install --quiet --no-compile --requirement tests/vllm/requirements.txt --editable . &&
    $bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec &&
    $bin/python -c "import vllm, lm_eval"
}

if [ ! -f .venv-vllm/.installed ] && [ ! -f $failed ]; then
  mkdir -p .venv-vllm
  if install > "$log" 2>&1; then touch .venv-vllm/.installed; else touch $failed; fi
fi
if [ "${1:-}" = install ]; then exit 0; fi
if [ -f $failed ]; then
  rm $failed # the next run tries again
  echo "vLLM's CPU build cannot be installed here: its tests are not run. The last lines of $log:"
  tail -n 3 "$log"
  exit 0
fi
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive  # more threads, or ones that spin, crawl beside other processes
ls tests/vllm/engine/test_*.py tests/lm_eval/test_*.py | xargs -P 2 -I {} $bin/python -m pytest -q -p no:cacheprovider {}
