#!/bin/bash
# telpher probe write between two processes and two network namespaces, on the software card: every operation, queue pairs, both ways,
# sweeps, JSON and pictures; what it refuses; peers that aren't one.
set -u
telpher=$BUILD_DIR/bin/telpher
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] && "$telpher" probe --help >/dev/null || { echo "the software card or the probe isn't built"; exit 77; }
export TELPHER_VERBS_HIDE_REAL=1
unset TELPHER_VERBS_NOTE
where=$(mktemp -d)
. "$SOURCE_DIR/tests/lib_namespaces.sh"
trap 'delete_namespaces; rm -rf "$where"' EXIT
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
port=$((20000 + $$ % 10000))
server=() client=() to=127.0.0.1
# pair "SERVER'S OPTIONS" "CLIENT'S": output in $where/server and client, their exit statuses in $status
pair() {
	local s first second
	port=$((port + 1))
	timeout 60 "${server[@]}" "$telpher" probe write -d telpher0 -p $port $1 >"$where/server" 2>"$where/server.err" &
	s=$!
	timeout 60 "${client[@]}" "$telpher" probe write -d telpher0 -p $port $2 $to >"$where/client" 2>"$where/client.err"
	first=$?
	wait $s
	second=$?
	status="$first $second"
}
number='[0-9]+(\.[0-9]+)?'
rate="bytes in $number ms → $number GB/s \($number Gb/s\)"
both() { # NAME CLIENT-LINE SERVER-LINE: the last pair did well
	expect "$1" "0 0" "$status"
	says "$1: the client" "$2" "$(cat "$where/client" "$where/client.err")"
	says "$1: the server" "$3" "$(cat "$where/server" "$where/server.err")"
}

pair "-s 1048576" "-s 1048576"
both "write" "^\[client\] wrote 1048576 $rate$" "^\[server\] got IMM=1048576, verify OK$"
expect "each says one line" "1 1" "$(wc -l <"$where/client") $(wc -l <"$where/server")"
says "the card is named as what it is" "Telpher's software card" "$(cat "$where/server.err")"
pair "" "-s 1"
both "one byte" "^\[client\] wrote 1 $rate$" "IMM=1, verify OK"
pair "" "-s 1000001 -q 5"
both "five queue pairs" "wrote 1000001 $rate$" "IMM=1000001, verify OK"
pair "" "-s 300001 --op read -q 2"
both "read" "^\[client\] read 300001 $rate$" "waiting"
says "what is read is verified" "^\[client\] verify OK$" "$(cat "$where/client")"
pair "" "-s 300001 --op send -b -q 3"
both "send, both ways: sent" "^\[client\] sent 300001 $rate$" "^\[server\] sent 300001 $rate$"
both "send, both ways: got" "^\[client\] got IMM=300001, verify OK$" "^\[server\] got IMM=300001, verify OK$"
pair "" "-s 65536 -b"
both "write, both ways" "^\[client\] got IMM=65536, verify OK$" "^\[server\] wrote 65536 $rate$"
for op in write read send; do
	pair "" "-s 70000 --op $op --sweep -n 8 -q 2 -b --svg $where/$op.svg"
	# On a machine that is busy with other things times may not grow with the bytes.
	both "sweep of $op, both ways" "^S\* = alpha x beta = $number KB|^no line through these times" "verify OK"
	expect "sweep of $op: every size" "8 16 32 64 128 256 512 1024 2048 4096 8192 16384 32768 65536 70000" "$(awk '$1 ~ /^[0-9]+$/ && NF == 5 { print $1 }' "$where/client" | xargs)"
done
port=$((port + 1))
timeout 60 "$telpher" probe write -d telpher0 -p $port --json >"$where/server" 2>/dev/null & s=$!
timeout 60 "$telpher" probe write -d telpher0 -p $port -s 32K --sweep -n 5 --json ::1 >"$where/client" 2>/dev/null || timeout 60 "$telpher" probe write -d telpher0 -p $port -s 32K --sweep -n 5 --json 127.0.0.1 >"$where/client"
wait $s
expect "JSON, by IPv6 where it is there" "write 32768 1 True 13 True 32768 True" "$(python3 - "$where/client" "$where/server" "$where/write.svg" <<'P'
import json, sys, xml.etree.ElementTree as ET
c, s = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
p = c["sweep"]["points"]
star = c["sweep"].get("s_star_bytes", 0) - c["sweep"].get("alpha_us", 0) * c["sweep"].get("beta_gbs", 0) * 1000
print(c["op"], c["bytes"], c["qps"], c["verified"], len(p), abs(star) < 1e-3 and all(x["latency_us"] > 0 and x["gbs"] > 0 for x in p), s["imm"], s["verified"])
root = ET.parse(sys.argv[3]).getroot()
w, h = map(float, root.get("viewBox").split()[2:])
curves = [x for x in root.iter("{http://www.w3.org/2000/svg}polyline")]
inside = all(0 <= float(v) <= (w, h)[i % 2] for x in curves for q in x.get("points").split() for i, v in enumerate(q.split(",")))
if len(curves) != 4 or not inside: print("picture", len(curves), inside)
P
)"

