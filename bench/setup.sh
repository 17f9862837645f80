#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# setup.sh DIR [WHEELS]: makes the environments that the drivers in Python run in, below DIR, and
# links the drivers there, for sluice bench --peers DIR. Our own wheel is in WHEELS, where make
# wheel has put it. What cannot be installed is said and left out: its driver becomes a row with
# the reason. A folder that is complete is kept. PEERS_NIXL and PEERS_MOONCAKE are versions, such
# as ==1.5.1.
set -u
dir=${1:?usage: setup.sh DIR [WHEELS]}
wheels=${2:-build/wheel}
python=${PYTHON:-python3}
mkdir -p "$dir"

# environment NAME PACKAGE...: the packages alone, without the gigabytes that they name for cards.
environment() {
	name=$1
	shift
	[ ! -e "$dir/$name/complete" ] || [ "$(cat "$dir/$name/complete")" != "$*" ] || return 0
	echo "setup: $name: $*"
	rm -rf "${dir:?}/$name"
	if "$python" -m venv "$dir/$name" >"$dir/$name.log" 2>&1 &&
		timeout 300 "$dir/$name/bin/pip" install --quiet --no-input $deps "$@" \
			>>"$dir/$name.log" 2>&1; then
		echo "$*" >"$dir/$name/complete"
		return 0
	fi
	echo "setup: $name: not installed: $(tail -n 1 "$dir/$name.log")" >&2
	[ -e "$dir/$name/bin/python" ] || rm -rf "${dir:?}/$name"
}

deps=--no-deps
environment nixl "nixl${PEERS_NIXL:-}" "nixl-cu12${PEERS_NIXL:-}" numpy
environment mooncake "mooncake-transfer-engine-non-cuda${PEERS_MOONCAKE:-}" numpy
environment sluice numpy
ln -sfn "$(cd "$(dirname "$0")/drivers" && pwd)" "$dir/scripts"

# Ours is another one with each build.
if [ -e "$dir/sluice/complete" ]; then
	"$dir/sluice/bin/pip" install --quiet --no-input --no-deps --no-index --force-reinstall \
		"$wheels"/sluice-*.whl >"$dir/sluice.log" 2>&1 ||
		echo "setup: sluice: not installed: $(tail -n 1 "$dir/sluice.log"): run make wheel" >&2
fi
exit 0
