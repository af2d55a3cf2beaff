#!/usr/bin/env python3
"""Runs the measured loop of every implementation side by side and prints who is faster.

All implementations are started once per number of ranks and then take turns: for each collective and size, in each round,
every one of them in an order that changes from round to round. Those not on turn sleep in a read. So whatever drifts on
the machine hits all alike. A cell's time is the median over all batches of all rounds; a batch's time is that of its
slowest rank. run.sh builds the programs and starts this."""
import argparse
import json
import math
import os
import platform
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
BLOCKS = {"all_gather", "reduce_scatter", "all_to_all"}
OURS = "telpher"
BATCHES = 5
MOST_CALLS = 20000
REALTIME_PRIORITY = 50


class Broken(Exception):
    """An implementation died, hung or gave a wrong result."""


def raise_priority(pid):
    """All threads of a rank, after it has joined; those that it starts later inherit it. Round robin, as an implementation
    that spins without yielding would never let another of its ranks onto the processor otherwise."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))
        except ProcessLookupError:
            pass


def may_be_realtime():
    """This process itself goes one above the ranks: it sleeps while they work, and can end one that hangs."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(REALTIME_PRIORITY + 1))
        return True
    except (OSError, AttributeError):
        return False


class Group:
    """The ranks of one implementation."""

    def __init__(self, name, program, ranks, bind, timeout_s, env, realtime=False):
        self.name, self.timeout_s = name, timeout_s
        self.dir = tempfile.mkdtemp(prefix="peers-")
        self.log = open(os.path.join(self.dir, "log"), "w+")
        path = os.path.join(self.dir, "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(ranks)
        arguments = [program, path, self.dir, "1" if bind else "0"]
        if name == "openmpi":
            commands = [["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] + arguments]
        elif name == "mpich":
            commands = [["mpirun.mpich", "-n", str(ranks)] + arguments]
        else:
            commands = [arguments + [str(r), str(ranks)] for r in range(ranks)]
        self.started = [subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, env=env)
                        for c in commands]
        self.ranks, self.sockets = [None] * ranks, [None] * ranks
        deadline = time.monotonic() + timeout_s
        for _ in range(ranks):
            while not select.select([self.listener], [], [], 0.2)[0]:
                if all(p.poll() is not None for p in self.started) or any(p.poll() not in (None, 0) for p in self.started) or time.monotonic() > deadline:
                    reason = "didn't start: " + self.tail()
                    self.stop()
                    raise Broken(reason)
            accepted = self.listener.accept()[0]
            stream = accepted.makefile("rw")
            rank = int(stream.readline().split()[1])
            self.ranks[rank], self.sockets[rank] = stream, accepted
            if realtime:
                raise_priority(struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def tail(self):
        self.log.flush()
        with open(self.log.name) as f:
            return " | ".join(f.read().strip().splitlines()[-3:]) or "it said nothing"

    def run(self, collective, count, calls, batches, check):
        """Microseconds a call of each batch, the slowest rank's."""
        for stream in self.ranks:
            stream.write(f"run {COLLECTIVES.index(collective)} {count} {calls} {batches} {int(check)}\n")
            stream.flush()
        answers = []
        deadline = time.monotonic() + self.timeout_s
        for rank, stream in enumerate(self.ranks):
            if not select.select([self.sockets[rank]], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Broken(f"rank {rank} hangs in {collective} of {count} elements (over {self.timeout_s} s)")
            line = stream.readline().strip()
            if not line or line[0] in "wf":
                raise Broken(f"rank {rank}, {collective} of {count} elements: {line or 'died'}: {self.tail()}")
            answers.append([float(x) for x in line.split()])
        return [max(times) for times in zip(*answers)]

    def stop(self):
        for stream in self.ranks:
            try:
                if stream:
                    stream.write("stop\n")
                    stream.flush()
            except OSError:
                pass
        deadline = time.monotonic() + 5
        for process in self.started:
            try:
                process.wait(max(0.1, deadline - time.monotonic()) if all(self.ranks) else 0.1)
            except subprocess.TimeoutExpired:
                process.terminate()     # a launcher takes its ranks with it
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.listener.close()
        self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def calls_for(group, collective, count, budget_us):
    """How many calls a batch takes: a first call, checked, then a short look at the pace."""
    pace = group.run(collective, count, 1, 1, True)[0]
    if pace < 5000:
        pace = group.run(collective, count, max(1, min(1000, int(5000 / max(pace, 0.1)))), 1, False)[0]
    return max(1, min(MOST_CALLS, int(budget_us / BATCHES / max(pace, 0.01))))


def measure(groups, broken, collective, count, rounds, budget_us):
    """name -> list of times. Who breaks is stopped and noted, and the rest go on."""
    times = {name: [] for name in groups}
    calls = {}
    for round_ in range(rounds):
        names = list(groups)
        if not names:
            break
        names = names[round_ % len(names):] + names[:round_ % len(names)]
        for name in names:
            try:
                if name not in calls:
                    calls[name] = calls_for(groups[name], collective, count, budget_us)
                # a call that takes longer than a whole turn is not repeated for its own sake
                batches = BATCHES if calls[name] > 1 else 2
                times[name] += groups[name].run(collective, count, calls[name], batches, False)
            except (Broken, OSError, ValueError) as e:
                broken.append(f"{name}: {e}")
                print(f"! {name}: {e}", file=sys.stderr, flush=True)
                groups.pop(name).stop()
                times.pop(name)
    return {name: t for name, t in times.items() if t}


def processor():
    with open("/proc/cpuinfo") as f:
        names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    return names[0] if names else platform.machine()


def short(size):
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def parse_size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def block_of(size, ranks, collective):
    """count of floats a block, bytes of a block."""
    count = max(1, size // 4 // (ranks if collective in BLOCKS else 1))
    return count, count * 4


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def print_table(ranks, collective, names, rows):
    print(f"\n{collective}, {ranks} ranks, float{', sum' if 'reduce' in collective else ''}; us a call")
    print(f"{'size':>8} {'a block':>8} " + " ".join(f"{n:>12}" for n in names) + f" {'best peer':>10} {'ratio':>7}")
    for row in rows:
        cells = " ".join(f"{row['us'][n]:12.2f}" if n in row["us"] else f"{'-':>12}" for n in names)
        ratio = f"{row['ratio']:7.2f}" if row["ratio"] else f"{'-':>7}"
        print(f"{short(row['bytes']):>8} {short(row['block_bytes']):>8} {cells} {row['best_peer'] or '-':>10} {ratio}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, short turns: does it work?")
    parser.add_argument("--sizes", default="8,64,512,4K,32K,256K,2M,16M,128M,256M",
                        help="bytes of the larger buffer of a rank (8 B over 4 ranks: at least one float a block)")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--only", default="", help="implementations, for instance openmpi,telpher")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-ms", type=int, default=150, help="time of a turn")
    parser.add_argument("--timeout-s", type=int, default=120, help="a turn that takes longer is given up")
    parser.add_argument("--no-bind", action="store_true", help="never bind ranks to processors")
    parser.add_argument("--realtime", action="store_true",
                        help="give the ranks of all implementations real-time priority where permitted: for a busy machine")
    parser.add_argument("--programs", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json", default="", help="the results' file")
    args = parser.parse_args()
    if args.quick:
        args.sizes = args.sizes if "--sizes" in " ".join(sys.argv) else "8,4K,256K,2M"
        args.rounds, args.turn_ms = 2, 40
    sizes = [parse_size(s) for s in args.sizes.split(",")]
    collectives = args.collectives.split(",")
    unknown = [c for c in collectives if c not in COLLECTIVES]
    if unknown:
        parser.error(f"no collective {unknown[0]!r}; there are {', '.join(COLLECTIVES)}")
    names = [n for n in ("openmpi", "mpich", "gloo", OURS)
             if os.path.exists(os.path.join(args.programs, "loop_" + n)) and (not args.only or n in args.only.split(","))]
    if not names:
        parser.error("no implementation to measure")
    cpus = len(os.sched_getaffinity(0))
    realtime = args.realtime and may_be_realtime()
    env = dict(os.environ, OMPI_MCA_btl_base_warn_component_unused="0")
    results, broken = [], []
    machine, date = f"{cpus} x {processor()}, Linux {platform.release()}", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    print(f"{date}; {machine}; {args.rounds} rounds of {args.turn_ms} ms turns, {BATCHES} batches a turn; "
          "ratio: best peer's time / ours, above 1 ours is faster", flush=True)
    if args.realtime:
        print("all ranks at real-time priority (round robin)" if realtime else "real-time priority isn't permitted: ordinary priority", flush=True)
    for ranks in (int(r) for r in args.ranks.split(",")):
        groups = {}
        bind = ranks <= cpus and not args.no_bind
        print(f"\n{ranks} ranks: " + ("each bound to its own processor" if bind else "not bound"), flush=True)
        try:
            for name in names:
                try:
                    groups[name] = Group(name, os.path.join(args.programs, "loop_" + name), ranks, bind, args.timeout_s, env, realtime)
                except Broken as e:
                    broken.append(f"{name}, {ranks} ranks: {e}")
                    print(f"! {name}: {e}", file=sys.stderr, flush=True)
            for collective in collectives:
                rows = []
                for size in sizes:
                    count, block = block_of(size, ranks, collective)
                    times = measure(groups, broken, collective, count, args.rounds, args.turn_ms * 1000)
                    us = {name: statistics.median(t) for name, t in times.items()}
                    peers = {name: t for name, t in us.items() if name != OURS}
                    best = min(peers, key=peers.get) if peers else None
                    rows.append({"ranks": ranks, "collective": collective, "bytes": size, "block_bytes": block, "us": us,
                                 "batches_us": times, "best_peer": best,
                                 "ratio": peers[best] / us[OURS] if best and OURS in us else None})
                print_table(ranks, collective, names, rows)
                results += rows
        finally:
            for group in groups.values():
                group.stop()
    summary = {}
    compared = [r for r in results if r["ratio"]]
    if compared:
        print("\ngeometric mean of best peer / ours")
        for key in sorted({(r["ranks"], r["collective"]) for r in compared}):
            ratios = [r["ratio"] for r in compared if (r["ranks"], r["collective"]) == key]
            summary[f"{key[1]}, {key[0]} ranks"] = geometric_mean(ratios)
            print(f"{key[1]:>16}, {key[0]} ranks: {geometric_mean(ratios):5.2f}")
        summary["all"] = geometric_mean([r["ratio"] for r in compared])
        print(f"{'all':>16}: {summary['all']:14.2f}")
        for r in compared:
            if r["ratio"] < 0.9:
                print(f"under 0.9: {r['collective']}, {r['ranks']} ranks, {short(r['bytes'])}: {r['ratio']:.2f} of {r['best_peer']}")
    for line in broken:
        print(f"broken: {line}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"date": date, "machine": machine, "processors": cpus, "realtime": realtime, "rounds": args.rounds, "turn_ms": args.turn_ms,
                       "geometric_means": summary, "results": results, "broken": broken}, f, indent=1)
        print(f"\nwritten: {args.json}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
