#!/bin/bash
# An independent implementation (scapy) agrees with every ICRC of a capture.
set -u
. "$SOURCE_DIR/tests/verbs/lib_wire.sh"
need ibv_rc_pingpong ibverbs-utils
PYTHON=${PYTHON:-/usr/bin/python3}     # whose packages are Debian's
$PYTHON -c 'import scapy.contrib.roce' 2>/dev/null || { echo "scapy is not installed (Debian: python3-scapy)"; exit 77; }
address=$(gid_address)
[ -n "$address" ] || { echo "GID 0 isn't IPv4"; exit 77; }
export TELPHER_VERBS_CAPTURE=$WORK/%p.pcapng
pair $address ibv_rc_pingpong -g 0 -n 20 -s 5000
pair $address ibv_ud_pingpong -g 0 -n 20
$PYTHON - "$WORK"/*.pcapng <<'P' || fail "scapy doesn't agree"
import struct, sys, zlib
from scapy.all import rdpcap, IP, UDP, Raw
from scapy.contrib.roce import BTH
count = 0
for name in sys.argv[1:]:
    for packet in rdpcap(name):
        raw = bytes(packet)
        ip = IP(raw)
        bth = ip[BTH]
        wire = raw[-4:]
        made = bth.compute_icrc(bytes(bth)[:-4])
        if made != wire:
            print(name, count, made.hex(), wire.hex())
            sys.exit(1)
        count += 1
print(count, "packets")
sys.exit(count < 100)
P
echo "scapy agrees"
