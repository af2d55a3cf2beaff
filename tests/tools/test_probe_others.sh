#!/bin/bash
# telpher probe paths, reg, connect, cost, matrix: real runs on the software card, models of machines, numbers by hand, bad arguments.
set -u
telpher=$BUILD_DIR/bin/telpher
[ -e "$BUILD_DIR/lib/telpher-verbs/libibverbs.so.1" ] && "$telpher" probe --help >/dev/null || { echo "the software card or the probe isn't built"; exit 77; }
export TELPHER_VERBS_HIDE_REAL=1
unset TELPHER_VERBS_NOTE
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
fails=0
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
probe() { timeout 100 "$telpher" probe "$@" 2>"$where/err"; }
# look NAME WANTED PYTHON: of the JSON in $where/json as it is now; all of them are looked at by one python in the end.
looks=0
look() {
	looks=$((looks + 1))
	cp "$where/json" "$where/look$looks.json"
	printf '%s\0%s\0%s\0%s\0' "$1" "$2" "$where/look$looks.json" "$3" >>"$where/looks"
}

# The three paths: known machines.
probe paths dgx-h100 --json >"$where/json"
look "H100: copies and host memory" "2,4 1,2 0,0" '" ".join("%d,%d" % (p["copies"], p["memory_bytes_per_byte"]) for p in d["paths"])'
look "H100: bounds" "2.5 a core's TCP, 48 the GPU's PCIe, 48 PCIe from GPU to NIC" '", ".join("%g %s" % (p["bound_gbs"], p["limit"]) for p in d["paths"])'
look "GPUDirect turns round in the switch" "False True" '"CPU" in d["paths"][2]["links"], "CPU" in d["paths"][1]["links"]'
look "and is allowed" "True" 'd["paths"][2]["allowed"]'
probe paths dgx-h100 --memory 60 --json >"$where/json"
look "slow memory binds what goes through it" "30 host memory, 48" '"%g %s, %g" % (d["paths"][1]["bound_gbs"], d["paths"][1]["limit"], d["paths"][2]["bound_gbs"])'
out=$(probe paths two-sockets --from gpu2)
says "the wrong socket: refused, with the reason" "refused by NCCL's rules: .*SYS" "$out"
says "hop by hop" "GPU 2 -PCIe 4.0 x16- .* CPU 1 -CPU to CPU- CPU 0 .* mlx5_0" "$out"
probe paths -d telpher0 -s 1M --json >"$where/json"
expect "this machine" 0 $?
look "TCP and RDMA are measured, GPUDirect says why not" "True True False True" \
	'*[p.get("measured_gbs", 0) > 0 and p["cpu_ns_per_byte"] > 0 and p["latency_us"] > 0 for p in d["paths"][:2]], "measured_gbs" in d["paths"][2], "no GPU" in d["paths"][2]["note"]'
if [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ]; then
	out=$(probe paths -s 1M)
	expect "without a port: computed" 0 $?
	says "and said" "not run here: no RDMA port" "$out"
fi
out=$(probe paths -d telpher0 -s 1M)
says "as text" "measured  +[0-9.]+ GB/s, [0-9.]+ us one way, CPU [0-9.]+ ns a byte" "$out"

probe reg -d telpher0 -s 1M -n 3 --mrs 64 --json >"$where/json"
expect "registrations" 0 $?
look "sizes and kinds" "4096 65536 1048576, 3 kinds" '" ".join(str(r["bytes"]) for r in d["registrations"] if r["memory"] == "4 KiB pages") + ", %d kinds" % len({r["memory"] for r in d["registrations"] if r["memory"] != "hugetlb pages"})'
look "when it pays is (register + deregister) / copy, rounded up" "True" \
	'all(r["pays_after"] == -(-(r["register_us"] + r["deregister_us"]) // r["copy_us"]) for r in d["registrations"])'
look "the limits" "64 True" 'd["made_at_once"], d["max_mr"] > 1000'
says "as text" "4 KiB pages +1 MiB +4 KiB( +[0-9.]+){5}$" "$(probe reg -d telpher0 -s 1M -n 1 --mrs 8)"
TELPHER_VERBS_FAULT=memlock=65536 probe reg -d telpher0 -s 1M -n 1 >/dev/null
expect "more than may be locked" 1 $?
says "and why" "must be locked in memory|max_mr" "$(cat "$where/err")"

