#!/bin/bash
# Rings of host processes: neighbours run near each other, and hosts are one after the other.
set -u
command -v taskset >/dev/null || { echo "needs taskset"; exit 77; }
read -ra cpus <<<"$(taskset -pc $$ | sed 's/.*: //' | tr ',' '\n' | while IFS=- read -r a b; do seq "$a" "${b:-$a}"; done | sort -n | head -2 | tr '\n' ' ')"
[ ${#cpus[@]} = 2 ] || { echo "needs two processors"; exit 77; }
telpher=$BUILD_DIR/bin/telpher
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo TELPHER_DEVICE=host NCCL_DEBUG=INFO NCCL_ALGO=RING
# Ranks of odd numbers run on the first processor, others on the second.
printf '#!/bin/bash\n[ $((TELPHER_RANK %% 2)) = 1 ] && exec taskset -c %s "$@"\nexec taskset -c %s "$@"\n' "${cpus[@]}" >"$where/pinned"
chmod +x "$where/pinned"
run() { # NAME RANKS HOSTS PROGRAM…
	local name=$1 n=$2 hosts=$3
	shift 3
	for what in all_reduce broadcast; do
		"$telpher" run -n "$n" --hosts "$hosts" "$@" "$telpher" perf $what -b 50K -e 50K -n 1 -w 0 -c 1 >"$where/out" 2>&1
		expect "$name: $what is right" "0 0" "$? $(grep -c 'FAILED\|WARN' "$where/out")"
	done
	order=$(sed -nE 's/.*NCCL INFO Channel 00\/01 : //p' "$where/out")
}
run "two processors" 4 1 "$where/pinned"
expect "those of one processor are neighbours" "1 3 0 2" "$(xargs <<<"$order")"
run "two hosts" 6 2 "$where/pinned"
expect "on each host, one after the other" "1 0 2 3 5 4" "$(xargs <<<"$order")"
run "anywhere" 4 1
expect "ranks that run anywhere stand by number" "0 1 2 3" "$(xargs <<<"$order")"
exit $((fails > 0))
