#!/bin/bash
# Rootless is the promise: unmodified programs as nobody, without a capability, in fresh network namespaces, and to whom the kernel
# refuses what it refuses in containers (refuse.c): other processes' memory, newer system calls, socket buffers, segmentation offload,
# more than 256 descriptors. Each by the short way (two processes of one namespace; where that is refused they must take the wire by
# themselves) and on the wire (two namespaces). Usually all refusals at once and few programs; LONG=1: each refusal, all programs.
set -u
. "$SOURCE_DIR/tests/verbs/lib_card.sh"
. "$SOURCE_DIR/tests/verbs/lib_pyverbs.sh"
[ -z "$card_preload" ] || { echo "not under a sanitizer: every program would need its runtime in front"; exit 77; }
case $(uname -m) in x86_64 | aarch64) ;; *) echo "the filter is for x86_64 and aarch64"; exit 77 ;; esac
need ibv_rc_pingpong ibverbs-utils
need ib_write_bw perftest
need rping rdmacm-utils
need setpriv util-linux
need gcc gcc
[ -e "$CARD/librdmacm.so.1" ] || { echo "librdmacm isn't built (Debian: librdmacm-dev)"; exit 77; }
. "$SOURCE_DIR/tests/verbs/lib_namespaces.sh"
work=$(mktemp -d -p /var/tmp) && chmod 755 "$work" || exit 1
server=
end_all() { kill -KILL $(ip netns pids $HOST_A 2>/dev/null) $(ip netns pids $HOST_B 2>/dev/null) 2>/dev/null; }
finish() { end_all; delete_namespaces; rm -rf "$work"; }
trap finish EXIT
# The build may lie where nobody may look.
mkdir -p "$work/bin" "$work/lib" && cp "$BUILD_DIR/bin/telpher" "$work/bin/" && cp -rL "$BUILD_DIR/lib/"* "$work/lib/" && chmod -R go+rX "$work" || fail "no copy"
gcc -std=c17 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -o "$work/refuse" "$SOURCE_DIR/tests/verbs/refuse.c" || fail "refuse.c can't be built"
as_nobody=(setpriv --no-new-privs --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --ambient-caps=-all --bounding-set=-all)
cd / || exit 1

# The filter does what it says, and only that; there is no capability left.
everything=peers,kernel,pidfd,buffers,offload
for what in none peers kernel pidfd buffers offload $everything; do
	"${as_nobody[@]}" "$work/refuse" $what "$work/refuse" --check $what 2>"$work/out" && continue
	[ $? != 77 ] || { echo "this kernel has no seccomp filters"; exit 77; }
	fail "the filter for $what: $(cat "$work/out")"
done
"${as_nobody[@]}" grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status || fail "there are capabilities left"
"${as_nobody[@]}" grep -q '^CapBnd:[[:space:]]*0*$' /proc/self/status || fail "there are capabilities to be had"

