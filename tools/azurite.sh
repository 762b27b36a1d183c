#!/usr/bin/env bash
# Install azurite, the Azure server of the tests, into a directory.
#   tools/azurite.sh VERSION DIR
# Needs npm. As root on Debian or Ubuntu it installs npm where it is missing.
set -euo pipefail

version=$1
dir=$2

if ! command -v npm >/dev/null; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "npm is missing: apt-get install npm" >&2
        exit 1
    fi
    apt-get update -q >/dev/null
    apt-get install -y -q --no-install-recommends nodejs npm >/dev/null
fi
# No package of it needs a script that runs at the installation.
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$dir" "azurite@$version"
