#!/bin/bash
# Degradations are planted in every machine that is known by name, and in the files of real systems where those lie beside this tree: each is one
# warning, the right one; two at once, in known machines, are two; and machines without any have none.
set -u
for name in $(env | sed -n 's/^\(\(NCCL\|TELPHER\)_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
# Sanitizers make each look ten times as long: the first of each kind, and some of the files.
python3 - "$BUILD_DIR/bin/telpher" "$SOURCE_DIR/../shared/topo" "$where" "${SANITIZE-}" <<'P'
import copy, glob, itertools, json, os, re, subprocess, sys
import xml.etree.ElementTree as ET
telpher, shared, where, sanitize = sys.argv[1:]
failed = checked = 0

# What real files have without our planting it: all NVLinks of GPU 1 are down there.
SICK = {"gb300-1tray-fault-gpu1": ["nvlink-missing"]}
# A port that is gone makes others serve more, where GPUs and ports meet at a CPU by C2C, or in other numbers at each switch.
SHARED = {"gb200-tray", "gb200-nvl72", "rccl-8p1h.conv"}
# What isn't told, since nothing tells: a NIC that is the only one (or none is like it), or one of those that not all GPUs have; a switch like which
# there is no other; GPUs that never shared a switch with a NIC.
ONLY = ["NIC gone", "port slow", "nic on 8 lanes", "nic at 2.5 GT/s"]
FEW = ["NIC gone", "port slow"]
NO_PEERMEM = ["GPUs without peermem", "NICs without peermem"]
SWITCH = ["switch on 8 lanes", "switch at 2.5 GT/s"]
UNTOLD = {"g5": ONLY + NO_PEERMEM, "p3dn": ONLY + NO_PEERMEM, "aws-g5": ONLY, "aws-hwloc-p3dn": ONLY, "two-sockets": ONLY + SWITCH, "nvlink-pairs": ["NIC gone"],
    "pcie-box": ["NIC gone"], "flagcx-a800": ["port slow"] + SWITCH, "gb300-1tray-healthy": ONLY, "gb300-1tray-fault-gpu1": ONLY, "rccl-16p1h.conv": SWITCH,
    "rccl-3p_pcie.sm80": ONLY, "rccl-4p2h_2nic.sm80": FEW + SWITCH, "rccl-4p3l.sm80": FEW + SWITCH, "rccl-8p6l_2nic.sm80": FEW, "rccl-8p_90a.conv": FEW + SWITCH,
    "rccl-8p_pcie.sm80": ONLY + SWITCH, "rccl-8p_rome.sm80": ONLY, "rccl-8p_rome_n4.sm80": ONLY, "rccl-8p_ts1.sm80": FEW, "rccl-collnet_n1.sm80": ONLY}

def faults(tree):
    tree.write(f"{where}/planted.xml")
    run = subprocess.run([telpher, "topo", "show", "--json", "-q", f"{where}/planted.xml"], capture_output=True, text=True)
    if run.returncode: return [run.stderr.strip()]
    return sorted(f["fault"] for f in json.loads(run.stdout)["faults"])

def devices(root, tag):
    if tag == "switch": return [p for p in root.iter("pci") if p.find("pci") is not None]
    return [p for p in root.iter("pci") if p.find(tag) is not None]

def narrow(tag, index, root):
    pci = devices(root, tag)[index]
    if int(pci.get("link_width") or 0) < 16: return False
    pci.set("link_width", "8")
    return True

def slow_down(tag, index, root):
    pci = devices(root, tag)[index]
    speed = re.match(r"[\d.]+", pci.get("link_speed") or "")
    if not speed or float(speed.group()) < 8: return False
    pci.set("link_speed", "2.5 GT/s PCIe")
    return True

def remove_nic(index, root):
    nic = devices(root, "nic")[index]
    for pci in root.iter():
        if nic in list(pci): pci.remove(nic)
    return True

def slow_port(index, root):
    ports = list(devices(root, "nic")[index].iter("net"))
    for port in ports: port.set("speed", str(int(float(port.get("speed") or 0)) // 4))
    return bool(ports)

def refuse(tag, root):
    for device in root.iter(tag): device.set("gdr", "0")
    return True

def refuse_one(index, root):
    list(root.iter("gpu"))[index].set("gdr", "0")
    return True

def cut_nvlinks(index, root):
    gpu = joined(root)[index]
    for link in gpu.findall("nvlink") + gpu.findall("xgmi"): gpu.remove(link)
    return True

def joined(root): return [g for g in root.iter("gpu") if g.find("nvlink") is not None or g.find("xgmi") is not None]

def some(devices, sample): return range(0, len(devices), max(sample, len(devices) if sanitize else len(devices) // 3, 1))

def is_untold(name, what): return what in UNTOLD.get(name, [])

def check(name, what, healthy, wanted, tree, *plants):
    global failed, checked
    sick = ET.ElementTree(copy.deepcopy(tree.getroot()))
    if not all(plant(sick.getroot()) for plant in plants): return
    got, checked = faults(sick), checked + 1
    planted.add((name, what))
    if got != sorted(healthy + wanted) and not (got == healthy and is_untold(name, what)):
        failed += 1
        print("FAIL", name, what, "wanted", wanted, "beside", healthy, "got", got)

# Each hits another device, so that none hides another.
def plant_two(name, tree):
    root = tree.getroot()
    last = len(devices(root, "nic")) - 1
    singles = [("NIC gone", "nic-shared" if name in SHARED else "no-nic", lambda r: remove_nic(last, r)), ("gpu on 8 lanes", "pci-width", lambda r: narrow("gpu", 0, r)),
        ("port slow", "nic-rate", lambda r: slow_port(0, r)), ("GPUs without peermem", "no-gdr", lambda r: refuse_one(0, r))]
    if joined(root): singles.append(("NVLinks down", "nvlink-missing", lambda r: cut_nvlinks(0, r)))
    singles = [s for s in singles if not is_untold(name, s[0])]
    for (a, wants_a, plant_a), (b, wants_b, plant_b) in itertools.combinations(singles, 2):
        check(name, f"{a}, {b}", [], [wants_a, wants_b], tree, plant_b, plant_a)

def plant_all(name, tree, sample):
    healthy = faults(tree)
    if healthy != sorted(SICK.get(name, [])):
        print("FAIL", name, "nothing planted, got", healthy)
        return 1
    root = tree.getroot()
    for tag in "gpu", "nic", "switch":
        for i in some(devices(root, tag), sample):
            check(name, f"{tag} on 8 lanes", healthy, ["pci-width"], tree, lambda r: narrow(tag, i, r))
            check(name, f"{tag} at 2.5 GT/s", healthy, ["pci-speed"], tree, lambda r: slow_down(tag, i, r))
    for i in some(devices(root, "nic"), sample):
        check(name, "NIC gone", healthy, ["nic-shared" if name in SHARED else "no-nic"], tree, lambda r: remove_nic(i, r))
        check(name, "port slow", healthy, ["nic-rate"], tree, lambda r: slow_port(i, r))
    if sample == 1:
        check(name, "GPUs without peermem", healthy, ["no-gdr"], tree, lambda r: refuse("gpu", r))
        check(name, "NICs without peermem", healthy, ["no-gdr"], tree, lambda r: refuse("net", r))
    for i in some(joined(root), sample):
        check(name, "NVLinks down", healthy, ["nvlink-missing"], tree, lambda r: cut_nvlinks(i, r))
    return 0

planted = set()
for model in [l.split()[0] for l in subprocess.run([telpher, "topo", "model"], capture_output=True, text=True).stdout.splitlines()]:
    text = subprocess.run([telpher, "topo", "model", model], capture_output=True, text=True).stdout
    # A rack of 72 takes long: a part of it.
    failed += plant_all(model, ET.ElementTree(ET.fromstring(text)), 24 if model == "gb200-nvl72" else 1)
    if model != "gb200-nvl72" and (not sanitize or model == "gb200-tray"): plant_two(model, ET.ElementTree(ET.fromstring(text)))
for path in sorted(glob.glob(shared + "/*.xml"))[::6 if sanitize else 1]:
    failed += plant_all(os.path.basename(path)[:-4], ET.parse(path), 5)

# A NIC more at one switch is none missing at the others.
root = ET.fromstring(subprocess.run([telpher, "topo", "model", "dgx-h100"], capture_output=True, text=True).stdout)
first = devices(root, "nic")[0]
more = copy.deepcopy(first)
more.set("busid", first.get("busid")[:-1] + "1")
next(more.iter("net")).attrib.update(name="mlx5_99", dev="99", guid="0x9999")
next(p for p in root.iter() if first in list(p)).append(more)
checked += 1
if faults(ET.ElementTree(root)):
    failed += 1
    print("FAIL one NIC more is told as", faults(ET.ElementTree(root)))

# None of them is left out because it couldn't be planted.
for model in "dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "p4d", "ndv4", "ndv5", "mi250x", "mi300x":
    for what in "gpu on 8 lanes", "nic at 2.5 GT/s", "switch on 8 lanes", "NIC gone", "port slow", "GPUs without peermem", "NVLinks down":
        if (model, what) not in planted:
            failed += 1
            print("FAIL", model, what, "wasn't planted")
print(checked, "planted,", failed, "wrong")
sys.exit(failed > 0)
P