# What a program of a variation is started by, at A or B: refusals, descriptors. With a /tmp of its own: perftest leaves files there that
# another user can't open.
begin() { # namespace, program...
	local at=$1
	shift
	ip netns exec $at sh -c 'mount -t tmpfs tmpfs /tmp && exec "$@"' sh "${as_nobody[@]}" env -u TELPHER_VERBS_CARRIER LD_LIBRARY_PATH="$work/lib/telpher" \
		HOME=/ TMPDIR=/tmp NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET "${environment[@]}" prlimit --nofile=$files "$work/refuse" $refused timeout -k 5 100 "$work/bin/telpher" verbs run "$@"
}
listens() { # port
	at_a grep -qi ":$(printf %04X "$1") .* 0A " /proc/net/tcp /proc/net/tcp6 || at_a grep -q "@telpher-verbs/.*/port/[0-9a-f]*/$1\$" /proc/net/unix
}
# As server at A and as client at A (the short way) or B (the wire).
port=7300 count=0
pair() { # way, server's arguments -- client's
	local way=$1 at=$HOST_A arguments=() status
	shift
	[ $way = short ] || at=$HOST_B
	while [ "$1" != -- ]; do arguments+=("$1"); shift; done
	shift
	begin $HOST_A "${arguments[@]}" >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do
		listens $port && break
		kill -0 $server 2>/dev/null || break
		sleep 0.03
	done
	begin $at "$@" >"$work/client" 2>&1
	status=$?
	[ $status = 0 ] || wrong "the client ends with $status" "$@"
	wait $server
	status=$?
	server=
	ended_well $status "$work/server" || wrong "the server ends with $status" "$@"
	# That there is no shared memory is worth a word, and no harm. libfabric tries what can't be.
	[ $1 = fi_pingpong ] || ! grep -hE 'WARN|ERROR' "$work/server" "$work/client" |
		grep -qv 'shared segment telpher-verbs-keys .*memfd_create: Function not implemented' || wrong "there are warnings" "$@"
	count=$((count + 1))
	port=$((port + 1))
}
wrong() {
	fail "$* [$variation]: $(grep -v 'check_cap' "$work/client" | tail -30; echo --- server; grep -v 'check_cap' "$work/server" | tail -30)"
}
perftest() { # way, program...
	local way=$1
	shift
	pair $way "$@" -x 0 -F -u 18 -p $port -- "$@" -x 0 -F -u 18 -p $port 10.99.7.1
}
pingpong() { # way, kind, more
	local way=$1 kind=$2
	shift 2
	pair $way ibv_${kind}_pingpong -g 0 -n 50 -p $port "$@" -- ibv_${kind}_pingpong -g 0 -n 50 -p $port "$@" 10.99.7.1
}
carried() { # by what, why
	grep -q "carried by $1 (.*$2" "$work/client" || fail "[$variation] not carried by $1 because of '$2': $(grep 'carried by' "$work/client")"
}
# Whatever is refused, the way that is taken is the one that is left, and it is said why.
ways() {
	perftest short ib_write_bw -s 65536 -n 100
	case $refused in
	none | buffers | offload | pidfd) carried path "a process of this machine" ;;
	peers) carried wire "process_vm_readv and process_vm_writev are refused" ;;
	*) carried wire "" ;;
	esac
	perftest wire ib_write_bw -s 65536 -n 100
	carried wire "the address isn't this machine's"
	case $refused in *offload*) grep -q 'no segmentation offload' "$work/client" || fail "[$variation] segmented although it is refused" ;; esac
	begin $HOST_A ibv_devinfo -v >"$work/client" 2>&1 || fail "[$variation] ibv_devinfo: $(cat "$work/client")"
	case $refused in
	*kernel*) ;;
	*) ! grep -q 'had opened the software card' "$work/client" || fail "[$variation] nobody noticed that the card was opened" ;;
	esac
}
# Its server asks for a loopback address, and its client must be told another.
libfabric() { # way
	command -v fi_pingpong >/dev/null || return
	pair $1 fi_pingpong -p verbs -e msg -I 20 -B $port -- fi_pingpong -p verbs -e msg -I 20 -P $port 10.99.7.1
}
# A process that is killed is missed at once, whatever the kernel has to say it by.
death() {
	local victim
	begin $HOST_A ib_write_bw -x 0 -F -D 60 -p $port >"$work/server" 2>&1 & server=$!
	for _ in $(seq 1000); do listens $port && break; sleep 0.03; done
	victim=$(for pid in $(ip netns pids $HOST_A); do [ "$(cat /proc/$pid/comm 2>/dev/null)" = ib_write_bw ] && echo $pid; done)
	begin $HOST_A ib_write_bw -x 0 -F -D 60 -p $port 10.99.7.1 >"$work/client" 2>&1 & client=$!
	for _ in $(seq 1000); do grep -q 'carried by' "$work/client" && break; sleep 0.05; done
	sleep 1
	kill -KILL $victim
	for _ in $(seq 1000); do kill -0 $client 2>/dev/null || break; sleep 0.05; done
	kill $client 2>/dev/null && fail "[$variation] the client doesn't notice that its server has died: $(tail -5 "$work/client")"
	wait $client && fail "[$variation] the client takes the death of its server for a success"
	wait $server
	server=
	port=$((port + 1))
}
few() { # way
	pingpong $1 ud
	pingpong $1 srq
	perftest $1 ib_send_bw -s 3000 -n 100 -b -e
	perftest $1 ib_atomic_lat -n 50
	pair $1 rping -s -a 10.99.7.1 -p $port -C 5 -- rping -c -a 10.99.7.1 -p $port -C 5 -V
	libfabric $1
}
all() { # way
	local kind program
	for kind in rc uc ud srq xsrq; do pingpong $1 $kind; done
	pingpong $1 rc -e
	for program in write read send; do
		perftest $1 ib_${program}_bw -s 50001 -n 100
		perftest $1 ib_${program}_lat -s 2 -n 50
	done
	perftest $1 ib_atomic_bw -n 100
	perftest $1 ib_atomic_lat -n 50
	perftest $1 ib_send_bw -c UD -s 1000 -n 100
	perftest $1 ib_send_bw -c UC -s 3000 -n 100
	perftest $1 ib_write_bw -c XRC -s 3000 -n 100
	perftest $1 ib_write_bw -q 8 -s 8 -n 200 -l 8
	perftest $1 ib_send_bw -b -s 65536 -n 100 -e
	perftest $1 ib_send_lat --use-srq -s 64 -n 50
	perftest $1 ib_write_bw -a -n 5
	perftest $1 ib_write_bw -s 1048576 -n 50 -q 4 -b
	pair $1 rping -s -a 10.99.7.1 -p $port -C 5 -- rping -c -a 10.99.7.1 -p $port -C 5 -V
	pair $1 ucmatose -p $port -c 20 -- ucmatose -p $port -c 20 -s 10.99.7.1
	libfabric $1
}
# The verbs' tests, what is registered on demand among them: the kernel may not copy there for us.
verbs() {
	local what
	cp "$BUILD_DIR"/tests/verbs/test_verbs_api_{memory,rc,shared} "$work/bin/" 2>/dev/null || return
	for what in memory rc shared; do
		ip netns exec $HOST_A "${as_nobody[@]}" prlimit --nofile=$files "$work/refuse" $refused env LD_LIBRARY_PATH="$work/lib/telpher-verbs" \
			timeout 60 "$work/bin/test_verbs_api_$what" >"$work/out" 2>&1 || fail "[$variation] test_verbs_api_$what: $(grep -vE '^\[ +(OK|RUN)' "$work/out")"
	done
}
# rdma-core's own tests: those of the list must be ok.
pyverbs() {
	local suite=/usr/share/doc/rdma-core/tests missing
	[ -d $suite ] && /usr/bin/python3 -c 'import pyverbs.device' 2>/dev/null || return
	rm -rf "$work/pyverbs" && mkdir "$work/pyverbs" && cp -r $suite "$work/pyverbs/tests" && gunzip -f "$work"/pyverbs/tests/*.gz 2>/dev/null
	chmod -R go+rX "$work/pyverbs"
	environment+=(TELPHER_VERBS_GIDS=all PYTHONDONTWRITEBYTECODE=1)
	begin $HOST_A sh -c "cd '$work/pyverbs' && exec timeout 120 /usr/bin/python3 tests/run_tests.py --dev telpher0 --port 1 --gid 0 -v" >"$work/log" 2>&1
	environment=()
	missing=$(comm -13 <(names_ok "$work/log") <(grep -v '^#' "$SOURCE_DIR/tests/verbs/pyverbs-ok.txt" | sort))
	[ -z "$missing" ] || fail "[$variation] pyverbs' tests that aren't ok: $missing $(grep -E -A25 '^(ERROR|FAIL):' "$work/log")"
	count=$((count + 1))
}
try() { # variation: refusals, descriptors
	variation="refused: $1, descriptors: $2" refused=$1 files=$2 environment=()
	# Fresh ones: another variation's keeper would hold sockets that it made.
	delete_namespaces
	make_hosts
	ways
	verbs
	for way in short wire; do $programs $way; done
	case $refused in none | pidfd) death ;; esac
	[ $programs = few ] || pyverbs
}
programs=few
if [ -n "${LONG-}" ]; then
	programs=all
	for what in ${LONG_ONLY:-none peers kernel pidfd buffers offload}; do try $what 1024; done
	try none 256
fi
try $everything 256
echo "nobody runs $count programs"