# What can't be.
refuse() { # NAME PATTERN ARGS…
	local name=$1 pattern=$2
	shift 2
	out=$(timeout 30 "$telpher" probe write "$@" 2>&1)
	expect "$name: status" 1 $?
	says "$name" "$pattern" "$out"
	expect "$name: one line" 1 "$(wc -l <<<"$out")"
}
TELPHER_VERBS_STATE=down refuse "a port that is DOWN" "telpher0:1 is DOWN, not ACTIVE" -d telpher0
refuse "no such device" "-d telpher7: there is no such device or port; there are: telpher0$" -d telpher7
TELPHER_VERBS_FAULT=open=EACCES refuse "a device that can't be opened" "-d telpher0: no port can be used: telpher0 can't be opened: Permission denied \(in a container" -d telpher0
refuse "a list of devices" "-d telpher0,telpher1: one device, as mlx5_0" -d telpher0,telpher1
refuse "a device without a name" "-d : one device" -d ""
refuse "no such GID" "GID_INDEX=9: there is no such GID; the port has: \[0\]" -d telpher0 -g 9
refuse "no GPU" "--gpu 0: this machine has no GPU" -d telpher0 --gpu 0
# Before anybody is waited for: nobody listens there.
refuse "a picture that can't be written" "^telpher probe write: /nonexistent/x.svg can't be written: No such file" -d telpher0 -s 64K -p 1 --sweep --svg /nonexistent/x.svg 127.0.0.1
refuse "a picture that is a folder" "^telpher probe write: / can't be written: Is a directory" -d telpher0 -s 64K -p 1 --sweep --svg / 127.0.0.1
# Nor is anything made, lost or opened by looking: a pipe that nobody reads would be waited for.
where_svg=$(mktemp -d)
mkfifo "$where_svg/pipe"
ln -s "$where_svg/none" "$where_svg/link"
for svg in pipe link new; do NCCL_SOCKET_RETRY_CNT=2 refuse "a picture that is a $svg" "Connection refused" -d telpher0 -s 64K -p 1 --sweep --svg "$where_svg/$svg" 127.0.0.1; done
expect "what there was" "link pipe" "$(ls "$where_svg" | xargs)"
rm -r "$where_svg"
NCCL_SOCKET_RETRY_CNT=2 refuse "no server" "can't be reached.*Connection refused" -d telpher0 -s 8 -p 1 127.0.0.1
if [ -z "${SANITIZE-}" ]; then
	LD_LIBRARY_PATH=$BUILD_DIR/lib/telpher-verbs refuse "the card where nobody asked for it" "software card, which is used only where it is asked for.*-d telpher0"
fi
TELPHER_VERBS_FAULT=memlock=65536 refuse "too little memory may be locked" "1048576 bytes .* must be locked in memory.*(RLIMIT_MEMLOCK|max_mr)" -d telpher0 -s 1M 127.0.0.1
pair "-s 4096" "-s 8192"
expect "more than the server has room for" "1 1" "$status"
says "and both say so" "the client has 8 KiB, this server room for 4 KiB" "$(cat "$where/client.err")"
usage() { # PATTERN ARGS…
	local pattern=$1
	shift
	out=$(timeout 30 "$telpher" probe write "$@" 2>&1)
	expect "bad arguments ($*)" 2 $?
	says "bad arguments ($*): why" "$pattern" "$out"
}
usage "no size" -s 12Q
usage "no size" -s 0 host
usage "there are write, read and send" --op fetch host
usage "from 1 to 64" -q 65 host
usage "one SERVER" host other
usage "--gpu -1: GPUs are numbered from 0" --gpu -1 host
usage "--iterations 0: from 1" -n 0 host
usage "--gpu N says which" --dmabuf host
usage "--sweep makes one" --svg x.svg host
usage "name the SERVER" --sweep
usage "unknown option" --frobnicate

