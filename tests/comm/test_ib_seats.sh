#!/bin/bash
# Which network devices ranks use: those near to them, on a machine that a file describes, whose ports are the software card's; and both ends of a
# connection use what the paths say.
set -u
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] || { echo "the software card isn't built"; exit 77; }
command -v python3 >/dev/null || { echo "needs python3"; exit 77; }
command -v taskset >/dev/null || { echo "needs taskset"; exit 77; }
read -ra cpus <<<"$(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0))[:2])')"
[ ${#cpus[@]} = 2 ] || { echo "needs two processors"; exit 77; }
telpher=$BUILD_DIR/bin/telpher
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
export NCCL_NET=IB NCCL_IB_HCA=telpher TELPHER_VERBS_HIDE_REAL=1 TELPHER_VERBS_DEVICES=2 NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET
unset NCCL_CROSS_NIC NCCL_TOPO_FILE

# Each rank of a host on a processor of its own, or anywhere; $where/devices then has "from>to sender receiver" of each pair that the network joins,
# as connections were made.
cat >"$where/pinned" <<END
#!/bin/bash
case \$TELPHER_LOCAL_RANK in
0) exec taskset -c ${cpus[0]} "\$@" ;;
*) exec taskset -c ${cpus[1]} "\$@" ;;
esac
END
chmod +x "$where/pinned"
run() { # HOW PROGRAM… (all ranks 4 on 2 hosts)
	"$telpher" run -n 4 --hosts 2 --paths "$where/paths" "$@" "$telpher" perf all_to_all -b 4K -e 4K -n 1 -w 0 >"$where/out" 2>&1
	local status=$?
	sed -nE 's/.*NET\/IB : rank ([0-9]+) -> rank ([0-9]+), [^ ]+ \((telpher[0-9]+):1,.*\) -> [^ ]+ \((telpher[0-9]+):1,.* connected$/\1>\2 \3 \4/p' "$where/out" | sort -u >"$where/devices"
	[ $status = 0 ] || { cat "$where/out"; fails=$((fails + 1)); }
}
# The sender's device of each pair in the paths, in the same form.
reported() {
	python3 -c '
import json, sys
for p in json.loads(open(sys.argv[1]).readlines()[-1])["paths"]:
	if p["via"].startswith("NET/"): print("%d>%d %s" % (p["from"], p["to"], p["device"] if p["via"] == "NET/IB/" + p["device"][-1] else p["via"]))
' "$where/paths" | sort
}

printf '<system version="1">\n%s\n%s\n</system>\n' \
	"<cpu numaid=\"0\" affinity=\"$(printf %x $((1 << cpus[0])))\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\"><nic><net name=\"telpher1\" port=\"1\"/></nic></cpu>" \
	"<cpu numaid=\"1\" affinity=\"$(printf %x $((1 << cpus[1])))\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\"><nic><net name=\"telpher0\" port=\"1\"/></nic></cpu>" >"$where/machine.xml"
export NCCL_TOPO_FILE=$where/machine.xml
run "$where/pinned"
expect "each end uses its NUMA node's" "0>2 telpher1 telpher1,0>3 telpher1 telpher0,1>2 telpher0 telpher1,1>3 telpher0 telpher0,2>0 telpher1 telpher1,2>1 telpher1 telpher0,3>0 telpher0 telpher1,3>1 telpher0 telpher0" \
	"$(paste -sd, "$where/devices")"
expect "and the paths say so" "$(cut -d' ' -f1,2 "$where/devices")" "$(reported)"

export NCCL_CROSS_NIC=0
run "$where/pinned"
expect "NCCL_CROSS_NIC=0 keeps the sender's rail" "0>3 telpher1 telpher1,1>2 telpher0 telpher0" "$(grep -E '^(0>3|1>2)' "$where/devices" | paste -sd,)"
unset NCCL_CROSS_NIC

unset NCCL_TOPO_FILE
run
expect "ranks that run anywhere share the devices out" "0>2 telpher0 telpher0,0>3 telpher0 telpher1,1>2 telpher1 telpher0,1>3 telpher1 telpher1" "$(grep -E '^[01]>' "$where/devices" | paste -sd,)"

NCCL_IB_HCA==telpher1,telpher0 run
expect "in the order of NCCL_IB_HCA" "0>2 telpher1 telpher1,1>3 telpher0 telpher0" "$(grep -E '^(0>2|1>3)' "$where/devices" | paste -sd,)"

# The second host has one device of the two.
printf '#!/bin/bash\n[ "$TELPHER_RANK" -lt 2 ] || export NCCL_IB_HCA==telpher1\nexec "$@"\n' >"$where/fewer"
chmod +x "$where/fewer"
NCCL_DEBUG_SUBSYS=INIT,NET run "$where/fewer"
expect "a host with fewer devices is met at what it has" "0>2 telpher0 telpher1,1>3 telpher1 telpher1,2>0 telpher1 telpher0" "$(grep -E '^(0>2|1>3|2>0)' "$where/devices" | paste -sd,)"
expect "and a warning names both sets" 1 "$(grep -c 'WARN.*has 2 ports (telpher0:1 [^)]*, telpher1:1 [^)]*).*has 1 (telpher1:1 ' "$where/out" | sed 's/^[1-9][0-9]*$/1/')"

exit $((fails > 0))