total=$(awk '/MemTotal/ { print $2 }' /proc/meminfo)
probe reg -d telpher0 -s $((total - (64 << 10)))K -n 1 >/dev/null
expect "more than there is memory" 1 $?
says "and how much there is" "no memory of [0-9]+ bytes: [0-9]+ are available; a smaller -s" "$(cat "$where/err")"
TELPHER_VERBS_FAULT=protection=1 probe matrix -d telpher0 -s 64K -n 1 >/dev/null
expect "a matrix without a number" 1 $?
says "and why" "IBV_WC_LOC_PROT_ERR\(4\).*ACS" "$(cat "$where/err")"
NCCL_IB_PKEY=77 probe connect -d telpher0 >/dev/null
says "a partition key that there isn't" "partition key index 77 \(NCCL_IB_PKEY\): .*; the port has 1" "$(cat "$where/err")"
NCCL_IBVERBS_LIB=/nowhere.so probe connect -d mlx5_0 >/dev/null
says "a library that there isn't" "NCCL_IBVERBS_LIB=/nowhere.so: .*No such file" "$(cat "$where/err")"
# An image without the card's part of libibverbs, and one without sysfs.
if unshare -m sh -c 'mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/mlx5_0' 2>/dev/null; then
	[ -n "$(ldconfig -p 2>/dev/null | grep libibverbs)" ] &&
		says "a card that libibverbs doesn't show" "shows no device, but the kernel has mlx5_0: is /dev/infiniband missing .*ibverbs-providers" \
			"$(unshare -m sh -c 'mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/mlx5_0 && exec "$0" probe connect -d mlx5_0' "$telpher" 2>&1)"
	out=$(unshare -m sh -c 'mount -t tmpfs none /sys && exec "$0" probe matrix -d telpher0 -s 64K -n 1' "$telpher" 2>&1)
	expect "without sysfs" 0 $?
	says "it is measured all the same" "^host memory +telpher0:1 +[0-9.]+ +[0-9.]+" "$out"
	# A container's limit: cached files are no reason to refuse, what else it uses is.
	# shellcheck disable=SC2016
	limited='mount -t tmpfs none /sys && mkdir -p /sys/fs/cgroup && cd /sys/fs/cgroup && echo 1000000000 >memory.max && echo 999000000 >memory.current &&
		printf "anon 1\nactive_file %s\ninactive_file 1\nslab_reclaimable 1\n" "$1" >memory.stat && exec "$0" probe reg -d telpher0 -s 4M -n 1 --mrs 4'
	unshare -m sh -c "$limited" "$telpher" 500000000 >/dev/null 2>&1
	expect "a container full of cached files" 0 $?
	says "a container that is full" "no memory of [0-9]+ bytes: 1000[0-9]{3} are available" "$(unshare -m sh -c "$limited" "$telpher" 0 2>&1)"
fi
NCCL_IB_ADDR_RANGE=203.0.113.0/24 probe connect -d telpher0 >/dev/null
says "a range without a GID" "an IPv4 address in NCCL_IB_ADDR_RANGE=203.0.113.0/24 that isn't link-local; the port has: \[0\]" "$(cat "$where/err")"

probe connect -d telpher0 -n 8 --hosts 2 --repetitions 3 --json >"$where/json"
expect "a connection's cost" 0 $?
look "each step took its time" "6 True" 'len(d["steps"]), all(s["us"] > 0 for s in d["steps"])'
look "the whole is the sum of all but the end" "True" 'abs(sum(s["us"] for s in d["steps"][:5]) - d["total_us"]) < 1e-6'
# A ring of two hosts leaves a host once and comes in once: each of those ranks has one end. All pairs: 4 peers elsewhere, both ways.
look "a ring needs one end, all pairs eight" "1 8" '*[n["connections"] for n in d["needs"] if (n["collective"], n["algorithm"]) in (("all_reduce", "RING"), ("alltoall", "DIRECT"))]'
look "queue pairs and registrations" "8 16" '*[(n["queue_pairs"], n["registrations"]) for n in d["needs"] if n["collective"] == "alltoall" and n["algorithm"] == "DIRECT"][0]'
NCCL_IB_QPS_PER_CONNECTION=4 probe connect -d telpher0 -n 8 --hosts 2 --repetitions 1 --json >"$where/json"
look "four queue pairs a connection" "32" 'max(n["queue_pairs"] for n in d["needs"] if n["collective"] == "alltoall")'
says "many ranks: some are looked at" "Looked at 64 of 512 ranks" "$(probe connect -d telpher0 -n 512 --hosts 64 --repetitions 1)"

