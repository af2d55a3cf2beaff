#!/bin/bash
# The software card beside what the machine allows and beside UDP, TCP and UCX, in one run. Installs what is missing (and says
# so), builds in build/bench-verbs, measures, prints the table, keeps it and its JSON in bench/verbs/results.
# Usage: run.sh [--rounds 5] [--realtime] [--only wire] [--name NAME] [more: --help]
# TELPHER_BUILD names a build folder that has the software card already.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(cd "$here/../.." && pwd)
out=$source_dir/build/bench-verbs
mkdir -p "$out"

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need gcc gcc
need python3 python3-minimal
need ib_write_bw perftest
need ucx_perftest ucx-utils
need iperf3 iperf3
[ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev)
if [ -z "${TELPHER_BUILD:-}" ]; then
	need cmake cmake
	need ninja ninja-build
	[ -e /usr/include/rdma/rdma_cma.h ] || missing+=(librdmacm-dev)
	[ -e /usr/include/popt.h ] || missing+=(libpopt-dev)
	[ -e /usr/include/cjson/cJSON.h ] || missing+=(libcjson-dev)
	[ -e /usr/include/sodium.h ] || missing+=(libsodium-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
	echo "installing: ${missing[*]}"
	root=; [ "$(id -u)" = 0 ] || root=sudo
	$root apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$out/install.log" 2>&1 ||
		{ tail -5 "$out/install.log" >&2; exit 1; }
fi

gcc -std=c17 -D_GNU_SOURCE -O2 -Wall -Wextra -I"$source_dir" "$here/micro.c" "$source_dir/verbs/crc.c" -lpthread -o "$out/micro"
build=${TELPHER_BUILD:-$out/telpher}
if [ -z "${TELPHER_BUILD:-}" ]; then
	cmake -S "$source_dir" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTELPHER_TESTS=OFF -DTELPHER_BENCH=OFF >"$out/build.log" 2>&1 &&
		ninja -C "$build" ibverbs rdmacm telpher-verbs-keeper telpher-verbs-preload >>"$out/build.log" 2>&1 ||
		{ tail -20 "$out/build.log" >&2; exit 1; }
fi
gcc -std=c17 -D_GNU_SOURCE -O2 -Wall -Wextra "$here/idle.c" -L"$build/lib/telpher-verbs" -libverbs -o "$out/idle"
exec python3 "$here/measure.py" --card "$build/lib/telpher-verbs" --micro "$out/micro" --idle "$out/idle" --results "$here/results" "$@"
