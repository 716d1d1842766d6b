#!/usr/bin/env bash
# Every figure of the README's table for a GPU, from the source tree: bash bench/h200.sh OUT [NAME ...]
# Leaves NAME.json (the result) and NAME.log in OUT; python bench/collect_results.py OUT makes bench/results/h200.json.
set -u
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}
shift
names=${*:-qwen06b llama8b llama8b-eagle3 gemma4-4b gemma4-4b-assistant nemotronh nemotronh-mtp nemotronh-spread nemotronh-mtp-spread dsv32 dsv32-mtp dsv32-spread dsv32-mtp-spread qwen06b-parameters llama8b-prompts}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
shapes=1x128x256,8x128x256,64x128x256,256x128x256

drafts() { # method, and more settings
    echo "{\"method\": \"$1\", ${2:-}\"num_speculative_tokens\": 3, \"rejection_sample_method\": \"synthetic\", \"synthetic_acceptance_length\": 2.5}"
}

measure() { # name, config, shapes, more arguments
    local name=$1 config=$2 shapes=$3
    shift 3
    # An empty cache of kernels for each: what it takes to start is part of the result.
    TRITON_CACHE_DIR=$(mktemp -d) python3 -m outrider.cli bench throughput "bench/configs/$config" --load-format dummy --max-model-len 4096 \
        --max-num-seqs 256 --gpu-memory-utilization 0.85 --shapes "$shapes" --save-result "$out/$name.json" -v "$@" \
        >"$out/$name.log" 2>&1
    echo "== $name: exit $?"
    grep -h '^case\|start-up\|step costs\|rror:' "$out/$name.log" | cut -c1-320
}

row() { # folder of results, parameter, flags: one row of the table of parameters
    local name=$1 parameter=$2
    shift 2
    measure "$name-$parameter" qwen06b 1x128x128,32x128x128,200x128x128 "$@"
}
penalties="--repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty 0.2"

for name in $names; do
    case $name in
        qwen06b) measure "$name" qwen06b "$shapes,nano" ;;
        llama8b) measure "$name" llama8b "$shapes,1x3500x64" ;;
        llama8b-eagle3) measure "$name" llama8b "$shapes" --speculative-config \
            "$(drafts eagle3 '"model": "bench/configs/llama8b-eagle3", ')" ;;
        gemma4-4b) measure "$name" gemma4-4b "$shapes" ;;
        gemma4-4b-assistant) measure "$name" gemma4-4b "$shapes" --speculative-config \
            "$(drafts mtp '"model": "bench/configs/gemma4-4b-assistant", ')" ;;
        nemotronh) measure "$name" nemotronh-15b-a2b "$shapes" ;;
        nemotronh-mtp) measure "$name" nemotronh-15b-a2b "$shapes" --speculative-config "$(drafts mtp)" ;;
        nemotronh-spread) measure "$name" nemotronh-15b-a2b "$shapes" --routing spread ;;
        nemotronh-mtp-spread) measure "$name" nemotronh-15b-a2b "$shapes" --routing spread \
            --speculative-config "$(drafts mtp)" ;;
        dsv32) measure "$name" dsv32-8b-a2b "$shapes" ;;
        dsv32-mtp) measure "$name" dsv32-8b-a2b "$shapes" --speculative-config "$(drafts mtp)" ;;
        dsv32-spread) measure "$name" dsv32-8b-a2b "$shapes" --routing spread ;;
        dsv32-mtp-spread) measure "$name" dsv32-8b-a2b "$shapes" --routing spread \
            --speculative-config "$(drafts mtp)" ;;
        qwen06b-parameters) # each alone, all of them together, and one such request among greedy ones
            all="--top-k 50 --top-p 0.9 --min-p 0.01 $penalties --min-tokens 8 --logprobs 5"
            row "$name" greedy
            row "$name" temperature --temperature 1
            row "$name" top-k --temperature 1 --top-k 50
            row "$name" top-p --temperature 1 --top-p 0.9
            row "$name" min-p --temperature 1 --min-p 0.02
            row "$name" penalties $penalties
            row "$name" logprobs --logprobs 5
            row "$name" all --temperature 1 $all
            row "$name" one-top-p --temperature 1 --top-p 0.9 --sampled-requests 1
            row "$name" one-all --temperature 1 $all --sampled-requests 1
            row "$name" ngram --temperature 1 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' ;;
        llama8b-prompts) measure "$name" llama8b 8x4000x16,24x8000x64,1x30000x8,8x30000x8 --max-model-len 30100 ;;
        *) echo "unknown: $name" >&2; exit 2 ;;
    esac
done
