#!/bin/bash
# Telpher's host collectives beside Open MPI's, MPICH's and Gloo's, in one run. Installs what is missing (and says so), builds
# everything in build/peers, measures, prints a table a collective and leaves JSON there.
# Usage: run.sh [--quick] [--sizes 8,4K,1M] [--ranks 2,4] [--collectives all_reduce,…] [--realtime] [more: --help]
# TELPHER_LIBRARY names a libnccl.so.2 that is built already (otherwise build/peers/telpher is built).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(cd "$here/../.." && pwd)
out=$source_dir/build/peers
mkdir -p "$out"

missing=()
need() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
need gcc gcc libc6-dev
need g++ g++
need python3 python3-minimal
need mpicc.openmpi libopenmpi-dev
need mpirun.openmpi openmpi-bin
need mpicc.mpich libmpich-dev
need mpirun.mpich mpich
[ -e /usr/include/gloo/allreduce.h ] || missing+=(libgloo-dev)
if [ -z "${TELPHER_LIBRARY:-}" ]; then
	need cmake cmake
	need ninja ninja-build
	[ -e /usr/include/sodium.h ] || missing+=(libsodium-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
	echo "installing: ${missing[*]}"
	root=; [ "$(id -u)" = 0 ] || root=sudo
	$root apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$out/install.log" 2>&1 ||
		{ tail -5 "$out/install.log" >&2; exit 1; }
fi

flags=(-O2 -Wall -Wextra -I"$here")
gcc -std=c17 -D_GNU_SOURCE "${flags[@]}" -c "$here/loop.c" -o "$out/loop.o"
mpicc.openmpi "${flags[@]}" "$here/peer_mpi.c" "$out/loop.o" -o "$out/loop_openmpi"
mpicc.mpich "${flags[@]}" "$here/peer_mpi.c" "$out/loop.o" -o "$out/loop_mpich"
g++ -std=c++17 "${flags[@]}" "$here/peer_gloo.cc" "$out/loop.o" -o "$out/loop_gloo" -lgloo -lpthread

rm -f "$out/loop_telpher"
library=${TELPHER_LIBRARY:-$out/telpher/lib/telpher/libnccl.so.2}
if [ -z "${TELPHER_LIBRARY:-}" ]; then
	cmake -S "$source_dir" -B "$out/telpher" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTELPHER_TESTS=OFF -DTELPHER_BENCH=OFF >"$out/build.log" 2>&1 &&
		ninja -C "$out/telpher" nccl >>"$out/build.log" 2>&1 || echo "Telpher didn't build (see $out/build.log): peers only" >&2
fi
if [ -e "$library" ]; then
	gcc -std=c17 -D_GNU_SOURCE "${flags[@]}" -I"$source_dir/include" "$here/peer_telpher.c" "$out/loop.o" "$(realpath "$library")" \
		-Wl,-rpath,"$(dirname "$(realpath "$library")")" -o "$out/loop_telpher"
fi

exec python3 "$here/compare.py" --programs "$out" --json "$out/results.json" "$@"
