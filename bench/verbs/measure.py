#!/usr/bin/env python3
"""Measures the software card beside its yardsticks and its peers, in rounds, and prints the medians with ratios.

Every round runs every measurement once, in an order that changes, so that what drifts on the machine hits all alike. A
latency is the run's median, a rate its average; the cell is the median over the rounds. run.sh builds what is needed."""
import argparse
import atexit
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time

PORT = [21000 + os.getpid() % 500 * 20]
LO = "127.0.0.1"
TIMEOUT_S = 30
MANY_TIMEOUT_S = 90


def next_port():
    PORT[0] += 1
    return PORT[0]


def listening(port):
    want = f":{port:04X} "
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(name) as table:
            if any(want in line[:30] + " " and " 0A " in line for line in table):
                return True
    return False


class Bench:
    def __init__(self, args):
        self.card, self.micro_program, self.idle_program = args.card, args.micro, args.idle
        # This process stays ordinary: one of real-time priority that waits for such children can lock up the kernel.
        self.prefix = ["chrt", "-r", "50"] if args.realtime else []

    def environment(self, more):
        env = dict(os.environ, TELPHER_VERBS_HIDE_REAL="1", TELPHER_VERBS_IFNAME="lo", NCCL_DEBUG="WARN")
        env.update(more)
        return env

    def pair(self, server, client, env, port):
        """Both programs to their ends; the client's output, None where one failed."""
        first = subprocess.Popen(self.prefix + server, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            if listening(port) or first.poll() is not None:
                break
            time.sleep(0.02)
        try:
            second = subprocess.run(self.prefix + client, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=TIMEOUT_S)
            first.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{' '.join(client)}: not done after {TIMEOUT_S} s\n")
            return None
        finally:
            if first.poll() is None:
                first.kill()
                first.wait()
        if second.returncode != 0:
            sys.stderr.write(f"{' '.join(client)}: status {second.returncode}\n{second.stdout[-500:]}\n")
            return None
        return second.stdout

    def perftest(self, program, arguments, carrier, fault=None):
        """The numbers of the last line, by perftest's column names. A --mmap=FILE is the server's; the client has FILE.client, for
        each needs memory of its own."""
        port = next_port()
        env = self.environment({"LD_LIBRARY_PATH": self.card, "TELPHER_VERBS_CARRIER": carrier})
        if fault:
            env["TELPHER_VERBS_FAULT"] = fault
        base = [program, "-x", "0", "-F", "-p", str(port), "--report_gbits"] + arguments
        if "_lat" in program:
            base.remove("--report_gbits")
        client = [f"{argument}.client" if argument.startswith("--mmap=") else argument for argument in base] + [LO]
        out = self.pair(base, client, env, port)
        lines = [line.split() for line in (out or "").splitlines() if re.match(r"^ *\d+ +\d+ +[\d.]", line)]
        return [float(x) for x in lines[-1]] if lines else None

    def lat(self, program, carrier, *arguments):
        numbers = self.perftest(program, ["-n", "10000", *arguments], carrier)
        return numbers and numbers[4]

    def bw(self, program, carrier, *arguments, fault=None):
        numbers = self.perftest(program, list(arguments), carrier, fault)
        return numbers and numbers[3]

    def rate(self, carrier, *arguments):
        numbers = self.perftest("ib_write_bw", list(arguments), carrier)
        return numbers and numbers[4]

    def idle(self, carrier):
        env = self.environment({"LD_LIBRARY_PATH": self.card, "TELPHER_VERBS_CARRIER": carrier})
        run = subprocess.run(self.prefix + [self.idle_program], env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        return float(run.stdout.split()[1]) if run.returncode == 0 else None

    def many_processes(self, carrier, pairs=32):
        """Seconds until all of the pairs, begun at once, have connected, moved 13 MB each and ended well."""
        env = self.environment({"LD_LIBRARY_PATH": self.card, "TELPHER_VERBS_CARRIER": carrier})
        command = ["ib_write_bw", "-x", "0", "-F", "-s", "65536", "-n", "200", "-u", "18", "-p"]
        ports = [next_port() for _ in range(pairs)]
        quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        start = time.monotonic()
        all_of_them = [subprocess.Popen(self.prefix + command + [str(port)], **quiet) for port in ports]
        for port in ports:
            while not listening(port) and time.monotonic() < start + MANY_TIMEOUT_S:
                time.sleep(0.01)
        all_of_them += [subprocess.Popen(self.prefix + command + [str(port), LO], **quiet) for port in ports]
        good = True
        for process in all_of_them:
            try:
                good &= process.wait(max(0.1, start + MANY_TIMEOUT_S - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                good = False
        return time.monotonic() - start if good else None

    def ucx(self, tls, test, size, count):
        port = next_port()
        env = self.environment({"UCX_TLS": tls, "UCX_NET_DEVICES": "lo" if "tcp" in tls else "all", "UCX_WARN_UNUSED_ENV_VARS": "n"})
        command = ["ucx_perftest", "-f", "-v", "-t", test, "-s", str(size), "-n", str(count), "-p", str(port)]
        out = self.pair(command, command + [LO], env, port)
        rows = [line.split(",") for line in (out or "").splitlines() if re.match(r"^\d+,", line)]
        if not rows:
            return None
        return float(rows[-1][1]) if test.endswith("lat") else float(rows[-1][5]) * (1 << 20) * 8e-9

    def iperf(self, udp):
        port = next_port()
        env = self.environment({})
        more = ["-u", "-b", "0", "-l", "32000"] if udp else []
        out = self.pair(["iperf3", "-s", "-1", "-p", str(port)], ["iperf3", "-c", LO, "-p", str(port), "-t", "1", "-J"] + more, env, port)
        if not out:
            return None
        end = json.loads(out[out.index("{"):])["end"]
        if not udp:
            return end["sum_received"]["bits_per_second"] * 1e-9
        return end["sum"]["bits_per_second"] * (1 - end["sum"]["lost_percent"] / 100) * 1e-9

    def micro(self, what):
        run = subprocess.run(self.prefix + [self.micro_program, what], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        return {name: float(value) for name, value in (line.split() for line in run.stdout.splitlines())}


def measurements(bench, mapped):
    """name -> (group, unit, function)"""
    big, wire = ("-s", "1048576", "-n", "2000"), ("-s", "65536", "-m", "4096", "-n", "5000")
    out = {}

    def add(name, group, unit, function):
        out[name] = (group, unit, function)

    for carrier, group in (("auto", "machine"), ("wire", "wire")):
        where = "same machine" if carrier == "auto" else "wire, loopback"
        for verb in ("write", "send"):
            add(f"{where}: ib_{verb}_lat 8 B", group, "us", lambda v=verb, c=carrier: bench.lat(f"ib_{v}_lat", c, "-s", "8"))
        add(f"{where}: ib_read_lat 8 B (there and back)", group, "us", lambda c=carrier: bench.lat("ib_read_lat", c, "-s", "8"))
        add(f"{where}: ib_atomic_lat (there and back)", group, "us", lambda c=carrier: bench.lat("ib_atomic_lat", c))
        size = big if carrier == "auto" else wire
        for verb in ("write", "read", "send"):
            add(f"{where}: ib_{verb}_bw {'1 MB' if carrier == 'auto' else '64 KB, MTU 4096'}", group, "Gb/s",
                lambda v=verb, c=carrier, s=size: bench.bw(f"ib_{v}_bw", c, *s))
        add(f"{where}: ib_write_bw 8 B in lists of 16", group, "M/s", lambda c=carrier: bench.rate(c, "-s", "8", "-l", "16", "-n", "160000"))
    add("same machine: ib_write_lat 8 B, shared memory", "machine", "us",
        lambda: bench.lat("ib_write_lat", "auto", "-s", "8", f"--mmap={mapped}"))
    for carrier, group, where in (("auto", "machine", "same machine"), ("wire", "wire", "wire, loopback")):
        add(f"{where}: ib_write_bw 4 KB, 1,000 QPs", group, "Gb/s", lambda c=carrier: bench.bw("ib_write_bw", c, "-s", "4096", "-q", "1000", "-n", "40", "-u", "18"))
        add(f"{where}: 64 processes", group, "s", lambda c=carrier: bench.many_processes(c))
        add(f"{where}: idle, connected", group, "% CPU", lambda c=carrier: bench.idle(c))
    add("wire, loopback: ib_write_bw both ways", "wire", "Gb/s", lambda: bench.bw("ib_write_bw", "wire", *wire, "-b"))
    add("wire, loopback: ib_write_bw, 1 % lost", "wire", "Gb/s", lambda: bench.bw("ib_write_bw", "wire", *wire, "-u", "18", fault="drop=0.01"))
    add("wire, loopback: ib_read_bw, 1 % lost", "wire", "Gb/s", lambda: bench.bw("ib_read_bw", "wire", *wire, "-u", "18", fault="drop=0.01"))
    add("wire, loopback: ib_write_bw, 5 % lost", "wire", "Gb/s",
        lambda: bench.bw("ib_write_bw", "wire", "-s", "65536", "-m", "4096", "-n", "2000", "-u", "18", fault="drop=0.05"))
    add("memcpy 1 MB", "both", "Gb/s", lambda: bench.micro("copy").get("memcpy_gbps"))
    add("process_vm_writev 1 MB", "both", "Gb/s", lambda: bench.micro("vm").get("vm_writev_gbps"))
    add("process_vm_writev 8 B", "both", "us", lambda: bench.micro("vm").get("vm_writev_8_us"))
    add("process_vm_writev 8 B in lists of 16", "both", "M/s", lambda: bench.micro("vm").get("vm_writev_list_mps"))
    add("flag in shared memory", "both", "us", lambda: bench.micro("flag").get("flag_us"))
    add("UDP, 4 KB segmented", "both", "Gb/s", lambda: bench.micro("bulk").get("udp_gbps"))
    add("UDP, 4 KB segmented, CRC", "both", "Gb/s", lambda: bench.micro("bulk_crc").get("udp_crc_gbps"))
    add("UDP, both spin, 40 B", "both", "us", lambda: bench.micro("udp").get("udp_us"))
    add("TCP (iperf3)", "both", "Gb/s", lambda: bench.iperf(False))
    add("UDP (iperf3, what arrived)", "both", "Gb/s", lambda: bench.iperf(True))
    for tls, name in (("sm,self", "UCX shared memory"), ("tcp,self", "UCX TCP")):
        add(f"{name}: put 8 B", "both", "us", lambda t=tls: bench.ucx(t, "ucp_put_lat", 8, 10000))
        add(f"{name}: tag 8 B", "both", "us", lambda t=tls: bench.ucx(t, "tag_lat", 8, 10000))
        add(f"{name}: put 1 MB", "both", "Gb/s", lambda t=tls: bench.ucx(t, "ucp_put_bw", 1 << 20, 2000))
    return out


MACHINE_BW, WIRE_BW = "same machine: ib_write_bw 1 MB", "wire, loopback: ib_write_bw 64 KB, MTU 4096"
# ours, the other
RATIOS = [
    (MACHINE_BW, "process_vm_writev 1 MB"),
    (MACHINE_BW, "memcpy 1 MB"),
    (MACHINE_BW, "UCX shared memory: put 1 MB"),
    ("same machine: ib_write_lat 8 B", "process_vm_writev 8 B"),
    ("same machine: ib_write_lat 8 B", "UCX shared memory: put 8 B"),
    ("same machine: ib_write_lat 8 B, shared memory", "flag in shared memory"),
    ("same machine: ib_send_lat 8 B", "flag in shared memory"),
    ("same machine: ib_send_lat 8 B", "UCX shared memory: tag 8 B"),
    ("same machine: ib_write_bw 8 B in lists of 16", "process_vm_writev 8 B in lists of 16"),
    (WIRE_BW, "UDP, 4 KB segmented, CRC"),
    (WIRE_BW, "UDP, 4 KB segmented"),
    (WIRE_BW, "TCP (iperf3)"),
    (WIRE_BW, "UDP (iperf3, what arrived)"),
    (WIRE_BW, "UCX TCP: put 1 MB"),
    ("wire, loopback: ib_write_bw both ways", "UDP, 4 KB segmented, CRC"),
    ("wire, loopback: ib_write_lat 8 B", "UDP, both spin, 40 B"),
    ("wire, loopback: ib_send_lat 8 B", "UCX TCP: tag 8 B"),
    ("wire, loopback: ib_write_bw, 1 % lost", WIRE_BW),
    ("wire, loopback: ib_read_bw, 1 % lost", "wire, loopback: ib_read_bw 64 KB, MTU 4096"),
]

# What it is to reach on two cores: ours, the other's (None: nothing, the figure itself), more or less than.
AIMS = [
    (MACHINE_BW, "process_vm_writev 1 MB", ">", 0.8),
    ("same machine: ib_write_lat 8 B", None, "<", 2.5),
    ("same machine: ib_write_lat 8 B, shared memory", None, "<", 0.6),
    ("same machine: ib_send_lat 8 B", None, "<", 0.9),
    ("same machine: ib_write_bw 8 B in lists of 16", None, ">", 2.0),
    (WIRE_BW, None, ">", 12.0),
    ("wire, loopback: ib_write_lat 8 B", None, "<", 6.0),
    ("wire, loopback: ib_write_bw, 1 % lost", WIRE_BW, ">", 0.5),
    ("wire, loopback: ib_read_bw, 1 % lost", "wire, loopback: ib_read_bw 64 KB, MTU 4096", ">", 0.5),
    ("same machine: idle, connected", None, "<", 0.1),
    ("wire, loopback: idle, connected", None, "<", 0.1),
]


def figure(cells, ours, other):
    if not cells.get(ours) or (other and not cells.get(other)):
        return None
    return statistics.median(cells[ours]) / (statistics.median(cells[other]) if other else 1)


def report(cells, plan, args):
    lines = []
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    lines.append(f"{time.strftime('%Y-%m-%d')}, Linux {platform.release()}, {os.cpu_count()} processors, {cpu}; {args.rounds} rounds"
                 f"{', real-time priority' if args.realtime else ''}; load {os.getloadavg()[0]:.1f}")
    lines.append("")
    width = max(map(len, plan))
    for name, (_, unit, _) in plan.items():
        values = cells.get(name, [])
        if values:
            lines.append(f"{name:{width}}  {statistics.median(values):9.2f} {unit:5} ({min(values):.2f} to {max(values):.2f})")
        else:
            lines.append(f"{name:{width}}  failed")
    lines.append("")
    lines.append("Ours over the other's: of a rate, more than 1 is faster; of a time, less.")
    for ours, other in RATIOS:
        ratio = figure(cells, ours, other)
        if ratio is not None:
            lines.append(f"{ours:{width}}  {ratio:9.2f} of {other}")
    lines.append("")
    lines.append("What it is to reach (two cores):")
    for ours, other, sign, aim in AIMS:
        if ours not in plan:
            continue
        value = figure(cells, ours, other)
        reached = value is not None and (value > aim if sign == ">" else value < aim)
        shown = "failed" if value is None else f"{value:.2f}"
        lines.append(f"{ours:{width}}  {shown:>9} {sign} {aim:g} {'of ' + other if other else plan[ours][1]}: {'yes' if reached else 'NO'}")
    lost = [f"{name} ({args.rounds - len(cells.get(name, []))} of {args.rounds})" for name in plan if len(cells.get(name, [])) < args.rounds]
    if lost:
        lines.append("")
        lines.append("Failed: " + ", ".join(lost))
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", required=True, help="folder of libibverbs.so.1")
    parser.add_argument("--micro", required=True, help="the program that micro.c becomes")
    parser.add_argument("--idle", required=True, help="the program that idle.c becomes")
    parser.add_argument("--results", required=True, help="folder for the table and the JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--realtime", action="store_true", help="give the programs real-time priority, where permitted")
    parser.add_argument("--only", choices=["machine", "wire"], help="only one half of ours, and the others")
    parser.add_argument("--name", default=None, help="of the results; default: the date")
    args = parser.parse_args()
    args.card = os.path.abspath(args.card)
    mapped = f"/dev/shm/telpher-bench-{os.getpid()}"
    for name in (mapped, f"{mapped}.client"):
        with open(name, "wb") as file:
            file.truncate(1 << 20)
        atexit.register(os.unlink, name)
    bench = Bench(args)
    plan = {name: entry for name, entry in measurements(bench, mapped).items() if not args.only or entry[0] in (args.only, "both")}
    cells = {}
    names = list(plan)
    for number in range(args.rounds):
        random.Random(number).shuffle(names)
        for name in names:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\033[Kround {number + 1} of {args.rounds}: {name}")
            try:
                value = plan[name][2]()
            except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired) as error:
                sys.stderr.write(f"{name}: {error}\n")
                value = None
            if value is not None:
                cells.setdefault(name, []).append(value)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    table = report(cells, plan, args)
    print(table, end="")
    os.makedirs(args.results, exist_ok=True)
    base = os.path.join(args.results, args.name or time.strftime("%Y-%m-%d"))
    with open(base + ".txt", "w") as out:
        out.write(table)
    with open(base + ".json", "w") as out:
        json.dump({"rounds": args.rounds, "realtime": args.realtime, "kernel": platform.release(), "cells": cells}, out, indent=1)
    print(f"kept as {base}.txt and .json")


if __name__ == "__main__":
    main()
