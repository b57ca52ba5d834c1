#!/bin/sh
# The whole pair on one GPU, in about 15 minutes: data beside the training, target, draft, measures, mixture of experts.
# Every piece goes on where it was cut. Usage: sh recipes/pocket/make.sh FOLDER
set -e
D=${1:?give a folder for data, checkpoints and exports}
export PYTHONPATH=. PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR="$D/inductor"
mkdir -p "$D"
train() { python3 -m recipes.pocket.train --data "$D" --resume "$@"; }

[ -f "$D/data.json" ] || python3 -m recipes.pocket.data --out "$D" --examples 1600000 --long-examples 4000 \
    > "$D/data.log" 2>&1 &
train --size target --out "$D/run_target" --total-minutes 8 --anneal-when 0.93 --probe-every 30 --log-every 1920
train --size draft --out "$D/run_draft" --total-minutes 5 --anneal 0.5 --batch 64 --long-every 16 --long-from 0.5 \
    --until-invalid 0.078 --probe-every 6 --probe-problems 512 --log-every 800  # stops after a minute and a half
python3 -m recipes.pocket.measure --target "$D/run_target/export" --draft "$D/run_draft/export" --out "$D/measures.json"
train --size moe --out "$D/run_moe" --total-minutes 3 --anneal 0.5 --batch 32 --long-every 0 \
    --probe-every 30 --log-every 960
