#!/bin/bash
# Programs with several ways to talk (Open MPI over UCX, UCX alone, libfabric) must really talk by the card: its counters grow by what
# they move, which would be nothing if they had quietly taken TCP or their own shared memory.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
# The counters are those of a network namespace: this one is for this test alone.
if [ "$(id -u)" = 0 ] && [ "${1-}" != alone ] && unshare -n true 2>/dev/null; then
	exec unshare -n bash "$0" alone
fi
address=
if [ "${1-}" = alone ]; then
	# libfabric takes no notice of loopback's address.
	ip link set lo up || exit 1
	if ip link add tpt0 type veth peer name tpt1 && ip addr add 10.99.8.1/24 dev tpt0; then
		ip link set tpt1 up && ip link set tpt0 up
		address=10.99.8.1
	fi
fi
work=$(mktemp -d) || exit 1
server=
finish() {
	[ -z "$server" ] || kill $server 2>/dev/null
	[ "${1-}" != alone ] || rm -f /dev/shm/telpher-verbs-counters-*-"$(stat -L -c %i /proc/self/ns/net)"-*
	rm -rf "$work"
}
trap "finish ${1-}" EXIT
cd "$work" || exit 1
telpher=$BUILD_DIR/bin/telpher
[ -n "$address" ] || address=$("$telpher" verbs gids | awk '$3 == 0 && $5 ~ /^[0-9]+\./ && $5 !~ /^127/ { print $5; exit }')
export TELPHER_VERBS_DEVICES=mlx5_0 UCX_WARN_UNUSED_ENV_VARS=n
port=$((20000 + $$ % 187 * 64))    # below the range that the system gives to clients
counted() { "$telpher" verbs counters mlx5_0 | awk '$3 == "port_xmit_data" { print $4 * 4 }'; }
begin_count() { before=$(counted); }
crossed() { # at least so many bytes, who
	local bytes=$(($(counted) - before))
	[ $bytes -ge $1 ] || fail "$2 moved $1 bytes and more, and $bytes of them by the card: $(tail -20 "$work/out")"
	tested=$((tested + 1))
}
tested=0

# ---- Open MPI over UCX ----
mpi() { # environment... -- ranks, program...
	local environment=() ranks
	while [ "$1" != -- ]; do environment+=("$1"); shift; done
	ranks=$2
	shift 2
	begin_count
	env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONDONTWRITEBYTECODE=1 "${environment[@]}" timeout -k 5 60 "${launch[@]}" \
		"$mpirun" --oversubscribe -n $ranks --mca pml ucx --mca btl self -x UCX_NET_DEVICES=mlx5_0:1 -x UCX_TLS=$transports "$@" \
		/usr/bin/python3 "$SOURCE_DIR/tests/verbs/mpi_program.py" >"$work/out" 2>&1 || fail "$ranks ranks by $transports end with $?: $(tail -30 "$work/out")"
	[ "$(grep -c "of $ranks: [0-9]* bytes" "$work/out")" = $ranks ] || fail "not all of $ranks ranks say that they are done: $(cat "$work/out")"
	crossed "$(sed -n "s/.* of $ranks: \([0-9]*\) bytes/\1/p" "$work/out" | awk '{ sum += $1 } END { print sum }')" "$ranks ranks by $transports"
}
mpirun=$(command -v mpirun.openmpi || command -v mpirun)
if [ -n "$mpirun" ] && ompi_info 2>/dev/null | grep -q 'MCA pml: ucx'; then
	launch=("$telpher" verbs run) transports=rc_verbs,ud_verbs,self
	mpi -- 2
	mpi -- 4
	mpi TELPHER_VERBS_CARRIER=wire -- 2
	transports=ud_verbs,self
	mpi -- 2
	# As on several machines: what is started there is what has the card.
	launch=() transports=rc_verbs,ud_verbs,self
	mpi -- 2 "$telpher" verbs run
else
	echo "without Open MPI over UCX (Debian: openmpi-bin)"
fi

# ---- UCX alone, libfabric ----
pair() { # server's arguments -- client's
	local arguments=()
	port=$((port + 1))
	while [ "$1" != -- ]; do arguments+=("${1/PORT/$port}"); shift; done
	shift
	begin_count
	timeout 60 "$telpher" verbs run "${arguments[@]}" >"$work/out" 2>&1 & server=$!
	for _ in $(seq 1000); do
		grep -qi ":$(printf %04X $port) .* 0A " /proc/net/tcp /proc/net/tcp6 && break
		sleep 0.05
	done
	timeout 60 "$telpher" verbs run "${@/PORT/$port}" >"$work/client" 2>&1 || fail "$*: the client ends with $?: $(cat "$work/client" "$work/out" | tail -40)"
	wait $server || fail "$*: the server ends with $?: $(tail -20 "$work/out")"
	server=
}
if command -v ucx_perftest >/dev/null; then
	# Connections of rc_verbs are made by datagrams of ud_verbs; below (uct) each is alone.
	for transports in rc_verbs,ud_verbs,self ud_verbs,self; do
		export UCX_TLS=$transports UCX_NET_DEVICES=mlx5_0:1
		ucx=(ucx_perftest -t tag_bw -s 60000 -n 300 -w 10 -f -p PORT)
		pair "${ucx[@]}" -- "${ucx[@]}" 127.0.0.1
		crossed $((60000 * 300)) "UCX by $transports"
	done
	for transports in rc_verbs ud_verbs; do
		ucx=(ucx_perftest -d mlx5_0:1 -x $transports -t am_bw -D zcopy -s 1000 -n 5000 -w 10 -f -p PORT)
		pair "${ucx[@]}" -- "${ucx[@]}" 127.0.0.1
		crossed $((1000 * 5000)) "UCX's $transports"
	done
	unset UCX_TLS UCX_NET_DEVICES
else
	echo "without UCX (Debian: ucx-utils)"
fi
if command -v fi_pingpong >/dev/null && [ -e "$CARD/librdmacm.so.1" ] && [ -n "$address" ]; then
	pair fi_pingpong -p verbs -e msg -I 50 -S 60000 -B PORT -- fi_pingpong -p verbs -e msg -I 50 -S 60000 -P PORT "$address"
	crossed $((60000 * 50 * 2)) "libfabric"
else
	echo "without libfabric (Debian: libfabric-bin), or an address that is no loopback"
fi
[ $tested -gt 0 ] || exit 77
echo "$tested programs talk by the card"
