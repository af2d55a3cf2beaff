#!/bin/bash
# Paths and decisions on the files of real systems against what NCCL decides on them, where those lie beside this tree. Differences
# that are meant are listed with their reason.
set -u
shared=$SOURCE_DIR/../shared/topo
[ -d "$shared/nccl" ] || { echo "no files of real systems here"; exit 77; }
for name in $(env | sed -n 's/^\(\(NCCL\|TELPHER\)_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
exec python3 - "$BUILD_DIR/bin/telpher" "$shared" <<'P'
import glob, json, os, subprocess, sys
telpher, shared = sys.argv[1:]
# Links that are all down (count="0") are no NVLink for us.
DOWN = {"gb300-1tray-fault-gpu1"}
# NVLinks that lead from a GPU to itself count for nothing.
TO_SELF = {"azure-ncv4"}
fails = files = pairs = 0

def differ(*what):
    global fails
    fails += 1
    if fails < 40: print("FAIL", *what)

def close(a, b): return abs(a - b) <= 1e-3 * max(1, abs(a))

for path in sorted(glob.glob(shared + "/nccl/*.json")):
    name, variant = os.path.basename(path)[:-5].rsplit(".", 1)
    theirs = json.load(open(path))
    command = [telpher, "topo", "show", "--json", "-q", f"{shared}/{name}.xml"] + (["--one-host"] if variant == "intra" else [])
    run = subprocess.run(command, capture_output=True, text=True)
    files += 1
    if run.returncode:
        differ(name, run.stderr)
        continue
    ours = json.loads(run.stdout)
    nodes = ours["nodes"]
    # NCCL leaves GPUs out where its NIC is faster than their NVLink; we don't.
    if theirs["gpusTrimmed"]: continue
    rank = {i: n["rank"] for i, n in enumerate(nodes) if n["kind"] == "GPU"}
    dev = {i: n["dev"] for i, n in enumerate(nodes) if n["kind"] == "NET"}
    devs = [n["dev"] for n in theirs["nets"]]
    gg = {(rank[p["from"]], rank[p["to"]]): p for p in ours["gpu_gpu"]}
    gn = {(rank[p["from"]], dev[p["to"]]): p for p in ours["gpu_net"]}
    ng = {(dev[p["from"]], rank[p["to"]]): p for p in ours["net_gpu"]}
    if name not in TO_SELF | DOWN and not (close(theirs["maxBw"], ours["max_bw"]) and close(theirs["totalBw"], ours["total_bw"])):
        differ(name, variant, "bandwidths", theirs["maxBw"], ours["max_bw"], theirs["totalBw"], ours["total_bw"])
    def check(what, key, mine, p):
        global pairs
        pairs += 1
        if name in DOWN and p["bw"] == 0 or (name in DOWN and mine["bw"] != p["bw"]): return
        if mine["type"] != p["type"] or not close(p["bw"], mine["bw"]):
            differ(name, variant, what, key, p["type"], p["bw"], "ours", mine["type"], mine["bw"])
    for row in theirs["pathsGpuGpu"]:
        for p in row["paths"]: check("GPU to GPU", (row["rank"], p["to"]), gg[row["rank"], p["to"]], p)
    for row in theirs["pathsGpuNet"]:
        for p in row["paths"]: check("GPU to NIC", (row["rank"], devs[p["to"]]), gn[row["rank"], devs[p["to"]]], p)
    for row in theirs["pathsNetGpu"]:
        for p in row["paths"]: check("NIC to GPU", (devs[row["net"]], p["to"]), ng[devs[row["net"]], p["to"]], p)
    if name in DOWN: continue
    for row in theirs["gdr"]:
        for key, mine in ("read0", "gdr"), ("read1", "gdr_read"):
            for i, mode in enumerate(row[key]):
                if gn[row["rank"], devs[i]][mine] != mode: differ(name, variant, "GPUDirect", row["rank"], devs[i], key, mode)
    for p in theirs["p2p"]:
        mine = gg[p["from"], p["to"]]
        relay = rank[mine["relay"]] if mine["relay"] >= 0 else -1
        if [int(mine["p2p"]), int(mine["read"]), relay] != [p["p2p"], p["read"], p["intermediate"]]: differ(name, variant, "P2P", p, mine)
        if not mine["why"]["text"]: differ(name, variant, "no reason", p)
    ids = {n["id"]: n["dev"] for n in theirs["nets"]}
    mine = dict(zip((rank[i] for i in sorted(rank, key=rank.get)), ours["local_net"]))
    for row in theirs["localNet"]:
        if [dev[n] for n in mine[row["rank"]]] != [ids[x] for x in row["netIdPerChannel"]]: differ(name, variant, "local NIC", row["rank"])
    local = dict(zip(sorted(dev.values()), ours["local_gpu"]))
    for n in theirs["nets"]:
        if rank.get(local[n["dev"]], -1) != n["localGpuRank"]: differ(name, variant, "local GPU", n["dev"])
print(f"{files} answers, {pairs} paths, {fails} differences")
sys.exit(1 if fails or not pairs else 0)
P
