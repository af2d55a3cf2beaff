#!/bin/bash
# Linux's kernel RoCE at the other end: each program once with the kernel as server and once as client, some with loss both ways.
# The guest is emulated, so times mean nothing; all in all it takes a minute. RXE_ONLY (a regular expression) chooses from the list.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: once is enough"; exit 77; }
. "$SOURCE_DIR/tests/verbs/lib_rxe.sh"
mkdir -p "$RXE"
rxe_need
rxe_build || fail "the guest can't be built"
work=$(mktemp -d) || exit 1
host=tpr$$ guest=
trap 'kill $(jobs -p) 2>/dev/null; ip netns del $host 2>/dev/null; rm -rf "$work"' EXIT
ip netns add $host 2>/dev/null && ip netns exec $host true 2>/dev/null || { echo "can't make a network namespace"; exit 77; }
ip -n $host link set lo up
ip -n $host tuntap add dev tap0 mode tap || { echo "can't make a TAP device"; exit 77; }
ip -n $host addr add $RXE_HOST/24 dev tap0
ip -n $host link set tap0 up
unset TELPHER_VERBS_GIDS TELPHER_VERBS_DEVICES

# name, faults at our side, port, program. The first GID is ours, the kernel's second one is the IPv4 address's.
grep -E "^(${RXE_ONLY:-.*}) " >"$work/list" <<'L'
write - 19001 ib_write_bw -n 20 -u 18
read - 19002 ib_read_bw -n 20 -u 18
send - 19003 ib_send_bw -n 20 -u 18
atomic - 19004 ib_atomic_bw -n 20 -u 18
uc - 19005 ib_write_bw -c UC -n 20 -u 18
ud - 19006 ib_send_bw -c UD -n 20 -s 1000 -u 18
pingpong - 19007 ibv_uc_pingpong -n 20
write-loss drop=0.03,seed=1,side=both 19008 ib_write_bw -n 20 -u 16
read-loss drop=0.03,seed=2,side=both 19009 ib_read_bw -n 20 -u 16
send-loss drop=0.03,seed=3,side=both 19010 ib_send_bw -n 20 -u 16
rping - 19011 rping -C 5 -V
ucmatose - 19012 ucmatose -c 3
udaddy - 7174 udaddy -c 2
L
command_of() { # server|client gid-index port peer program...
	local role=$1 gid=$2 port=$3 peer=$4 program=$5
	shift 5
	case $program in
	ib_*) echo "$program" -F -x $gid -p $port "$@" $([ $role = client ] && echo $peer) ;;
	ibv_*) echo "$program" -g $gid -p $port "$@" $([ $role = client ] && echo $peer) ;;
	rping) echo rping $([ $role = client ] && echo -c -a $peer || echo -s -a 0.0.0.0) -p $port "$@" ;;
	udaddy) echo udaddy "$@" $([ $role = client ] && echo -s $peer) ;;      # its port is always 7174
	ucmatose) echo ucmatose -p $port "$@" $([ $role = client ] && echo -s $peer) ;;
	esac
}
{
	cat <<-'G'
		serve() { name=$1; shift; ( "$@" >/tmp/$name 2>&1; r=$?; echo "GUEST server $name: $r"; [ $r = 0 ] || tail -5 /tmp/$name ) & }
		connect() {
			name=$1; shift
			for k in 1 2 3 4 5; do "$@" >/tmp/$name 2>&1; r=$?; grep -qiE "couldn.t connect|refused|REJECTED|UNREACHABLE" /tmp/$name || break; sleep 1; done
			echo "GUEST client $name: $r"; [ $r = 0 ] || tail -5 /tmp/$name
		}
	G
	while read -r name _ port program; do echo "serve $name $(command_of server 1 $port - $program)"; done <"$work/list"
	tcp=$(grep -c ' ib' "$work/list")
	echo "for k in \$(seq 100); do [ \$(grep -c ' 0A ' /proc/net/tcp) -ge $tcp ] && break; sleep 0.1; done; sleep 0.5; echo GUEST serves; wait"
	while read -r name _ port program; do echo "connect $name $(command_of client 1 $((port + 100)) $RXE_HOST $program)"; done <"$work/list"
} >"$work/commands"

in_host() { ip netns exec $host timeout 90 "$BUILD_DIR/bin/telpher" verbs run "$@"; }
(exec >"$work/guest" 2>&1; exec ip netns exec $host bash -c ". '$SOURCE_DIR/tests/verbs/lib_card.sh'; . '$SOURCE_DIR/tests/verbs/lib_rxe.sh'
	KERNEL_ROOT=$KERNEL_ROOT KERNEL_VERSION=$KERNEL_VERSION rxe_boot '$work/commands'") & guest=$!
wait_guest() { # for a line of its console
	for _ in $(seq 1500); do
		grep -aq "$1" "$work/guest" && return
		kill -0 $guest 2>/dev/null || break
		sleep 0.1
	done
	tail -20 "$work/guest"
	fail "the guest doesn't say '$1'"
}
wait_guest 'GUEST is up'
wait_guest 'GUEST serves'
failed=
while read -r name faults port program; do
	[ "$faults" = - ] && unset TELPHER_VERBS_FAULT || export TELPHER_VERBS_FAULT=$faults
	in_host $(command_of client 0 $port $RXE_GUEST $program) >"$work/client.$name" 2>&1 </dev/null && continue
	echo "our client $name ends with $?:"; tail -8 "$work/client.$name"
	failed="$failed client-$name"
done <"$work/list"
while read -r name faults port program; do
	[ "$faults" = - ] && unset TELPHER_VERBS_FAULT || export TELPHER_VERBS_FAULT=$faults
	(timeout 120 ip netns exec $host "$BUILD_DIR/bin/telpher" verbs run $(command_of server 0 $((port + 100)) - $program) >"$work/server.$name" 2>&1 </dev/null
	echo $? >"$work/status.$name") &
done <"$work/list"
wait $guest
for _ in $(seq 300); do
	[ "$(cat "$work"/status.* 2>/dev/null | wc -l)" = "$(wc -l <"$work/list")" ] && break
	sleep 0.1
done
while read -r name _; do
	ended_well "$(cat "$work/status.$name" 2>/dev/null)" "$work/server.$name" && continue
	echo "our server $name ends with $(cat "$work/status.$name" 2>/dev/null || echo nothing):"; tail -8 "$work/server.$name"
	failed="$failed server-$name"
done <"$work/list"
for role in server client; do
	good=$(grep -ac "GUEST $role .*: 0" "$work/guest")
	[ "$good" = "$(wc -l <"$work/list")" ] || failed="$failed guest-$role"
done
[ -z "$failed" ] || { grep -a -A5 GUEST "$work/guest"; fail "with kernel rxe:$failed"; }
echo "$(wc -l <"$work/list") programs, each both ways, with kernel rxe $KERNEL_VERSION"
