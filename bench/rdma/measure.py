#!/usr/bin/env python3
"""Collectives over RDMA beside what the same path gives to others: two network namespaces, a pair of interfaces between them, and the software card on each.

Every round runs every measurement once, in an order that changes, so that what drifts on the machine hits all alike. All latencies are averages and one
way (an all-reduce between two ranks is one exchange), all rates payload; a cell is the median over the rounds. run.sh builds what is needed."""
import argparse
import atexit
import concurrent.futures
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time

TIMEOUT_S = 120
A, B = "10.95.0.1", "10.95.0.2"
SPACES = (f"tprdma{os.getpid()}a", f"tprdma{os.getpid()}b")


def ip(line):
    subprocess.run(["ip"] + line.split(), check=True)


def make_spaces():
    atexit.register(lambda: [subprocess.run(["ip", "netns", "del", s], stderr=subprocess.DEVNULL) for s in SPACES])
    for space in SPACES:
        ip(f"netns add {space}")
        ip(f"-n {space} link set lo up")
    ip(f"link add v0 netns {SPACES[0]} type veth peer name v0 netns {SPACES[1]}")
    for space, address in zip(SPACES, (A, B)):
        ip(f"-n {space} addr add {address}/24 dev v0")
        ip(f"-n {space} link set v0 up")
    for space in SPACES:
        while "state UP" not in subprocess.run(["ip", "-n", space, "link", "show", "v0"], capture_output=True, text=True).stdout:
            time.sleep(0.05)


