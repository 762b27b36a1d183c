#!/usr/bin/env bash
# Trains with two ranks over MPI, kills one of them before many of its system calls, resumes, and compares the end with that of a run
# that was never killed. Needs mpirun. Run from the repository: examples/mpi/tests.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
cargo build -q --manifest-path examples/mpi/Cargo.toml
program=$CARGO_TARGET_DIR/debug/ringstow-mpi-example
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
train() { timeout 120 mpirun --oversubscribe -n 1 env ${2:+RINGSTOW_TEST_SEAM=$2} "$program" "$1" 8 2 : \
    -n 1 env ${3:+RINGSTOW_TEST_SEAM=$3} "$program" "$1" 8 2; }

# The bytes of the last step's shards, in the order of the ranks.
end() { cat "$1"/step-00000008/rank*.safetensors | cksum; }

mkdir "$dir/whole"
train "$dir/whole" "" "" >/dev/null
kills=0 resumed=0
for rank in 0 1; do
    for call in 1 40 80 120 160 200; do
        root=$dir/$rank-$call
        mkdir "$root"
        seam=("" "")
        seam[rank]=kill:$call
        if train "$root" "${seam[@]}" >/dev/null 2>&1; then break; fi # there is no such call
        kills=$((kills + 1))
        train "$root" "" "" >"$dir/out"
        if grep -q '^resumed' "$dir/out"; then resumed=$((resumed + 1)); fi
        if [ "$(end "$root")" != "$(end "$dir/whole")" ]; then
            echo "rank $rank, killed before call $call, ends otherwise"
            exit 1
        fi
    done
done
[ "$kills" -ge 5 ] && [ "$resumed" -ge 3 ] || { echo "$kills kills, $resumed resumed: too few"; exit 1; }
echo "$kills ranks were killed, $resumed runs resumed from a checkpoint, all ended with the same bits"