# Memory of a GPU, by the driver that has none; whoever touches it otherwise than by the driver's copies is killed.
if [ -e "$BUILD_DIR/tests/fake_cuda/libcuda.so.1" ]; then
	export TELPHER_CUDA_LIBRARY=$BUILD_DIR/tests/fake_cuda/libcuda.so.1 FAKE_CUDA_DEVICES=2 FAKE_CUDA_APART=1
	pair "--gpu 1" "-s 300000 --gpu 0 -b"
	both "GPU memory" "^\[client\] got IMM=300000, verify OK$" "^\[server\] got IMM=300000, verify OK$"
	pair "--gpu 0" "-s 1000003 --op send -q 2"
	both "from the host to a GPU" "^\[client\] sent 1000003 $rate$" "^\[server\] got IMM=1000003, verify OK$"
	pair "" "-s 1000003 --op read --gpu 1"
	both "read from the host into a GPU" "^\[client\] verify OK$" "waiting"
	pair "--gpu 0" "-s 70000 --gpu 0 --sweep -n 3"
	both "sweep of GPU memory" "^S\* = alpha x beta = $number KB|^no line through these times" "verify OK"
	TELPHER_VERBS_CARRIER=wire pair "--gpu 1" "-s 300001 --gpu 0 -b"
	both "GPU memory by packets" "^\[client\] got IMM=300001, verify OK$" "^\[server\] got IMM=300001, verify OK$"
	export FAKE_CUDA_DMABUF=1
	pair "--gpu 1 --dmabuf" "-s 300001 --gpu 0 --dmabuf -b"
	both "DMA-BUFs" "^\[client\] got IMM=300001, verify OK$" "^\[server\] got IMM=300001, verify OK$"
	TELPHER_VERBS_GPU=0 refuse "a card that takes no GPU memory" "telpher0 can't register memory of GPU 0: Bad address. By ibv_reg_mr it needs nvidia-peermem" -d telpher0 --gpu 0 -s 4K 127.0.0.1
	TELPHER_VERBS_GPU=0 refuse "nor DMA-BUFs" "--dmabuf: telpher0 can't register a DMA-BUF of GPU 0: Operation not supported" -d telpher0 --gpu 0 --dmabuf -s 4K 127.0.0.1
	unset FAKE_CUDA_DMABUF
	refuse "a GPU that isn't there" "--gpu 5: there are 2, numbered from 0" -d telpher0 --gpu 5
	refuse "a GPU without DMA-BUF" "--dmabuf: GPU 0 .* has no DMA-BUF" -d telpher0 --gpu 0 --dmabuf -s 4K 127.0.0.1
	unset TELPHER_CUDA_LIBRARY FAKE_CUDA_DEVICES FAKE_CUDA_APART
fi

