#!/bin/bash
# The watch over the pace, on three hosts that are network namespaces: it says nothing of a healthy job of many calls, whether it measures or not,
# and names the one slow link where there is one.
set -u
[ "$(id -u)" = 0 ] || { echo "needs root for network namespaces"; exit 77; }
for command in ip tc; do command -v $command >/dev/null || { echo "needs $command"; exit 77; }; done
telpher=$BUILD_DIR/bin/telpher
where=$(mktemp -d)
hosts=(tpw$$a tpw$$b tpw$$c)
switch=tpw$$s
pids=()
cleanup() {
	[ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null
	wait
	for name in "${hosts[@]}" $switch; do ip netns del $name 2>/dev/null; done
	rm -rf "$where"
}
trap cleanup EXIT
fails=0
ok() { echo "ok   $1"; }
fail() { echo "FAIL $1"; fails=$((fails + 1)); }

ip netns add $switch 2>/dev/null || { echo "can't make network namespaces"; exit 77; }
ip -n $switch link add name br0 type bridge 2>/dev/null && ip -n $switch link set br0 up || { echo "can't make a bridge"; exit 77; }
for i in 0 1 2; do
	name=${hosts[i]}
	ip netns add $name && ip link add name eth0 netns $name type veth peer name port$i netns $switch || { echo "can't make a veth pair"; exit 77; }
	ip -n $switch link set port$i master br0 up
	ip -n $name addr add 10.99.8.$((i + 1))/24 dev eth0
	ip -n $name link set lo up
	ip -n $name link set eth0 up
done
ip netns exec ${hosts[0]} true 2>/dev/null || { echo "can't run programs in a network namespace (a chroot?)"; exit 77; }

# Three ranks, one a host; their output goes to $where/NAME.RANK.
start() { # NAME ITERATIONS SETTINGS...
	local name=$1 n=$2 secret
	shift 2
	secret=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
	pids=()
	for rank in 0 1 2; do
		env NCCL_COMM_ID=10.99.8.1:29517 TELPHER_JOB_SECRET="$secret" TELPHER_RANK=$rank TELPHER_NRANKS=3 TELPHER_LOCAL_RANK=0 TELPHER_LOCAL_NRANKS=1 \
			NCCL_NET=Socket NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO TELPHER_DEVICE=host "$@" ip netns exec ${hosts[rank]} \
			"$telpher" perf all_reduce -b 256K -e 256K -n "$n" -w 2 -c 0 >"$where/$name.$rank" 2>&1 &
		pids+=($!)
	done
}
finish() {
	local bad=0
	for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
	pids=()
	return $bad
}
warned() { grep -qs "keeps running at" "$where/$1".*; }

seen() { sed -n 's/.*the watch over the pace saw \([0-9]*\) large collectives.*/\1/p' "$where/$1.0" | head -1; }

start healthy 60 TELPHER_WATCH=1
if finish; then ok "a healthy job runs"; else fail "a healthy job runs: $(cat "$where"/healthy.*)"; fi
n=$(seen healthy)
if [ "${n:-0}" -ge 100 ]; then ok "its calls are watched"; else fail "its calls are watched: ${n:-no} calls"; fi
if warned healthy; then fail "nothing is said of it: $(cat "$where"/healthy.*)"; else ok "nothing is said of it"; fi

# A table that predicts a thousandth of every time makes all of it slow: pairs are measured, and none stands out.
for algo in RING TREE HALVING_DOUBLING ONE_SHOT TWO_SHOT DIRECT HIERARCHICAL; do echo "scale.$algo 0.001"; done >"$where/table"
start measured 100 TELPHER_WATCH=2 TELPHER_TUNE_FILE="$where/table"
if finish; then ok "a job whose pairs are measured runs"; else fail "a job whose pairs are measured runs: $(cat "$where"/measured.*)"; fi
if grep -q 'and measured pairs [1-9]' "$where/measured.0"; then ok "they are"; else fail "they are: $(cat "$where"/measured.0)"; fi
if warned measured; then fail "no pair is accused: $(cat "$where"/measured.*)"; else ok "no pair is accused"; fi

# What the second host sends, and that alone, has an eightieth of a gigabit.
if ! ip netns exec ${hosts[1]} tc qdisc add dev eth0 root tbf rate 64mbit burst 64kb latency 200ms 2>/dev/null; then
	echo "no tbf in this kernel: the rest is left out"
	exit $((fails > 0 ? 1 : 77))
fi
# On a busy machine a look may find nothing at first: the watch looks again. So many calls are enough for some looks, however long they take.
start slow 250 TELPHER_WATCH=2
while kill -0 "${pids[0]}" 2>/dev/null; do
	warned slow && break
	sleep 0.2
done
if ! warned slow && grep -q 'of its predicted speed' "$where"/slow.*; then
	finish
	echo "too busy a machine for a warning: it is slow for reasons of its own"
	exit $((fails > 0 ? 1 : 77))
fi
if warned slow; then ok "a slow link is told"; else fail "a slow link is told: $(cat "$where"/slow.*)"; fi
kill "${pids[@]}" 2>/dev/null
finish
line=$(grep -h 'keeps running at' "$where"/slow.* | head -1)
says() { # NAME PATTERN
	if grep -Eq -- "$2" <<<"$line"; then ok "$1"; else fail "$1: no '$2' in: $line"; fi
}
says "by the sender and the receiver" 'The slowest pair is rank 1 \(host [^ ]+, pid [0-9]+\) -> rank [02] '
says "the link and its device" ' by NET/Socket/0 on eth0: [0-9.e-]+ GB/s, while others like it make [0-9.e-]+ GB/s'
says "what ran, and how it should have" 'take [0-9.e+]+ times as long as predicted .*the prediction is [0-9.e+-]+ ms for AllReduce of 262144 bytes a block by [A-Z_]+'
says "and where to look" 'Look at its ports, cable and switch'
[ "$(cat "$where"/slow.* | grep -c 'keeps running at')" = 1 ] && ok "once" || fail "once"

exit $((fails > 0))
