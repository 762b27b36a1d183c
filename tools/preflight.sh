#!/usr/bin/env bash
# Check that this machine has everything to build ringstow; name what is missing and how to fix it.
#   tools/preflight.sh PYTHON [lint|ci]
set -euo pipefail

python=$1
purpose=${2:-build}
root=$(cd "$(dirname "$0")/.." && pwd)
missing=0

lacks() { # what, fix
    printf 'missing: %s\n   fix: %s\n' "$1" "$2" >&2
    missing=1
}

at_least() { # version, wanted
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

check_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    local remedy="install Rust with rustup (Debian 13, Ubuntu 24.04 and later: apt-get install
         rustup && rustup default stable; elsewhere: follow the Rust web site)"
    if ! command -v cargo >/dev/null || ! have=$(rustc --version 2>/dev/null); then
        lacks "cargo (Rust $wanted or newer)" "$remedy"
        return
    fi
    have=$(cut -d' ' -f2 <<<"$have")
    at_least "$have" "$wanted" || lacks "Rust $wanted or newer (here: $have)" \
        "rustup update stable; if Rust came from the distribution, $remedy"
    [ "$purpose" != lint ] && return
    cargo fmt --version >/dev/null 2>&1 || lacks "rustfmt" "rustup component add rustfmt"
    cargo clippy --version >/dev/null 2>&1 || lacks "clippy" "rustup component add clippy"
}

check_linker() {
    command -v cc >/dev/null || lacks "cc (Rust links with it)" "apt-get install build-essential"
}

check_python() {
    local have
    if ! have=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        lacks "$python (Python 3.11 or newer)" "apt-get install python3 python3-venv"
        return
    fi
    at_least "$have" 3.11 || lacks "Python 3.11 or newer (here: $have)" \
        "install a newer one and pass it: make PYTHON=python3.12 ..."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        lacks "Python's venv module" "apt-get install python3-venv (or python$have-venv)"
}

check_disk() { # PyTorch's wheel unpacks to more than 5 GB
    local free_gb wanted=10 for="PyTorch and the build"
    [ "$purpose" != ci ] || { wanted=15 && for="all stages of .ci/run"; }
    [ -e "$root/.venv/.ready" ] && return
    free_gb=$(($(df -Pk "$root" | awk 'NR == 2 { print $4 }') / 1000000))
    [ "$free_gb" -ge "$wanted" ] || lacks "disk space: $free_gb GB free at $root" \
        "free $wanted GB: $for need that much"
}

check_rust
check_linker
check_python
check_disk
exit "$missing"