class Bench:
    def __init__(self, telpher, card, real_time):
        self.telpher, self.card = telpher, card
        self.prefix = ["chrt", "-r", "1"] if real_time else []
        self.port = 21000 + os.getpid() % 500 * 20

    def environment(self, more):
        return dict(os.environ, TELPHER_VERBS_HIDE_REAL="1", TELPHER_VERBS_DEVICES="1", TELPHER_VERBS_IFNAME="v0", NCCL_DEBUG="WARN", **more)

    def next_port(self):
        self.port += 1
        return self.port

    def finish(self, processes):
        """The outputs; None where one failed or wasn't done in time."""
        outputs, good = [], True
        end = time.monotonic() + TIMEOUT_S
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=max(end - time.monotonic(), 1))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append(process.communicate()[0] + "\n(not done in time)")
            good &= process.returncode == 0
        if not good:
            sys.stderr.write(f"{' '.join(processes[-1].args)}: failed\n{outputs[-1][-400:]}\n")
        return outputs if good else None

    def start(self, side, command, env):
        return subprocess.Popen(self.prefix + ["ip", "netns", "exec", SPACES[side]] + command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def pair(self, command, env, port, side=0):
        """A program whose client is given the address of the server, which runs on that side: the client's output."""
        server = self.start(side, command, env)
        want = f":{port:04X} "
        for _ in range(200):
            tables = subprocess.run(["ip", "netns", "exec", SPACES[side], "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True).stdout
            if server.poll() is not None or any(want in line and " 0A " in line for line in tables.splitlines()):
                break
            time.sleep(0.02)
        outputs = self.finish([self.start(1 - side, command + [(A, B)[side]], env), server])
        return outputs[0] if outputs else None

    def perftest(self, program, arguments, column):
        port = self.next_port()
        out = self.pair([program, "-d", "telpher0", "-x", "0", "-F", "-p", str(port), "--report_gbits"] + arguments, self.environment({"LD_LIBRARY_PATH": self.card}), port)
        rows = re.findall(r"^ *\d+ +\d+ +[\d.].*$", out or "", re.M)
        return float(rows[-1].split()[column]) if rows else None

    def ucx(self, devices, transports, test, size, count, column, side=0):
        port = self.next_port()
        command = [self.telpher, "verbs", "run", "--hide-real", "--", "ucx_perftest", "-t", test, "-s", str(size), "-n", str(count), "-p", str(port)]
        out = self.pair(command, self.environment({"UCX_TLS": transports, "UCX_NET_DEVICES": devices, "UCX_WARN_UNUSED_ENV_VARS": "n"}), port, side)
        rows = re.findall(r"^Final:.*$", out or "", re.M)
        return float(rows[-1].split()[column]) if rows else None

    def ucx_both_ways(self, *what):
        """Two programs at once, one a direction: what they move in sum."""
        with concurrent.futures.ThreadPoolExecutor() as threads:
            rates = [t.result() for t in [threads.submit(self.ucx, *what, side=side) for side in range(2)]]
        return None if None in rates else sum(rates)

    def fabric(self, provider, size, count, column):
        port = self.next_port()
        command = [self.telpher, "verbs", "run", "--hide-real", "--", "fi_pingpong", "-p", provider, "-e", "msg", "-S", str(size), "-I", str(count), "-B", str(port), "-P", str(port)]
        out = self.pair(command, self.environment({}), port)
        rows = re.findall(r"^\d+[kmg]? +\d\S* +=.*$", out or "", re.M)
        return float(rows[-1].split()[column]) if rows else None

    def collective(self, name, size, count, more, options=()):
        """Microseconds a call, of the slower rank."""
        port = self.next_port()
        ranks = []
        for rank in range(2):
            env = self.environment(dict(more, TELPHER_RANK=str(rank), TELPHER_NRANKS="2", TELPHER_LOCAL_RANK="0", TELPHER_LOCAL_NRANKS="1",
                                        TELPHER_JOB_SECRET="two ranks of a benchmark", NCCL_COMM_ID=f"{A}:{port}"))
            command = [self.telpher, "perf", name, "-b", str(size), "-e", str(size), "-n", str(count), "-w", "2", "-a", "3"] + list(options)
            ranks.append(self.start(rank, command, env))
        outputs = self.finish(ranks)
        rows = re.findall(rf"^ +{size} .*$", outputs[0] if outputs else "", re.M)
        return float(rows[-1].split()[5]) if rows else None


def measurements(bench):
    found = []

    def add(name, unit, what):
        found.append((name, unit, what))

    rdma, socket = {"NCCL_IB_HCA": "telpher", "NCCL_NET": "IB"}, {"NCCL_NET": "Socket"}
    card, verbs = "telpher0:1", "rc_verbs,ud_verbs,self"
    add("ib_write_bw -b, 64 KB: sum", "GB/s", lambda: over(bench.perftest("ib_write_bw", ["-b", "-s", "65536", "-n", "20000"], 3), 8))
    add("ib_write_lat, 8 B", "us", lambda: bench.perftest("ib_write_lat", ["-s", "8", "-n", "5000"], 5))
    add("ib_write_lat, 8 B: typical", "us", lambda: bench.perftest("ib_write_lat", ["-s", "8", "-n", "5000"], 4))
    for label, env in (("IB", rdma), ("Socket", socket)):
        add(f"all-reduce 8 B, {label}", "us", lambda e=env: bench.collective("all_reduce", 8, 2000, e))
        add(f"all-reduce 64 KB, {label}", "us", lambda e=env: bench.collective("all_reduce", 1 << 16, 500, e))
        add(f"all-reduce 64 MB, {label}", "GB/s", lambda e=env: rate(64 << 20, bench.collective("all_reduce", 64 << 20, 10, e)))
        add(f"send-receive 1 MB, {label}: sum of both ways", "GB/s", lambda e=env: over(rate(1 << 20, bench.collective("sendrecv", 1 << 20, 200, e)), 0.5))
        add(f"broadcast 1 MB, {label}: one way", "GB/s", lambda e=env: rate(1 << 20, bench.collective("broadcast", 1 << 20, 200, e)))
    add("all-reduce 64 MB, IB, registered and lent", "GB/s",
        lambda: rate(64 << 20, bench.collective("all_reduce", 64 << 20, 10, rdma, ["-R", "1"])))
    for label, devices, transports in (("rc_verbs", card, verbs), ("tcp", "v0", "tcp,self")):
        add(f"UCX {label}: tag 8 B", "us", lambda d=devices, t=transports: bench.ucx(d, t, "tag_lat", 8, 5000, 4))
        add(f"UCX {label}: tag 1 MB, one way", "GB/s", lambda d=devices, t=transports: over(bench.ucx(d, t, "tag_bw", 1 << 20, 500, 6), 1000 / 1.048576))
        add(f"UCX {label}: tag 1 MB, sum of both ways", "GB/s",
            lambda d=devices, t=transports: over(bench.ucx_both_ways(d, t, "tag_bw", 1 << 20, 500, 6), 1000 / 1.048576))
    for provider in ("verbs", "tcp"):
        add(f"libfabric {provider}: pingpong 8 B", "us", lambda p=provider: bench.fabric(p, 8, 1000, 6))
        add(f"libfabric {provider}: pingpong 1 MB", "GB/s", lambda p=provider: over(bench.fabric(p, 1 << 20, 50, 5), 1000))
    return found


def over(value, by):
    return value / by if value is not None else None


def rate(size, us):
    return size / us / 1000 if us else None


def middle(values):
    good = [v for v in values if v is not None]
    return statistics.median(good) if good else None


def report(results, args):
    lines = [f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}, {args.rounds} rounds, load {' '.join('%.0f' % x for x in os.getloadavg())}"
             + (", all at real-time priority" if args.real_time else ""), ""]
    lines.append(f"{'':48}{'median':>10}        least      most")
    for name, (unit, values) in results.items():
        good = [v for v in values if v is not None]
        lines.append(f"{name:48}" + (f"{statistics.median(good):10.2f} {unit:5}{min(good):9.2f} {max(good):9.2f}" if good else f"{'-':>10}"))
    value = {name: middle(values) for name, (_, values) in results.items()}
    lines.append("")

    def compare(text, ours, theirs, aim, good):
        if ours is None or theirs is None:
            return
        # A program that never yields and one that does share a processor with their threads in other ways at that priority than at the usual one.
        verdict = "for the usual priority" if args.real_time else "reached" if good(ours / theirs) else "missed"
        lines.append(f"{text}: {ours / theirs:.2f} ({aim}: {verdict})")
    bandwidth, latency = value["ib_write_bw -b, 64 KB: sum"], value["ib_write_lat, 8 B"]
    compare("all-reduce of 64 MB over half of ib_write_bw -b", value["all-reduce 64 MB, IB"], over(bandwidth, 2), "aim: 0.75", lambda r: r >= 0.75)
    compare("all-reduce of 8 B over ib_write_lat", value["all-reduce 8 B, IB"], latency, "aim: at most 3", lambda r: r <= 3)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--telpher", required=True, help="the command")
    parser.add_argument("--card", required=True, help="the folder of the software card's libraries")
    parser.add_argument("--results", required=True, help="where the table and its JSON are kept")
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"), help="of these files (the date)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measurements whose name has this in it")
    parser.add_argument("--real-time", action="store_true", help="all programs at real-time priority (SCHED_RR), so that what else runs takes no processor from them")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))      # the namespaces go then too
    make_spaces()
    wanted = [m for m in measurements(Bench(args.telpher, args.card, args.real_time)) if args.only in m[0]]
    results = {name: (unit, []) for name, unit, _ in measurements(Bench(args.telpher, args.card, args.real_time))}
    for at in range(args.rounds):
        random.shuffle(wanted)
        for name, _, what in wanted:
            results[name][1].append(what())
            sys.stderr.write(f"\rround {at + 1} of {args.rounds}: {name:44}")
    sys.stderr.write("\r" + " " * 70 + "\r")
    text = report(results, args)
    print(text, end="")
    if args.only:
        return
    os.makedirs(args.results, exist_ok=True)
    with open(os.path.join(args.results, args.name + ".txt"), "w") as out:
        out.write(text)
    with open(os.path.join(args.results, args.name + ".json"), "w") as out:
        json.dump({name: {"unit": unit, "values": values} for name, (unit, values) in results.items()}, out, indent=1)


main()
