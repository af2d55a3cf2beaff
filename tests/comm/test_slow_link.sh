#!/bin/bash
# The watch over the pace, on hosts that are network namespaces: it says nothing of a healthy job of many calls, whether it measures or not, and names
# the one slow link where there is one: as it is by default too, where ranks of a host share memory.
set -u
[ "$(id -u)" = 0 ] || { echo "needs root for network namespaces"; exit 77; }
for command in ip tc; do command -v $command >/dev/null || { echo "needs $command"; exit 77; }; done
telpher=$BUILD_DIR/bin/telpher
where=$(mktemp -d)
hosts=(tpw$$a tpw$$b tpw$$c tpw$$d)
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
for i in 0 1 2 3; do
	name=${hosts[i]}
	ip netns add $name && ip link add name eth0 netns $name type veth peer name port$i netns $switch || { echo "can't make a veth pair"; exit 77; }
	ip -n $switch link set port$i master br0 up
	ip -n $name addr add 10.99.8.$((i + 1))/24 dev eth0
	ip -n $name link set lo up
	ip -n $name link set eth0 up
done
ip netns exec ${hosts[0]} true 2>/dev/null || { echo "can't run programs in a network namespace (a chroot?)"; exit 77; }

# Four ranks; their output goes to $where/NAME.RANK.
start() { # NAME HOSTS ITERATIONS SETTINGS...
	local name=$1 nhosts=$2 n=$3 secret each=$((4 / $2))
	shift 3
	secret=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
	pids=()
	for rank in 0 1 2 3; do
		env NCCL_COMM_ID=10.99.8.1:29517 TELPHER_JOB_SECRET="$secret" TELPHER_RANK=$rank TELPHER_NRANKS=4 TELPHER_LOCAL_RANK=$((rank % each)) \
			TELPHER_LOCAL_NRANKS=$each NCCL_NET=Socket NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO TELPHER_DEVICE=host "$@" \
			ip netns exec ${hosts[rank / each]} "$telpher" perf all_reduce -b "${size:-256K}" -e "${size:-256K}" -n "$n" -w 2 -c 0 >"$where/$name.$rank" 2>&1 &
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

start healthy 4 60
if finish; then ok "a healthy job runs"; else fail "a healthy job runs: $(cat "$where"/healthy.*)"; fi
n=$(seen healthy)
if [ "${n:-0}" -ge 100 ]; then ok "its calls are watched"; else fail "its calls are watched: ${n:-no} calls"; fi
if warned healthy; then fail "nothing is said of it: $(cat "$where"/healthy.*)"; else ok "nothing is said of it"; fi

# A table that predicts a thousandth of every time makes all of it slow: pairs are measured, and none stands out.
for algo in RING TREE HALVING_DOUBLING ONE_SHOT TWO_SHOT DIRECT HIERARCHICAL; do echo "scale.$algo 0.001"; done >"$where/table"
start measured 4 120 TELPHER_WATCH=2 TELPHER_TUNE_FILE="$where/table"
if finish; then ok "a job whose pairs are measured runs"; else fail "a job whose pairs are measured runs: $(cat "$where"/measured.*)"; fi
if grep -q 'and measured pairs [1-9]' "$where/measured.0"; then ok "they are"; else fail "they are: $(cat "$where"/measured.0)"; fi
if warned measured; then fail "no pair is accused: $(cat "$where"/measured.*)"; else ok "no pair is accused"; fi

# Do other programs keep every processor busy several times over? Then what a link needs can't be told from what they take. (Four of the load are our ranks'.)
most=0
look_at_load() { most=$(awk -v most=$most -v cores="$(nproc)" '{ load = ($1 - 4) / cores; print (load > most ? load : most) }' /proc/loadavg); }
too_busy() { awk -v most=$most 'BEGIN { exit !(most > 3) }'; }

# Runs until somebody warns, for so long at most.
slow() { # NAME HOSTS SECONDS SETTINGS...
	local name=$1 nhosts=$2 end=$((SECONDS + $3))
	shift 3
	start "$name" "$nhosts" 1000000 "$@"
	most=0
	while kill -0 "${pids[0]}" 2>/dev/null && ! warned "$name" && [ $SECONDS -lt $end ]; do
		look_at_load
		sleep 0.2
	done
	# Whoever else might say it would do so now.
	warned "$name" && sleep 0.5
	kill "${pids[@]}" 2>/dev/null
	finish
	warned "$name" && return 0
	if too_busy; then
		echo "too busy a machine for a warning ($name)"
		skipped=77
		return 1
	fi
	fail "a slow link is told ($name): $(cat "$where/$name".*)"
	return 1
}
says() { # NAME PATTERN
	if grep -Eq -- "$2" <<<"$line"; then ok "$1"; else fail "$1: no '$2' in: $line"; fi
}
skipped=0

# What the second host sends, and that alone, has an eightieth of a gigabit.
if ! ip netns exec ${hosts[1]} tc qdisc add dev eth0 root tbf rate 64mbit burst 64kb latency 200ms 2>/dev/null; then
	echo "no tbf in this kernel: the rest is left out"
	exit $((fails > 0 ? 1 : 77))
fi
if slow slow 4 40 TELPHER_WATCH=2; then
	ok "a slow link is told"
	line=$(grep -h 'keeps running at' "$where"/slow.* | head -1)
	says "by the sender and the receiver" 'The slowest pair is rank 1 \(host [^ ]+, pid [0-9]+\) -> rank [023] '
	says "the link and its device" ' by NET/Socket/0 on eth0: [0-9.e-]+ GB/s, while others like it make [0-9.e-]+ GB/s'
	says "what ran, and how it should have" 'take [0-9.e+]+ times as long as predicted .*the prediction is [0-9.e+-]+ ms for AllReduce of 262144 bytes a block by [A-Z_]+'
	says "and where to look" 'Look at its ports, cable and switch'
	[ "$(cat "$where"/slow.* | grep -c 'keeps running at')" = 1 ] && ok "once" || fail "once"
fi

# Under a sanitizer, where all is slow, it would take too long to say anything.
[ -z "${SANITIZE-}" ] || exit $((fails > 0))

# As it is by default, where ranks of a host share its network: after seconds.
ip netns exec ${hosts[1]} tc qdisc replace dev eth0 root tbf rate 64mbit burst 32kb latency 200ms
if slow default 2 90; then
	ok "by default, too"
	line=$(grep -h 'keeps running at' "$where"/default.* | head -1)
	says "by the second host's ranks" 'The slowest pair is rank [23] \(host [^ ]+, pid [0-9]+\) -> rank [01] '
	says "over its network" ' by NET/Socket/0 on eth0: [0-9.e-]+ GB/s, while others like it make [0-9.e-]+ GB/s'
	[ "$(cat "$where"/default.* | grep -c 'keeps running at')" = 1 ] && ok "once" || fail "once"
fi

[ $fails = 0 ] || exit 1
exit $skipped
