#!/bin/bash
# Collectives over RDMA on the software card between two network namespaces, beside perftest, UCX, libfabric and sockets on the same path, in one run. Needs root
# (namespaces). Installs what is missing (and says so), builds in build/bench-rdma, measures, prints the table, keeps it and its JSON in bench/rdma/results.
# Usage: run.sh [--rounds 5] [--only all-reduce] [--name NAME] [more: --help]
# TELPHER_BUILD names a build folder (of CMAKE_BUILD_TYPE Release) that is there already.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(cd "$here/../.." && pwd)
out=$source_dir/build/bench-rdma

[ "$(id -u)" = 0 ] || { echo "run.sh makes network namespaces, for which it must be root" >&2; exit 1; }
missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need python3 python3-minimal
need ip iproute2
need ib_write_bw perftest
need ucx_perftest ucx-utils
need fi_pingpong libfabric-bin
if [ -z "${TELPHER_BUILD:-}" ]; then
	need gcc gcc
	need cmake cmake
	need ninja ninja-build
	[ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev)
	[ -e /usr/include/rdma/rdma_cma.h ] || missing+=(librdmacm-dev)
	[ -e /usr/include/popt.h ] || missing+=(libpopt-dev)
	[ -e /usr/include/cjson/cJSON.h ] || missing+=(libcjson-dev)
	[ -e /usr/include/sodium.h ] || missing+=(libsodium-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
	echo "installing: ${missing[*]}"
	mkdir -p "$out"
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$out/install.log" 2>&1 || { tail -5 "$out/install.log" >&2; exit 1; }
fi
build=${TELPHER_BUILD:-$out/telpher}
if [ -z "${TELPHER_BUILD:-}" ]; then
	mkdir -p "$out"
	cmake -S "$source_dir" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTELPHER_TESTS=OFF -DTELPHER_BENCH=OFF >"$out/build.log" 2>&1 && ninja -C "$build" >>"$out/build.log" 2>&1 ||
		{ tail -20 "$out/build.log" >&2; exit 1; }
fi
exec python3 "$here/measure.py" --telpher "$build/bin/telpher" --card "$build/lib/telpher-verbs" --results "$here/results" "$@"
