#!/bin/bash
# telpher topo: tree, matrix, explanations, differences and models, on machines that are files.
set -u
telpher=$BUILD_DIR/bin/telpher
fails=0
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
for name in $(env | sed -n 's/^\(\(NCCL\|TELPHER\)_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
export HOME=$where LC_ALL=C.UTF-8
expect() { # NAME WANTED GOT
	if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: wanted '$2', got '$3'"; fails=$((fails + 1)); fi
}
says() { # NAME PATTERN TEXT
	if grep -Eq -- "$2" <<<"$3"; then echo "ok   $1"; else echo "FAIL $1: no '$2' in: $3"; fails=$((fails + 1)); fi
}
topo() { "$telpher" topo "$@" 2>&1; }

out=$(topo show)
expect "this machine is shown" 0 $?
says "with a CPU" "^CPU [0-9]+" "$out"
says "and its cores" "─ core 0  0" "$(topo show --cores)"
out=$(topo show dgx-h100)
says "what there is" "^dgx-h100: 1 host, 2 CPUs, 8 PCIe switches or bridges, 8 GPUs, 8 network ports$" "$out"
says "a GPU with its links" "GPU 3 rank 3 sm90 .* PCIe 5.0 x16 48 GB/s; NVLink x18 to NVSwitch 370.8 GB/s" "$out"
says "a port" "mlx5_7  400 Gb/s InfiniBand, reaches GPU memory" "$out"
says "AMD's links have their name" "xGMI x4 to GPU 1 144 GB/s" "$(topo show mi250x)"

out=$(topo matrix dgx-a100)
says "the matrix's head" $'^\tGPU0\tGPU1\t.*NIC7\tCPU Affinity\tNUMA Affinity$' "$out"
says "a row" $'^GPU2\tNV12\tNV12\tX\tNV12\tNV12\tNV12\tNV12\tNV12\tSYS\tSYS\tPIX\tPIX\tSYS' "$out"
says "the legend of NICs" "^  NIC0: mlx5_0$" "$out"

out=$(topo channels dgx-h100)
says "rings over the rails" "^16 rings x 24 GB/s = 384" "$out"
says "each in and out by a NIC" "^   0: mlx5_[0-7] >( [0-7]){8} > mlx5_[0-7]$" "$out"
says "whose NIC is whose" "^  GPU 5: mlx5_5 \(PIX" "$out"
says "on one host there is no NIC" "^  +0:( [0-7]){8}$" "$(topo channels --one-host dgx-h100)"
NCCL_GRAPH_DUMP_FILE=$where/graphs.xml topo channels p4d >"$where/written"
says "NCCL_GRAPH_DUMP_FILE has the channels" "<graphs version=" "$(cat "$where/graphs.xml" 2>&1)"
expect "and NCCL_GRAPH_FILE gives the same" "$(grep -E '^ +[0-9]+:' "$where/written")" "$(NCCL_GRAPH_FILE=$where/graphs.xml topo channels p4d | grep -E '^ +[0-9]+:')"

out=$(topo explain gpu0 mlx5_3 dgx-h100)
says "the wires" "What the wires allow: PHB" "$out"
says "what is used" "What is used: PXN" "$out"
says "the narrowest hop" "GPU 3 +-> PCI .* 48 GB/s  <- the narrowest" "$out"
says "the reason" "through another GPU \(PXN\) +yes \[relay\] GPU 3 is nearer" "$out"
out=$(topo explain gpu0 gpu2 two-sockets)
says "why not NVLink" "not NVL: " "$out"
says "why not directly" "direct access \(P2P\) +no  \[distance\]" "$out"
says "how instead" "so data goes +through host memory" "$out"
says "a level changes it" "direct access \(P2P\) +yes \[forced\]" "$(NCCL_P2P_LEVEL=SYS topo explain gpu0 gpu2 two-sockets)"
out=$(topo explain gpu0 gpu9 dgx-h100)
expect "what isn't there is an error" 2 $?
says "with what can be said" 'nothing called "gpu9"' "$out"

part='<nvlink target="fffffff:ff:ff.0" count="36" tclass="0x068000"/><c2c bw="56376" count="7"/></gpu>'
echo '<system version="1"><cpu numaid="0" affinity="ffff" arch="arm64"><pci busid="0002:81:00.0" class="0x030200" link_speed="64.0 GT/s PCIe" link_width="16">' \
	"<gpu dev=\"0\" sm=\"107\" mlopart=\"0\" rank=\"0\" gdr=\"1\">$part<gpu dev=\"0\" sm=\"107\" mlopart=\"1\" rank=\"1\" gdr=\"1\">$part</pci></cpu></system>" >"$where/halves.xml"
says "halves of a GPU share its links" "GPU 0.1 rank 1 .* NVLink x36 to NVSwitch 721.8 GB/s; C2C to CPU 0 197.3 GB/s" "$(topo show "$where/halves.xml")"
says "and have columns of their own" $'^\tGPU0.0\tGPU0.1\t' "$(topo matrix "$where/halves.xml")"
says "and names" "^GPU 0.0 -> GPU 0.1$" "$(topo explain gpu0.0 gpu0.1 "$where/halves.xml")"
says "a GPU of two is neither of them" '"gpu0" is a GPU of several parts: say gpu0.0 or gpu0.1;' "$(topo explain gpu0 gpu0.1 "$where/halves.xml" 2>&1)"
cp "$where/halves.xml" "$where/measured.xml"
topo record "$where/measured.xml" gpu0.1 cpu0 bw=77 >"$where/out" 2>&1
says "what was measured is of the one that was named" "77" "$(topo explain gpu0.1 cpu0 "$where/measured.xml")"
expect "and of no other" "" "$(topo explain gpu0.0 cpu0 "$where/measured.xml" | grep 77)"
topo xml "$where/halves.xml" >"$where/again.xml"
out=$(topo diff "$where/halves.xml" "$where/again.xml")
expect "neither is taken for the other" 0 $?

islands=$SOURCE_DIR/tests/topo/data/islands16.xml
out=$(topo channels "$islands")
says "islands are joined by their NICs" "^8 rings x 12 GB/s = 96, 96 across hosts, where no channels could carry more than 96; paths NET" "$out"
says "what they aren't joined by is named in AMD's word" "no ring stays on xGMI, which joins" "$(topo svg "$islands")"
says "and the way says by which" "^   0: mlx5_[0-9]+ >.* 3 > mlx5_3 > mlx5_[0-9]+ > [0-9]+ " "$out"
NCCL_GRAPH_DUMP_FILE=$where/graphs.xml topo channels "$islands" >"$where/written"
says "as far as NCCL has a word for it" ' typeintra="SYS" ' "$(cat "$where/graphs.xml")"
says "what is expected is what ranks can do" "^rings>=32 " "$(topo expect "$islands")"
expect "which a file keeps" "$(grep -E '^ +[0-9]+:' "$where/written")" "$(NCCL_GRAPH_FILE=$where/graphs.xml topo channels "$islands" | grep -E '^ +[0-9]+:')"

topo model p4d -o "$where/p4d.xml" && topo diff p4d "$where/p4d.xml" >"$where/out"
expect "no difference" 0 $?
sed '0,/count="12"/s//count="10"/; 0,/link_width="16"/s//link_width="8"/; s/<net name="rdmap3".*//' "$where/p4d.xml" >"$where/sick.xml"
out=$(topo diff "$where/p4d.xml" "$where/sick.xml")
expect "differences have a status of their own" 1 $?
says "lost NVLinks" "^~ GPU 0: NVLinks 12 -> 10$" "$out"
says "lost lanes" "PCIe lanes 16 -> 8$" "$out"
says "a lost NIC" "^- rdmap3 is missing$" "$out"
says "what it does" "^~ GPU 0 to GPU 1: NVL 240 -> NVL 200 GB/s$" "$out"
says "and what is wrong" "^  nvlink-missing: GPU 0 has 10 NVLinks" "$out"

sed '0,/<net name="rdmap0"[^>]*>/s//&<net name="rdmap9" dev="9" speed="100000" port="2" gdr="1"\/>/' "$where/p4d.xml" >"$where/ports.xml"
says "a NIC of two ports shows both" ">rdmap0 \+ 1<.*>2 ports, 200 Gb/s<" "$(topo svg "$where/ports.xml" | tr -d '\n')"
says "P2P that is off" "^  no-p2p: NVLink joins GPU 0 and GPU 1 \(and others\), and direct access is off: NCCL_P2P_DISABLE=1$" "$(NCCL_P2P_DISABLE=1 topo show dgx-h100)"

topo expect p4d -o "$where/good.txt"
says "what is expected of a good day" "^p2p=nvlink " "$(cat "$where/good.txt")"
expect "is met on that day" "As expected." "$(topo check "$where/good.txt" p4d)"
out=$(topo check "$where/good.txt" "$where/sick.xml")
expect "and not on another" 1 $?
says "with what was found" "^expected nvlinks>=12, found 10 at GPU 0$" "$out"
says "each of it" "^expected nics>=4, found 3 at the machine$" "$out"
out=$(topo check "gdr=on" g5)
says "and why" "^expected gdr=on, found off at GPU 0 with rdmap0: rdmap0 can't reach GPU memory .*\(and 7 more of 8\)$" "$out"
expect "what can't be expected" 2 "$(topo check "speed=high" p4d >/dev/null; echo $?)"

for v in "alpha=2 bw=40" "alpha=4 bw=46" "alpha=3 bw=50"; do topo record "$where/p4d.xml" gpu0 gpu1 $v; done
topo record "$where/p4d.xml" gpu0 rdmap1 alpha=12.5
expect "medians of what was measured" "inside.latency_us 3 inside.us_per_byte 2.17391e-05 across.latency_us 12.5" "$(topo export "$where/p4d.xml" | xargs)"
topo export "$where/p4d.xml" >"$where/tune"
expect "are a table for the cost model" 0 "$(TELPHER_TUNE_FILE=$where/tune "$telpher" explain all_reduce 1M -n 4 >/dev/null; echo $?)"
says "and shown" "^Measured: alpha 3 us 46 GB/s, 19 % of what is planned" "$(topo explain gpu0 gpu1 "$where/p4d.xml")"
sed -E 's/<gpu dev="0"/<gpu dev="X"/; s/<gpu dev="1"/<gpu dev="0"/; s/<gpu dev="X"/<gpu dev="1"/; s/rank="[0-9]+"//' "$where/p4d.xml" >"$where/other.xml"
says "by bus ids, whatever numbers GPUs have" "^Measured the other way: alpha 3 us" "$(topo explain gpu0 gpu1 "$where/other.xml" 2>&1)"
says "the other way too" "^Measured the other way: alpha 3 us 46 GB/s" "$(topo explain gpu1 gpu0 "$where/p4d.xml")"
sed 's/planned_gbps="240"/planned_gbps="480"/' "$where/p4d.xml" >"$where/stale.xml"
says "what was measured over other wires is refused" "^Not taken: measured from GPU 0 to GPU 1: that was over NVL of 480 GB/s, and now it is NVL of 240: measure anew; left out$" \
	"$(topo explain gpu0 gpu1 "$where/stale.xml")"
"$telpher" topo model gb200-nvl72 >"$where/rack.xml"
topo record "$where/rack.xml" h1/gpu0 h1/gpu1 bw=300
says "of several hosts it is that host's" "^Measured: 300 GB/s" "$(topo explain h1/gpu0 h1/gpu1 "$where/rack.xml")"
expect "and no other's" "" "$(topo explain h0/gpu0 h0/gpu1 "$where/rack.xml" | grep -i measured)"
cp "$where/rack.xml" "$where/before.xml"
out=$(topo record "$where/rack.xml" h0/gpu0 h1/cpu0 bw=3)
expect "between two that nothing joins nothing is recorded" 1 $?
says "and why" "nothing in $where/rack.xml joins h0/GPU 0 and h1/CPU 0, so no value between them could ever hold" "$out"
expect "the file stays as it was" 0 "$(cmp "$where/rack.xml" "$where/before.xml"; echo $?)"
# A full disk: the map stays what it was, and nothing lies beside it.
mkdir "$where/full"
if unshare -m mount -t tmpfs -o size=64k none "$where/full" 2>/dev/null; then
	cp "$where/p4d.xml" "$where/map.xml"
	out=$(unshare -m bash -c 'mount -t tmpfs -o size=64k none "$1" && cp "$2" "$1/map.xml" && { dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null
		"$0" topo record "$1/map.xml" gpu0 gpu1 bw=77; echo "status $?"; cmp "$1/map.xml" "$2" && ls "$1" | xargs; "$0" topo xml -q -o "$1/other" "$2"; echo "status $?"; }' \
		"$telpher" "$where/full" "$where/map.xml" 2>&1)
	expect "a full disk" "2" "$(grep -c "^status 1" <<<"$out")"
	says "a full disk: what and why" "map.xml can't be written: .*No space left on device" "$out"
	expect "a full disk: the map is left, and nothing beside it" 1 "$(grep -c "^fill map.xml$" <<<"$out")"
	says "a full disk: an output" "/full/other can't be written: .*(No space left on device|disk full)" "$out"
fi
expect "what can't be recorded" 2 "$(topo record "$where/p4d.xml" gpu0 gpu1 speed=3 >/dev/null; echo $?)"

"$telpher" topo show dgx-h100 --json >"$where/json"
expect "JSON" "8 64 PXN" "$(python3 -c '
import json, sys
d = json.load(open(sys.argv[1]))
p = [x for x in d["gpu_net"] if d["nodes"][x["from"]]["name"] == "GPU 0" and d["nodes"][x["to"]]["name"] == "mlx5_1"][0]
print(sum(n["kind"] == "GPU" for n in d["nodes"]), len(d["gpu_gpu"]), p["type"])' "$where/json")"

for m in dgx-h100 gb200-nvl72; do topo svg "$m" -o "$where/$m.svg"; done
expect "each channel is there, and its switch" "16 16" "$(grep -c 'class="channel" id="ring' "$where/dgx-h100.svg") $(grep -o 'data-channel="ring[0-9]*"' "$where/dgx-h100.svg" | wc -l)"
expect "every GPU is drawn" 72 "$(grep -c 'class="node gpu' "$where/gb200-nvl72.svg")"
expect "what is wrong is marked" 2 "$(topo svg "$where/sick.xml" -o "$where/sick.svg"; grep -c 'class="node gpu faulty"' "$where/sick.svg")"
topo html p4d -o "$where/p4d.html"
says "a page" "^<!DOCTYPE html>" "$(head -1 "$where/p4d.html")"

cat >"$where/provider.xml" <<'X'
<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"><pci busid="ffff:ff:01.0" class="0x060400" link_speed="8 GT/s" link_width="16">
<pci busid="0000:10:1c.0" class="0x030200" vendor="0x10de" device="0x20b0" link_speed="16 GT/s" link_width="16"/>
<pci busid="0000:10:1b.0" class="0x020000" vendor="0x1d0f" device="0xefa0" link_speed="16 GT/s" link_width="16"/></pci></cpu></system>
X
out=$(topo show "$where/provider.xml")
says "what is assumed is said" "^assumed: 0000:10:1c.0 is A100 SXM4 40GB \(compute capability 8.0\)" "$out"
says "and shown" "GPU 0 rank 0 sm80 0000:10:1c.0" "$out"
expect "or not" "" "$(topo show -q "$where/provider.xml" | grep assumed)"

printf '<system version="1"><cpu numaid="0">\n<pci busid="nonsense"/></cpu></system>' >"$where/bad.xml"
out=$(topo show "$where/bad.xml")
expect "a bad file is an error" 1 $?
says "that names file, line and element" "bad.xml:2: <pci nonsense>: busid=" "$out"
topo frobnicate >/dev/null
expect "an unknown verb" 2 $?
expect "a dump can be read again" 0 "$(NCCL_TOPO_DUMP_FILE=$where/dump.xml topo show >/dev/null && topo show "$where/dump.xml" >/dev/null; echo $?)"

# What takes many runs: every model whole and without faults; pictures; and planted faults, each exactly one warning of its kind.
python3 - "$telpher" "$where" "$SOURCE_DIR/../shared/topo" <<'P' || fails=$((fails + 1))
import copy, glob, os, re, subprocess, sys, xml.etree.ElementTree as ET
telpher, where, shared = sys.argv[1:]
failed = 0
def topo(*args): return subprocess.run([telpher, "topo", *args], capture_output=True, text=True).stdout
def expect(name, wanted, got):
    global failed
    print("ok  " if wanted == got else "FAIL", name, "" if wanted == got else f": wanted {wanted!r}, got {got!r}")
    failed += wanted != got
def faults(shown):
    tail = shown.partition("Worse than it could be:\n")[2]
    return [re.match(r"  ([a-z0-9-]+): (GPU \d|mlx5_\d|\w+)", line).groups() for line in tail.splitlines()]

for model in [line.split()[0] for line in topo("model").splitlines()]:
    shown = topo("show", model)
    expect(f"{model} is whole, without faults", (True, []), (bool(re.search("GPU 0 rank 0", shown)), faults(shown)))

machine = ET.fromstring(topo("model", "dgx-h100"))
def planted(name, wanted, plant):
    sick = copy.deepcopy(machine)
    plant({p.get("busid"): p for p in sick.iter("pci")}, sick)
    ET.ElementTree(sick).write(f"{where}/planted.xml")
    expect(f"planted: {name}", wanted, faults(topo("show", f"{where}/planted.xml")))
def without(*buses):
    def plant(pci, root):
        for p in root.iter("pci"):
            for bus in buses:
                if pci[bus] in list(p): p.remove(pci[bus])
    return plant
planted("nothing", [], lambda pci, root: None)
planted("a GPU on 8 lanes", [("pci-width", "GPU 3")], lambda pci, root: pci["0000:43:00.0"].set("link_width", "8"))
planted("a NIC on 8 lanes", [("pci-width", "mlx5_5")], lambda pci, root: pci["0000:a5:00.0"].set("link_width", "8"))
planted("a NIC at half the PCIe speed", [("pci-speed", "mlx5_5")], lambda pci, root: pci["0000:a5:00.0"].set("link_speed", "16.0 GT/s PCIe"))
planted("a port at half its rate", [("nic-rate", "mlx5_2")], lambda pci, root: next(pci["0000:a2:00.0"].iter("net")).set("speed", "200000"))
planted("ACS", [("acs", "ACS")], lambda pci, root: pci["0000:12:00.0"].set("acs", "1"))
planted("a NIC that is missing", [("no-nic", "no")], without("0000:a3:00.0"))
planted("all NICs but one missing", [("no-nic", "no")], without(*(f"0000:a{i}:00.0" for i in range(1, 8))))
planted("a socket's NICs missing", [("no-nic", "no")], without(*(f"0000:a{i}:00.0" for i in range(4, 8))))
def ethernet_alone(pci, root):
    without(*(f"0000:a{i}:00.0" for i in range(1, 8)))(pci, root)
    for net in root.iter("net"): net.set("gdr", "0")
planted("one port for all, which takes host memory alone", [("no-gdr", "no")], ethernet_alone)
planted("no peermem", [("no-gdr", "no")], lambda pci, root: [g.set("gdr", "0") for g in root.iter("gpu")])
planted("a NIC without GPUDirect", [("no-gdr", "no")], lambda pci, root: next(pci["0000:a6:00.0"].iter("net")).set("gdr", "0"))
planted("NVLinks that are down", [("nvlink-missing", "GPU 7")], lambda pci, root: next(pci["0000:47:00.0"].iter("nvlink")).set("count", "12"))

def picture(text):
    root, ns = ET.fromstring(text), "{http://www.w3.org/2000/svg}"
    w, h = map(float, root.get("viewBox").split()[2:])
    for r in root.iter(ns + "rect"):
        x, y = float(r.get("x", 0)), float(r.get("y", 0))
        if x < 0 or y < 0 or x + float(r.get("width")) > w or y + float(r.get("height")) > h: return "a box outside"
    for t in root.iter(ns + "text"):
        if not (0 <= float(t.get("x")) <= w and 0 <= float(t.get("y")) <= h): return "outside: " + t.text
    if h - max(float(t.get("y")) for t in root.iter(ns + "text")) > 60: return "empty below"
    # Links of one machine lie beside each other: none begins and ends where another does.
    mesh = [path.get("d") for g in root.iter(ns + "g") if g.get("class") == "link nvl" for path in g.iter(ns + "path")]
    if len(mesh) != len(set(mesh)): return "links on links"
    return "not self-contained" if re.search(r"(href|src|url)\s*[=(]\s*[\"']?(?!#)", text) else "whole"
for machine in [line.split()[0] for line in topo("model").splitlines()] + sorted(glob.glob(shared + "/*.xml")):
    expect(f"the picture of {os.path.basename(machine)} is well-formed, in its frame, and needs nothing from elsewhere", "whole", picture(topo("svg", "-q", machine)))
sys.exit(failed > 0)
P

[ $fails -eq 0 ]
