#!/bin/bash
# Does the watch over the pace stay silent where nothing is wrong but the machine is busy? Healthy jobs of 2, 4 and 8 ranks, over shared memory, sockets
# and the software card, one after the other for so many minutes, beside processes that take all processors, or one of them, or none. Every warning
# of the watch is a false one: the exit status is 0 if there was none, after a look at least.
#
#   BUILD_DIR=build bench/watch/stress.sh [MINUTES (30)] [SECONDS A JOB (30)]
#
# Half of the jobs have the model as it is; a quarter one that predicts a thousandth of every time, so that ranks measure again and again; a quarter
# figures that count as measured, so that slowness of all would be a warning too. A third of all have TELPHER_WATCH=2, the others what is the default.
set -u
minutes=${1:-30} seconds=${2:-30}
telpher=${BUILD_DIR:?the build folder}/bin/telpher
card=$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1
where=$(mktemp -d)
hogs=() job=
stop_hogs() { [ ${#hogs[@]} -eq 0 ] || { kill "${hogs[@]}" && wait "${hogs[@]}"; } 2>/dev/null; hogs=(); }
cleanup() { [ -z "$job" ] || kill "$job" 2>/dev/null; stop_hogs; rm -rf "$where"; }
trap cleanup EXIT
trap 'exit 130' INT TERM

for algo in RING TREE HALVING_DOUBLING ONE_SHOT TWO_SHOT DIRECT HIERARCHICAL; do echo "scale.$algo 0.001"; done >"$where/hasty"
printf '%s\n' 'inside.latency_us 0.16' 'inside.us_per_byte 0.41e-4' 'across.latency_us 18' 'across.us_per_byte 3.4e-4' >"$where/measured"

start_hogs() { # KIND
	local cores i
	cores=$(nproc)
	case $1 in
	all) for ((i = 0; i < 2 * cores; i++)); do (while :; do :; done) & hogs+=($!); done ;;
	one) for i in 1 2 3; do taskset -c 0 bash -c 'while :; do :; done' & hogs+=($!); done ;;
	# A co-tenant that comes and goes.
	waves) for ((i = 0; i < cores; i++)); do (while :; do for ((k = 0; k < 200000; k++)); do :; done; sleep 0.$((RANDOM % 9 + 1)); done) & hogs+=($!); done ;;
	esac
}

jobs=0 failed=0 warnings=0 looks=0
end=$((SECONDS + 60 * minutes))
pick() { local list=("$@"); echo "${list[RANDOM % $#]}"; }
RANDOM=${SEED:-$$}
while [ $SECONDS -lt $end ]; do
	ranks=$(pick 2 4 8) net=$(pick shm Socket Socket card) load=$(pick none all one waves) what=$(pick all_reduce all_reduce all_gather alltoall)
	size=$(pick 256K 512K 1M 4M) table=$(pick as-is as-is hasty measured) level=$(pick 1 1 2) hosts=1 settings=(NCCL_DEBUG=INFO TELPHER_DEVICE=host)
	[ "$net" = card ] && [ ! -e "$card" ] && net=Socket
	[ $net = shm ] || hosts=$(pick 2 $ranks)
	[ $net = Socket ] && settings+=(NCCL_NET=Socket)
	[ $net = card ] && settings+=(NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1)
	[ $table = as-is ] || settings+=(TELPHER_TUNE_FILE="$where/$table")
	[ "$level" = 1 ] || settings+=(TELPHER_WATCH=2)
	start_hogs $load
	env "${settings[@]}" "$telpher" run -n "$ranks" --hosts="$hosts" --timeout="$seconds" -- "$telpher" perf "$what" -b $size -e $size -n 1000000 -c 0 >"$where/out" 2>&1 &
	job=$!
	wait $job
	job=
	stop_hogs
	jobs=$((jobs + 1))
	n=$(grep -c 'keeps running at' "$where/out") seen=$(grep -c -e 'of its predicted speed' -e 'looks once more' "$where/out")
	warnings=$((warnings + n)) looks=$((looks + seen))
	# A job that ended before its time has failed for another reason.
	grep -q 'NCCL INFO.*Init COMPLETE' "$where/out" || { failed=$((failed + 1)); tail -3 "$where/out"; }
	echo "$ranks ranks on $hosts hosts, $net, $what $size, hogs: $load, model: $table, level $level: $n warnings, looks told of: $seen"
	[ "$n" = 0 ] || grep 'keeps running at' "$where/out"
done
echo "$jobs jobs, $failed that didn't run, $looks looks told of, $warnings false warnings"
[ $warnings = 0 ] && [ $failed = 0 ] && [ $looks -gt 0 ]