# Strangers at the exchange: one error, soon.
strangers=$(python3 - "$telpher" $((port + 1)) <<'P'
import socket, struct, subprocess, sys, time
telpher, port = sys.argv[1], int(sys.argv[2])
bad = 0
def head(version=1, kind=1, size=None): return b"TPRB" + struct.pack("<HHI", version, kind, size if size is not None else 496)
def judge(name, proc, word):
    global bad
    try: err = proc.communicate(timeout=30)[1].decode()
    except subprocess.TimeoutExpired:
        proc.kill(); err = "it hangs"
    lines = [l for l in err.splitlines() if "waiting at TCP port" not in l]
    good = proc.returncode == 1 and len(lines) == 1 and word in lines[0]
    bad += not good
    print("ok  " if good else "FAIL", name, "" if good else f": status {proc.returncode}, {lines}")
def connect():
    for _ in range(800):
        try: return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError: time.sleep(0.05)
def to_server(name, data, word):
    global port
    port += 1
    proc = subprocess.Popen(["timeout", "60", telpher, "probe", "write", "-d", "telpher0", "-p", str(port), "-s", "4096"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    s = connect()
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
    judge("server: " + name, proc, word)
    s.close()
def to_client(name, answer, word):
    global port
    port += 1
    l = socket.create_server(("127.0.0.1", port))
    proc = subprocess.Popen(["timeout", "60", telpher, "probe", "write", "-d", "telpher0", "-p", str(port), "-s", "4096", "127.0.0.1"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    l.settimeout(60)
    s = l.accept()[0]
    hello = b""
    while len(hello) < 12:
        more = s.recv(4096)
        if not more: break
        hello += more
    s.sendall(answer(hello) if callable(answer) else answer)
    s.shutdown(socket.SHUT_WR)
    judge("client: " + name, proc, word)
    s.close(); l.close()
size = None
def whole(hello):
    return hello
to_server("garbage", b"GET / HTTP/1.1\r\n\r\n", "isn't the probe's exchange")
to_server("early close", b"", "closed the connection before")
to_server("half a record", head()[:9], "closed the connection before its record was whole")
to_server("another version", head(version=7), "version 7")
to_server("no such record", head(kind=99), "type 99")
to_server("an enormous record", head(size=1 << 31), "which there isn't")
to_server("failed", head(kind=5, size=12 + 512) + b"no \x1b[31mreason".ljust(512, b"\0"), "has failed: no ?[31mreason")
to_client("garbage", b"SSH-2.0-OpenSSH_9.2\r\n", "isn't the probe's exchange")
to_client("early close", b"", "closed the connection before")
to_client("another version", head(version=0), "version 0")
to_client("the wrong record", head(kind=2, size=12), "READY where HELLO belongs")
to_client("its own words", whole, "closed the connection before")
to_client("another size", lambda h: h[:12] + struct.pack("<Q", 123) + h[20:], "another transfer")
sys.exit(bad > 0)
P
) || fails=$((fails + 1))
echo "$strangers"
port=$((port + 40))
# A peer that is killed in the middle.
timeout 60 "$telpher" probe write -d telpher0 -p $port >/dev/null 2>"$where/server.err" & s=$!
timeout 60 "$telpher" probe write -d telpher0 -p $port -s 1M --sweep -n 100000 127.0.0.1 >/dev/null 2>&1 & c=$!
for _ in $(seq 1000); do ss -tn 2>/dev/null | grep -q ":$port " && break; sleep 0.05; done
sleep 0.3
pkill -KILL -P $c 2>/dev/null
wait $c 2>/dev/null
wait $s
expect "the client is killed: the server ends" 1 $?
says "and says why" "closed the connection before|is gone|failed: IBV_WC" "$(cat "$where/server.err")"

# The same by its other name, with the card under it.
if [ -z "${SANITIZE-}" ]; then
	timeout 60 "$telpher" verbs run "$BUILD_DIR/bin/rdma_write" -s 268435 -p $port >"$where/server" 2>/dev/null & s=$!
	timeout 60 "$telpher" verbs run "$BUILD_DIR/bin/rdma_write" -s 268435 -p $port 127.0.0.1 >"$where/client" 2>"$where/client.err"
	status=$?
	wait $s
	expect "rdma_write under telpher verbs run" "0 0" "$status $?"
	says "its lines" "^\[client\] wrote 268435 $rate$" "$(cat "$where/client")"
	says "and the server's" "^\[server\] got IMM=268435, verify OK$" "$(cat "$where/server")"
fi

a=tpp$$ b=tpq$$
make_namespaces $a $b && join_namespaces $a $b v0 4200 10.96.0. fd96:: || exit $((fails > 0))
await_interfaces
server=(ip netns exec $a) client=(ip netns exec $b) to=10.96.0.1
export TELPHER_VERBS_IFNAME=v0
pair "" "-s 300001 -q 2 -b"
both "between namespaces" "^\[client\] got IMM=300001, verify OK$" "^\[server\] got IMM=300001, verify OK$"
pair "" "-s 64K --op read --sweep -n 4"
both "a sweep of reads between namespaces" "^\[client\] verify OK$" "waiting"
TELPHER_VERBS_FAULT=drop=0.01,seed=3 pair "" "-s 1M"
both "with 1 % loss" "^\[client\] wrote 1048576 $rate$" "verify OK"
if ip -n $a addr show v0 | grep -q fd96; then
	export TELPHER_VERBS_GIDS=all
	six=$(ip netns exec $a "$telpher" verbs gids telpher0 | awk '/fd96/ { print $3 }')
	four=$(ip netns exec $a "$telpher" verbs gids telpher0 | awk '/10\.96/ { print $3 }')
	pair "-g $six" "-s 4K -g $six"
	both "over IPv6" "wrote 4096" "GID $six fd96::1 .*"
	pair "-g $six" "-s 4K -g $four"
	expect "GIDs that can't reach each other" "1 1" "$status"
	says "with the reason" "can't reach .*: one is an IPv4 address, the other isn't" "$(cat "$where/client.err")"
fi
exit $((fails > 0))