# 8 ranks, 2 us, 50 GB/s: 14 (2 + S / 400,000), 12 + 2 S / 50,000; S = 2 MiB.
probe cost all_reduce -n 8 --hosts 2 --alpha 2 --beta 50 -s 2M --json >"$where/json"
expect "cost" 0 $?
look "sizes" "8 64 512 4096 32768 262144 2097152" '*d["sizes"]'
look "ring and tree by hand" "28.0003 101.4 12.0003 95.8861" '*["%.6g" % r["us"][i] for r in d["collectives"][0]["rows"][:2] for i in (0, 6)]'
look "S*" "100000" 'round(d["s_star_bytes"])'
look "and the library's model" "True True" '*[any(r["by"] == "model, " + a and all(u > 0 for u in r["us"]) for r in d["collectives"][0]["rows"]) for a in ("RING", "HIERARCHICAL")]'
printf '{"sweep": {"alpha_us": 4, "beta_gbs": 25}}' >"$where/sweep"
probe cost broadcast -n 4 --hosts 4 --from "$where/sweep" -s 8 --json >"$where/json"
look "alpha and beta of a sweep" "4 25 12.0003 8.00032" 'd["alpha_us"], d["beta_gbs"], *["%.6g" % r["us"][0] for r in d["collectives"][0]["rows"][:2]]'
printf '{"sweep": {}}' >"$where/empty"
probe cost --from "$where/empty" >/dev/null
expect "a file without them" 1 $?
says "and why" "has no alpha and beta" "$(cat "$where/err")"
probe cost -n 4 -s 8 --json >"$where/json"
look "all collectives" "all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter" '*[c["collective"] for c in d["collectives"]]'
probe cost all_reduce -n 2 --hosts 2 -s 64 --measure --iterations 3 --json >"$where/json"
expect "beside what telpher perf measures" 0 $?
look "two sizes" "2 True" '*[(len(r["us"]), all(u > 0 for u in r["us"])) for r in d["collectives"][0]["rows"] if r["by"].startswith("measured")][0]'

probe matrix -d telpher0 -s 64K -n 1 --json >"$where/json"
expect "memory by NIC" 0 $?
look "each node by each port" "True" 'len(d["cells"]) >= 1 and all(c["port"] == "telpher0:1" and c["gbs"] > 0 and c["latency_us"] > 0 for c in d["cells"])'
out=$(TELPHER_VERBS_DEVICES=2 probe matrix -s 64K -n 1 -d telpher)
expect "names are whole" 1 $?
out=$(NCCL_IB_HCA=telpher TELPHER_VERBS_DEVICES=2 probe matrix -s 64K -n 1)
says "two ports" "telpher1:1 +[0-9.]+ +[0-9.]+" "$out"
says "what is left out is said" "GPU by NIC, with GPUDirect and without, is left out" "$out"
cat >"$where/map.xml" <<'X'
<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"><pci busid="0000:10:1b.0" class="0x020000" vendor="0x15b3" device="0x1021" link_speed="32 GT/s" link_width="16">
<nic><net name="telpher0" dev="0" speed="100000" port="1" guid="0x1" maxconn="128" gdr="1"/></nic></pci></cpu></system>
X
probe matrix -d telpher0 -s 64K -n 1 --record "$where/map.xml" >/dev/null
if [ $? = 0 ]; then says "recorded onto the map" 'from="CPU 0" to="telpher0" ' "$(tr '\n' ' ' <"$where/map.xml")"
else expect "recorded onto the map" "" "$(cat "$where/err")"; fi
printf '<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"/></system>' >"$where/bare.xml"
probe matrix -d telpher0 -s 64K -n 1 --record "$where/bare.xml" >/dev/null
expect "a map without that NIC" 1 $?
if [ -e "$BUILD_DIR/tests/fake_cuda/libcuda.so.1" ]; then
	export TELPHER_CUDA_LIBRARY=$BUILD_DIR/tests/fake_cuda/libcuda.so.1 FAKE_CUDA_DEVICES=2 FAKE_CUDA_APART=1
	probe matrix -d telpher0 -s 64K -n 1 --json >"$where/json"
	look "GPUs: direct and staged" "GPU 0 GPU 1 True" '*[c["memory"] for c in d["cells"]], all(c["gpudirect_gbs"] > 0 and c["staged_gbs"] > 0 for c in d["cells"])'
	probe paths -d telpher0 -s 1M --gpu 1 --json >"$where/json"
	look "all three paths of a GPU" "3" 'sum(p.get("measured_gbs", 0) > 0 for p in d["paths"])'
	FAKE_CUDA_DMABUF=1 probe matrix -d telpher0 -s 64K -n 1 --json >"$where/json"
	look "by DMA-BUF where there are any" "DMA-BUF DMA-BUF True" '*[c["gpudirect_by"] for c in d["cells"]], all(c["gpudirect_gbs"] > 0 for c in d["cells"])'
	# A card that takes no GPU memory: the other ways are measured all the same.
	TELPHER_VERBS_GPU=0 probe paths -d telpher0 -s 1M --gpu 1 --json >"$where/json"
	expect "no GPUDirect" 0 $?
	look "two paths of three, and why" "True True False True" '*["measured_gbs" in p for p in d["paths"]], "nvidia-peermem" in d["paths"][2]["note"]'
	TELPHER_VERBS_GPU=0 probe matrix -d telpher0 -s 64K -n 1 --json >"$where/json"
	expect "a matrix without GPUDirect" 0 $?
	look "staged alone, and why" "True False True" 'all("staged_gbs" in c for c in d["cells"]), any("gpudirect_gbs" in c for c in d["cells"]), all("nvidia-peermem" in c["why_not"] for c in d["cells"])'
	TELPHER_VERBS_GPU=0 probe reg -d telpher0 -s 64K -n 1 --gpu 0 --mrs 4 >/dev/null
	says "registering GPU memory without nvidia-peermem" "needs nvidia-peermem" "$(cat "$where/err")"
	FAKE_CUDA_DMABUF=1 probe reg -d telpher0 -s 64K -n 2 --gpu 0 --mrs 4 --json >"$where/json"
	look "registrations of DMA-BUFs" "2" 'sum(r["memory"] == "GPU, DMA-BUF" and r["register_us"] > 0 for r in d["registrations"])'
	probe reg -d telpher0 -s 64K -n 1 --gpu 0 --mrs 4 --json >"$where/json"
	look "whose pages nobody knows" "False True" '*[any("page_bytes" in r for r in d["registrations"] if r["memory"] == k) for k in ("GPU", "pinned by the GPU driver")]'
	look "registrations of a GPU's memory" "2 2" '*[sum(r["memory"] == k for r in d["registrations"]) for k in ("GPU", "pinned by the GPU driver")]'
	unset TELPHER_CUDA_LIBRARY FAKE_CUDA_DEVICES FAKE_CUDA_APART
