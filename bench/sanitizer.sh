#!/bin/sh
# The attention kernels under compute-sanitizer, on a machine with a GPU. docs/gpu.md says what to look for.
#   pip install --no-deps --target sanitizer "nvidia-cuda-sanitizer-api>=13.4"     # here or elsewhere: 52 MB
#   sh bench/sanitizer.sh
sanitizer=sanitizer/nvidia/cu13/bin/compute-sanitizer
export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # each tensor an allocation of its own, or reading into the next is no error
for tool in memcheck racecheck synccheck; do
  $sanitizer --tool $tool --error-exitcode 9 --kernel-name kns=_attend --kernel-name kns=_join \
    python bench/gpu.py --check --match "attention over random" || echo "$tool: look above"
done
# A fault on purpose, far beyond a cache of 64 tokens, must be found: Invalid __global__ read in _attend.
$sanitizer --kernel-name kns=_attend python -c "
import torch
from semspec.model.kernels.attention import attend
q, cache = (torch.randn(size, device='cuda', dtype=torch.bfloat16) for size in [(1, 9, 10, 128), (1, 2, 64, 128)])
one = torch.ones(1, dtype=torch.long, device='cuda')
attend(q, cache, cache, 0 * one, 4096 * one, 9 * one, 0.1)
torch.cuda.synchronize()"
