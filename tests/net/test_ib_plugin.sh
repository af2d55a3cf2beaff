#!/bin/bash
# Whole jobs over our exported plug-in with RDMA beneath, on the software card: one libnccl's plug-in interface on the other's transports.
set -u
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] || { echo "the software card isn't built"; exit 77; }
. "$SOURCE_DIR/tests/net/lib_jobs.sh"
export LD_LIBRARY_PATH=$BUILD_DIR/lib/telpher NCCL_NET_PLUGIN=telpher TELPHER_PLUGIN_NET=IB
good() { # WHAT
	right "$1"
	grep -q 'Using network Telpher' "$work/out" || fail "$1: not over the plug-in"
	grep -q 'NET/Telpher : Using network IB' "$work/out" || fail "$1: not over RDMA"
}
for what in all_reduce all_gather alltoall sendrecv; do job 2 2 $what; done
most=1M TELPHER_VERBS_DEVICES=2 job 4 2 all_reduce
grep -q 'via NET/Telpher/1' "$work/out" || fail "the second device isn't used"
job 3 3 reduce_scatter
echo "ok   collectives over the exported plug-in and RDMA"
