# Whole jobs over RDMA on the software card that NCCL_IB_HCA names (opened from its folder, nothing preloaded): ranks as processes on virtual hosts
# (job), or one in each of two network namespaces (between). The script's good judges what each said, which is in $work/out.
telpher=$BUILD_DIR/bin/telpher
work=$(mktemp -d)
. "$SOURCE_DIR/tests/lib_namespaces.sh"
trap 'delete_namespaces; rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; grep -n "NCCL WARN" "$work/out" | head -5; tail -30 "$work/out"; exit 1; }
export NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
export TELPHER_IB_PATH_TIMEOUT=60000       # a busy machine is no reason to take a path for dead
all="all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv"

right() { # WHAT: every element, and nothing to warn of
	grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "$1: wrong results"
	# A process that gets no processor for a second is none that has been stopped, but how should the card know?
	grep 'NCCL WARN' "$work/out" | grep -qv 'has served nothing for .*has it been stopped' && fail "$1: a warning"
	true
}
job() { # RANKS HOSTS COLLECTIVE OPTIONS…
	local ranks=$1 hosts=$2 what=$3
	shift 3
	timeout 100 "$telpher" run -n $ranks --hosts $hosts -- "$telpher" perf $what -b ${least:-8} -e ${most:-64K} -f 64 -n ${calls:-3} -w 1 -c 1 "$@" >"$work/out" 2>&1 ||
		fail "$what, $ranks ranks on $hosts hosts"
	good "$what, $ranks ranks on $hosts hosts"
}
# The namespaces $a and $b, joined by v0 and v1 with addresses in 10.NUMBER.0. and .1.; or the script ends here, having passed.
make_two_hosts() { # NUMBER
	a=tpj$$a b=tpj$$b
	make_namespaces $a $b || exit 0
	for i in 0 1; do join_namespaces $a $b v$i 1500 10.$1.$i. || exit 0; done
	await_interfaces
	root=10.$1.0.1
	export TELPHER_VERBS_DEVICES=2 TELPHER_VERBS_IFNAME=v0,v1
}
between() { # COLLECTIVE OPTIONS…
	local result=0 rank=0
	for space in $a $b; do
		TELPHER_RANK=$rank TELPHER_NRANKS=2 TELPHER_LOCAL_RANK=0 TELPHER_LOCAL_NRANKS=1 RANK=$rank WORLD_SIZE=2 TELPHER_JOB_SECRET="of this test" NCCL_COMM_ID=$root:2${$: -4:4} \
			timeout 100 ip netns exec $space "$telpher" perf "$@" -b 8 -e 1M -f 64 -n 3 -w 1 >"$work/$rank" 2>&1 &
		pids[rank]=$!
		rank=$((rank + 1))
	done
	wait ${pids[0]} || result=1
	wait ${pids[1]} || result=1
	cat "$work/0" "$work/1" >"$work/out"
	[ $result = 0 ] || fail "$1 between namespaces"
	good "$1 between namespaces"
}
