#!/usr/bin/env bash
# Everything about kvrelay on a GPU, in under ten minutes once FlashInfer's kernels are built: right or wrong, how fast.
#
#   bench/gpu_check.sh               on a machine with a GPU (Ray is not needed)
#   bench/gpu_check.sh --rehearse    every part on the CPU, with tiny sizes; its figures mean nothing
#
#   --model 8b|1b|tiny|DIR   the model (default: 8b, an 8B Llama with random weights, written once to .bench/)
#   --with-comparison        also disaggregated against colocated serving on this GPU (four minutes more)
#   --out DIR                logs, and a rehearsal's results (default: .bench/gpu_check)
#
# Each part has a budget of seconds, after which it is ended and counts as failed. Results: bench/results/gpu_*.json.
# The exit code is 0 only if every part ran and nothing was wrong.
set -u
cd "$(dirname "$0")/.."

rehearse=""; model=""; comparison=""; out=".bench/gpu_check"; patience=1
while [ $# -gt 0 ]; do
    case "$1" in
        --rehearse) rehearse="--rehearse"; patience=4 ;;
        --with-comparison) comparison=1 ;;
        --model) model="$2"; shift ;;
        --out) out="$2"; shift ;;
        *) sed -n '2,14p' "$0"; exit 2 ;;
    esac
    shift
done

python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
mkdir -p "$out"
status="$out/parts.tsv"
: > "$status"
touch "$out/began"  # results that are older are another run's

# part NAME BUDGET_S COMMAND...: runs it, shows the end of what it said, notes how it went.
part() {
    local name="$1" budget=$(($2 * patience)) from=$SECONDS code
    shift 2
    printf '\n== %s (at most %s s)\n' "$name" "$budget"
    timeout --kill-after=10 "$budget" "$@" > "$out/$name.log" 2>&1
    code=$?
    tail -n 25 "$out/$name.log" | cut -c 1-200
    [ "$code" = 124 ] && echo "$name was ended after its budget of $budget s"
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - from))" >> "$status"
}

bench() {  # the arguments that all of them take
    local program="$1"
    shift
    set -- "$python" -m "bench.$program" $rehearse ${model:+--model "$model"} "$@"
    [ -z "$rehearse" ] || set -- "$@" --out "$out"
    "$@"
}
export -f bench
export python rehearse model out

if [ -n "$rehearse" ]; then
    export KVRELAY_TEST_DEVICE=cpu
    contract="tests/kv_transfer/test_gpu_transports.py tests/engine/pages/test_page_table.py tests/bench/test_gpu_programs.py"
else
    export KVRELAY_TEST_DEVICE=cuda:0
    contract="tests/kv_transfer/test_transports.py"
fi

# What the parts below do again, and longer, is left out of the tests.
elsewhere="--ignore=tests/gpu/test_cluster.py"
for name in the_contract_of_transports_holds_on_a_gpu bytes_between_two_processes \
    a_killed_process_is_noticed_and_harms_no_other_pair \
    nccl_brings_the_right_bytes_where_two_ranks_can_meet; do
    elsewhere="$elsewhere --deselect=tests/gpu/test_transports.py::test_$name"
done

part environment 150 bash -c 'bench gpu.env'
part kernels 900 "$python" -m tests.gpu.kernels $rehearse  # minutes, once on a machine; seconds when they are there
began=$SECONDS
part correctness 140 "$python" -m pytest -q -m gpu $elsewhere tests/gpu
part contract 45 "$python" -m pytest -q $contract
part engine 130 bash -c 'bench gpu.engine ${rehearse:+--no-peers}'
part transports 75 bash -c 'bench gpu.transports'
part cluster 160 bash -c 'bench gpu.cluster'
[ -z "$comparison" ] || part comparison 300 bash -c 'bench gpu.one_gpu'

printf '\n== all but the environment and the building of kernels, %s s\n' "$((SECONDS - began))"
"$python" -m bench.gpu.table "$status" $rehearse --out "$out"
