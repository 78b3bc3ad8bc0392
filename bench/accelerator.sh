#!/usr/bin/env bash
# Runs the benchmark on an accelerator, unattended, in less than ten minutes, from a checkout.
#   bench/accelerator.sh                   all parts, into $OUT (./accelerator-results)
#   bench/accelerator.sh --only 8b laws    these parts
#   bench/accelerator.sh --dry-run         the same on a CPU with tiny models, in a minute or two
# transformers draws random weights on the device, and specjax takes them over by DLPack: writing and
# reading 8B in bfloat16 would take minutes.  Each part has a time limit: it leaves out and names what
# does not fit, and a part that hangs is ended before the next one starts.  summary.md says which ran.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-$PWD/accelerator-results}
all=(laws 1b 8b 1b-lookup 8b-lookup) only=() dry=

while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry=yes ;;
    --only) ;;
    *)
        if [[ " ${all[*]} " != *" $1 "* ]]; then
            echo "$1 is neither --dry-run, --only nor a part: ${all[*]}" >&2
            exit 2
        fi
        only+=("$1")
        ;;
    esac
    shift
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
rm -f "$out"/summary.md "$out"/results.json "$out"/log.txt "$out"/*.png
# Two libraries share the device, so neither may reserve all of its memory at the start.
export PYTHONPATH=$PWD XLA_PYTHON_CLIENT_PREALLOCATE=false TOKENIZERS_PARALLELISM=false
if [ "$dry" ]; then
    export JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1
    small=tiny large=tiny vocabulary=512 tokens=16 rounds=1 checked=tiny
else
    # The parts run the same programs, so they share a compilation cache; XLA:CPU does not use one.
    export JAX_COMPILATION_CACHE_DIR=$scratch/jax
    small=1b large=8b vocabulary=128256 tokens=128 rounds=5 checked=110m
fi

part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $name "* ]] && return
    echo "$name: at most $limit s" >&2
    echo "== $name: $*" >>"$out/log.txt"
    timeout --kill-after=5 "$limit" "$python" -m "$@" >"$scratch/$name.md" 2>>"$out/log.txt"
    status=$?
    case $status in 0) status=ran ;; 124 | 137) status="timed out" ;; *) status="failed with status $status" ;; esac
    echo "| $name | $status | $((SECONDS - began)) |" | tee -a "$scratch/status" >&2
}

speed() { # NAME LIMIT SECONDS SIZE OPTIONS...: batch 1 and batch 16, SECONDS for each
    local name=$1 limit=$2 seconds=$3 size=$4
    shift 4
    part "$name" "$limit" bench --weights device --size "$size" --vocab-size "$vocabulary" --dtype bfloat16 \
        --batch 1 16 --num-drafts 4 --new-tokens "$tokens" --rounds "$rounds" --seconds "$seconds" \
        --json "$scratch/$name.json" --plot "$out/$name.png" "$@"
}

part laws 80 bench.laws --size "$checked" --vocab-size "$vocabulary" --new-tokens "$tokens"
imposed="--synthetic-acceptance 0.8 --proposers draft"
speed 1b 130 55 "$small" $imposed --peers plain loop draft
speed 8b 230 100 "$large" $imposed --peers plain loop draft
speed 1b-lookup 60 24 "$small" --proposers ngram --peers plain ngram
speed 8b-lookup 85 35 "$large" --proposers ngram --peers plain ngram

{
    printf '| part | | seconds |\n|---|---|---|\n'
    cat "$scratch/status"
    for name in "${all[@]}"; do
        [ -s "$scratch/$name.md" ] && printf '\n## %s\n\n' "$name" && cat "$scratch/$name.md"
    done
} >"$out/summary.md"
"$python" - "$scratch" >"$out/results.json" <<'END'
import json, pathlib, sys
print(json.dumps({file.stem: json.loads(file.read_text()) for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json"))}))
END
cat "$out/summary.md"
! grep -qv '| ran |' "$scratch/status"
