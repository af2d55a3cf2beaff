#!/bin/bash
# Whole jobs over NET plug-ins: a small one in each version of the interface, our own exported one over sockets, and plug-ins that can't
# be used; ranks as processes on virtual hosts. And what the exported library exports and needs.
set -u
telpher=$BUILD_DIR/bin/telpher
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; tail -30 "$work/out"; exit 1; }
export LD_LIBRARY_PATH=$BUILD_DIR/tests/plugins:$BUILD_DIR/lib/telpher NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_IB_DISABLE=1
all="all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv"

job() { # RANKS HOSTS NETWORK COLLECTIVE OPTIONS…
	local ranks=$1 hosts=$2 network=$3 what=$4
	shift 4
	timeout 100 "$telpher" run -n $ranks --hosts $hosts -- "$telpher" perf $what -b ${least:-8} -e ${most:-64K} -f 64 -n 3 -w 1 -c 1 "$@" >"$work/out" 2>&1 || fail "$what over $network, $ranks ranks on $hosts hosts"
	grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "$what over $network: wrong results"
	grep -q "Using network $network" "$work/out" || fail "$what: not over $network"
	[ -n "${warns:-}" ] || ! grep -q 'NCCL WARN' "$work/out" || fail "$what over $network: a warning"
}

lib=$BUILD_DIR/lib/telpher/libnccl-net-telpher.so
found=$(nm -D --defined-only "$lib" | awk '{ print $3 }' | grep -Ev '^__?(asan|tsan|ubsan|lsan|sanitizer)' | sort | tr '\n' ' ')
[ "$found" = "ncclNetPlugin_v10 ncclNetPlugin_v11 ncclNetPlugin_v8 ncclNetPlugin_v9 " ] || { echo "FAILED: it exports $found"; exit 1; }
if ! readelf -d "$lib" | grep -q san; then
	needed=$(readelf -d "$lib" | grep NEEDED | grep -Ev 'libc\.so|ld-linux' || true)
	[ -z "$needed" ] || { echo "FAILED: it needs more than libc: $needed"; exit 1; }
fi
echo "ok   the exported library exports four tables and needs libc alone"

for version in 8 9 10 11; do
	NCCL_NET_PLUGIN=loop$version job 3 3 Loop all_reduce
	grep -q "NET/Plugin: Loaded net plugin Loop.* (v$version)" "$work/out" || fail "not by v$version"
	grep -q 'via NET/Loop/' "$work/out" || fail "v$version: no link over it"
done
echo "ok   each version of the interface"
export NCCL_NET_PLUGIN=loop11
for what in $all; do job 2 2 Loop $what; done
most=2M job 4 2 Loop all_reduce -d bfloat16
job 4 4 Loop alltoall
echo "ok   every collective, 2 to 4 ranks"

export NCCL_NET_PLUGIN=telpher TELPHER_PLUGIN_NET=Socket
for what in $all; do job 2 2 Telpher $what; done
most=2M job 4 2 Telpher all_reduce
job 5 5 Telpher alltoall
grep -q 'NET/Telpher : Using network Socket' "$work/out" || fail "the exported plug-in isn't on sockets, or its log is lost"
grep -q 'NET/Plugin: Loaded net plugin Telpher (v11)' "$work/out" || fail "the exported plug-in isn't loaded by v11"
echo "ok   our exported plug-in, every collective, 2 to 5 ranks"

export least=64K most=64K
NCCL_NET_PLUGIN=nowhere warns=1 job 2 2 Socket all_reduce
grep -q 'NCCL WARN NET plug-in nowhere (NCCL_NET_PLUGIN) can.t be used: there is no nowhere libnccl-net-nowhere.so' "$work/out" || fail "what is missing isn't told"
NCCL_NET_PLUGIN=loop10 LOOP_BAD=init warns=1 job 2 2 Socket all_reduce
grep -q 'NCCL WARN NET plug-in loop10 .* init gives ncclSystemError' "$work/out" || fail "a failed init isn't told"
NCCL_NET_PLUGIN=none job 2 2 Socket all_reduce
NCCL_NET_PLUGIN=loop10 LOOP_BAD=init NCCL_NET=Loop timeout 60 "$telpher" run -n 2 --hosts 2 -- "$telpher" perf all_reduce -b 64K -e 64K >"$work/out" 2>&1 && fail "NCCL_NET=Loop falls back"
grep -q 'NCCL_NET=Loop: that network can.t be used here.*init gives ncclSystemError' "$work/out" || fail "NCCL_NET=Loop: the reason isn't told"
# One host without the plug-in: all go over sockets.
NCCL_NET_PLUGIN= timeout 60 "$telpher" run -n 2 --hosts 2 -- bash -c '[ $RANK = 0 ] && export NCCL_NET_PLUGIN=loop10 || export NCCL_NET_PLUGIN=none; exec "$0" perf all_reduce -b 64K -e 64K -n 2' \
	"$telpher" >"$work/out" 2>&1 || fail "one host without the plug-in"
grep -q "NCCL WARN rank 1 (.*) can't use network Loop, which others have (there is no plug-in of that name" "$work/out" || fail "one host without the plug-in: the reason isn't told"
echo "ok   plug-ins that can't be used"

# A plug-in that fails in the middle ends the job with its name.
for bad in isend irecv test-99 accept connect regmr; do
	NCCL_NET_PLUGIN=loop11 LOOP_BAD=$bad timeout 60 "$telpher" run -n 2 --hosts 2 -- "$telpher" perf all_reduce -b 64K -e 64K -n 2 >"$work/out" 2>&1
	status=$?
	[ $status != 0 ] && [ $status != 124 ] || fail "a plug-in that breaks ($bad): no error"
	grep -q 'NCCL WARN NET/Plugin: Loop (v11, .*libnccl-net-loop11.so): ' "$work/out" || fail "a plug-in that breaks ($bad) isn't named"
done
echo "ok   plug-ins that fail later"