fi

usage() { # PATTERN ARGS…
	local pattern=$1
	shift
	out=$(timeout 30 "$telpher" probe "$@" 2>&1)
	expect "bad arguments ($*)" 2 $?
	says "bad arguments ($*): why" "$pattern" "$out"
}
usage "there is no command 'frob'" frob
usage "usage: telpher probe COMMAND"
usage "from 1 to 10000" reg -n 0
usage "no size of 4K" reg -s 12
usage "as many hosts as ranks" connect -n 2 --hosts 3
usage "it takes no arguments" matrix here
usage "there is no collective" cost allmost
usage "not both" cost --from x --alpha 1
usage "from 2 to" cost -n 1
usage "more than 0" cost --beta 0
usage "--alpha -1: from 0 to" cost --alpha -1
usage "--iterations 0: from 1 to" cost --iterations 0
usage "--gpu -1: GPUs are numbered from 0" reg --gpu -1
usage "--gpu -1: GPUs are numbered from 0" paths --gpu -1
usage "not with a FILE" paths dgx-h100 -d telpher0
usage "from 1 to 1000000 GB/s" paths --memory 0
probe paths no-such-machine >/dev/null
expect "a machine that isn't there" 1 $?
probe paths dgx-h100 --from mlx5_0 >/dev/null
expect "a NIC is no GPU" 1 $?
for c in write paths reg connect cost matrix; do says "$c --help" "^Usage: telpher probe $c " "$(probe $c --help)"; done
python3 - "$where/looks" <<'P' || fails=$((fails + 1))
import json, sys
parts, bad = open(sys.argv[1]).read().split("\0")[:-1], 0
for name, wanted, path, code in zip(*[iter(parts)] * 4):
    try:
        d = json.load(open(path))
        got = eval("[" + code + "]", {"d": d})
    except Exception as e: got = [repr(e)]
    got = " ".join(map(str, got))
    bad += got != wanted
    print("ok  " if got == wanted else "FAIL", name, "" if got == wanted else f": wanted '{wanted}', got '{got}'")
sys.exit(bad > 0)
P
exit $((fails > 0))
