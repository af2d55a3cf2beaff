#!/bin/bash
# Whole jobs over our exported plug-in with RDMA beneath, on the software card: one libnccl's plug-in interface on the other's transports.
set -u
telpher=$BUILD_DIR/bin/telpher
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] || { echo "the software card isn't built"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; tail -30 "$work/out"; exit 1; }
export LD_LIBRARY_PATH=$BUILD_DIR/lib/telpher NCCL_NET_PLUGIN=telpher TELPHER_PLUGIN_NET=IB NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
export TELPHER_IB_PATH_TIMEOUT=60000       # a busy machine is no reason to take a path for dead

job() { # RANKS HOSTS COLLECTIVE OPTIONS…
	local ranks=$1 hosts=$2 what=$3
	shift 3
	timeout 100 "$telpher" run -n $ranks --hosts $hosts -- "$telpher" perf $what -b 8 -e ${most:-64K} -f 64 -n 3 -w 1 -c 1 "$@" >"$work/out" 2>&1 || fail "$what, $ranks ranks on $hosts hosts"
	grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "$what: wrong results"
	grep -q 'Using network Telpher' "$work/out" || fail "$what: not over the plug-in"
	grep -q 'NET/Telpher : Using network IB' "$work/out" || fail "$what: not over RDMA"
	# A process that gets no processor for a second is none that has been stopped, but how should the card know?
	grep 'NCCL WARN' "$work/out" | grep -qv 'has served nothing for .*has it been stopped' && fail "$what: a warning"
	true
}
for what in all_reduce all_gather alltoall sendrecv; do job 2 2 $what; done
most=1M TELPHER_VERBS_DEVICES=2 job 4 2 all_reduce
grep -q 'via NET/Telpher/1' "$work/out" || fail "the second device isn't used"
job 3 3 reduce_scatter
echo "ok   collectives over the exported plug-in and RDMA"
