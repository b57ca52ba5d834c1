#!/usr/bin/env bash
# What a card should say of everything, in so many seconds: checks first, then sections one after the other, each with a
# limit of its own. What there is no time for is named. Files, one for each, and what was printed, lie in the folder given.
#
#     bash bench/gpu_all.sh runs/card 900                  # all
#     bash bench/gpu_all.sh runs/card 300 trees int4       # only these
set -u
out=${1:?a folder for the results} end=${2:?seconds} began=$SECONDS
shift 2
wanted=" ${*:-checks trees quantised int4 default rounds bars} "
mkdir -p "$out"

run() { # name, most seconds, command
    local name=$1 limit=$2 left=$((end - SECONDS + began)) start=$SECONDS
    shift 2
    if ((left < 15)); then
        echo "== $name: no time is left"
        return
    fi
    timeout $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit code $?, $((SECONDS - start)) s"
    grep -v '^{' "$out/$name.log" | tail -n 24 | cut -c1-160
}

gpu() { # section and flags that name the file, most seconds, arguments
    run "$1" "$2" python3 bench/gpu.py "${@:3}" --out "$out/$1.json"
}

for part in $wanted; do
    case $part in
    checks)
        for i in 0 1 2 3 4 5 6 7; do
            timeout $((end / 2)) python3 bench/gpu.py --check --part "$i/8" --out "$out/checks-$i.json" >"$out/checks-$i.log" 2>&1 &
        done
        wait
        grep -h '^\(PASS\|FAIL\)' "$out"/checks-?.log | sort | cut -c1-160
        ;;
    trees)
        gpu trees 60 --only trees
        gpu long_trees 60 --only long_trees
        ;;
    quantised)
        gpu quantised 100 --only quantised --seconds 90
        gpu quantised-rows 30 --only quantised --flags int4_fragments=0 # int4 comes first; the rest is cut
        ;;
    int4) run int4 90 python3 bench/gpu_int4.py --models 32B --rows 9 --processes 14 ;;
    default) run default 150 python3 bench/default.py --shape 32B/1.5B --device cuda --tokens 256 --prompts 2 --out "$out/default.json" ;;
    rounds)
        gpu rounds 60 --only round,batch
        gpu rounds-hand-over 60 --only round,batch --flags hand_over=1
        ;;
    bars)
        gpu bars 300 --only bars --seconds 280
        gpu auto 120 --only auto
        gpu long 60 --only long_fp8
        ;;
    *) echo "there is no part $part" ;;
    esac
done
echo "$((SECONDS - began)) s"
