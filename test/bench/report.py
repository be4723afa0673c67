"""Tables of the samples of test/bench/run."""
import datetime, os, platform, re, statistics, subprocess

from ends import PEERS, ROOT

JOBS = {  # name: rw, block size, depth
    "4k random read, depth 1": ("randread", "4k", 1),
    "4k random read, depth 32": ("randread", "4k", 32),
    "4k random write, depth 1": ("randwrite", "4k", 1),
    "4k random write, depth 32": ("randwrite", "4k", 32),
    "128k sequential read, depth 8": ("read", "128k", 8),
    "128k sequential write, depth 8": ("write", "128k", 8),
    "1M sequential read, depth 8": ("read", "1m", 8),
    "1M sequential write, depth 8": ("write", "1m", 8),
}
D1, R32, W32 = "4k random read, depth 1", "4k random read, depth 32", "4k random write, depth 32"
LARGE = [j for j in JOBS if not j.startswith("4k")]
LABEL = {"rdblk": "**rdblk**", "nbdkit-1": "nbdkit", "qemu-1": "qemu-nbd", "nbdserver-1": "nbd-server", "nbdkit-tcp": "nbdkit, TCP",
         "qemu-tcp": "qemu-nbd, TCP", "nbdserver-tcp": "nbd-server, TCP", "nbdkit-2": "nbdkit → nbdkit", "qemu-2": "qemu-nbd → nbdkit",
         "relay": "byte relay → nbdkit"}

med = statistics.median


def version(argv, pat=r"[\d.]+\d"):
    try:
        p = subprocess.run(argv, capture_output=True, text=True)
        return re.search(pat, p.stdout + p.stderr).group(0)
    except (OSError, AttributeError):
        return "?"


def method(o):
    """what the samples were taken with"""
    return {
        "date": str(datetime.date.today()), "cpus": os.cpu_count(), "kernel": platform.release(),
        "model": version(["grep", "-m1", "model name", "/proc/cpuinfo"], r"(?<=: ).*"),
        "versions": "%s; nbdkit %s, qemu-nbd %s, nbd-server %s, socat %s; fio %s" % (
            version([ROOT + "/bin/rdtarget", "version"], r".*"), version(["nbdkit", "--version"]), version(["qemu-nbd", "--version"]),
            version(["nbd-server", "-V"]), version(["socat", "-V"], r"(?<=version )[\d.]+\d"), version(["fio", "--version"])),
        "size": o.size, "dir": o.dir, "disk_dir": o.disk_dir, "secs": o.secs, "rounds": o.rounds, "queues": o.queues, "parts": o.parts,
        "tcp": o.tcp,
    }


def num(x):
    return "%.0f" % x if x >= 100 else "%.3g" % x


def spread(v):
    """half the distance between the extremes, in percent of the median; nothing of one sample"""
    return " ± %.0f %%" % ((max(v) - min(v)) / med(v) * 50) if len(v) > 1 and med(v) else ""


def table(head, rows):
    return "| " + " | ".join(head) + " |\n|---|" + "--:|" * (len(head) - 1) + "\n" + "".join("| " + " | ".join(r) + " |\n" for r in rows)


class Samples:
    def __init__(self, recs, part):
        self.by = {}
        for s in recs:
            if s["part"] == part:
                self.by.setdefault((s["peer"], s["job"]), {})[s["round"]] = s
        self.peers = [p for p in PEERS if any(k[0] == p for k in self.by)]
        self.jobs = [j for j in JOBS if any(k[1] == j for k in self.by)]

    def get(self, peer, job, key):
        """by round"""
        v = self.by.get((peer, job), {})
        if key in ("cpu", "client"):  # seconds per 100 000 operations, per GiB; samples of an older tool have no client
            a, b = ("ios", 1e5) if job.startswith("4k") else ("bytes", 2**30)
            return {r: s[key] / s[a] * b for r, s in v.items() if s[a] and key in s}
        if key == "rate":
            return {r: s["iops"] / 1e3 if job.startswith("4k") else s["mib"] for r, s in v.items()}
        return {r: s[key] for r, s in v.items()}

    def ratio(self, job, peer, key="rate"):
        """rdblk over peer: median of the ratios of samples of one round"""
        a, b = self.get("rdblk", job, key), self.get(peer, job, key)
        v = [a[r] / b[r] for r in a if b.get(r)]
        return med(v) if v else None

    def worst(self, job, peers):
        """the ratio to the best of peers, and which that is"""
        v = [(self.ratio(job, p), p) for p in peers]
        return min((x for x in v if x[0] is not None), default=(None, ""))


def matrix(s, title, key, jobs, ratios):
    rows = []
    for p in s.peers:
        row = [LABEL[p]]
        for j in jobs:
            v = list(s.get(p, j, key).values())
            if not v:
                row.append("")
                continue
            cell = num(med(v)) + spread(v)
            if ratios and p != "rdblk":
                cell += " (%.2f)" % s.ratio(j, p, key)
            row.append(cell)
        rows.append(row)
    return "%s\n\n%s\n" % (title, table(["endpoint"] + jobs, rows)) if jobs else ""


def matrices(s):
    small, large = [j for j in s.jobs if j.startswith("4k")], [j for j in s.jobs if not j.startswith("4k")]
    out = "In brackets: rdblk's ratio to it, above 1 when rdblk is faster.\n\n"
    out += matrix(s, "Thousand operations a second:", "rate", small, True)
    out += matrix(s, "MiB/s:", "rate", large, True)
    out += "CPU seconds of the serving processes, all hops together. In brackets: rdblk's ratio to it, below 1 when rdblk takes less.\n\n"
    out += matrix(s, "Per 100 000 operations:", "cpu", small, True)
    out += matrix(s, "Per GiB:", "cpu", large, True)
    return out


def goals(s, idle):
    """what the project wants to reach beside what it reaches"""
    ends2, ends1 = ["nbdkit-2", "qemu-2"], [p for p in PEERS if PEERS[p][1] == 1]
    tcp = [p for p in ends1 if PEERS[p][2] == "tcp"]
    rows = []

    def speed(jobs, against, peers, least):
        for j in jobs:
            x, p = s.worst(j, peers)
            if x is not None:
                rows.append([j, "%s: %s" % (against, LABEL[p]), "≥ %.1f" % least, "%.2f" % x, "yes" if round(x, 2) >= least else "**no**"])

    def cost(job, key, what, against, peer, most):
        x = s.ratio(job, peer, key)
        if x is not None:
            rows.append([what, against, "≤ %.1f" % most, "%.2f" % x, "yes" if round(x, 2) <= most else "**no**"])

    speed([R32, W32], "best with two hops", ends2, 3)
    speed([R32, W32], "best with one hop", ends1, 1)
    cost(D1, "mean", D1 + ", mean latency", LABEL["relay"], "relay", 1)
    speed(LARGE, "best with two hops", ends2, 1.5)
    speed(LARGE, "best with one hop over TCP", tcp, 1)
    cost(R32, "cpu", R32 + ", CPU of both programs", LABEL["nbdkit-1"] + ", one hop", "nbdkit-1", 1)
    if idle:
        rows.append(["idle, %d devices attached, CPU of all processes" % idle["devices"], "one core", "< 1 %", "%.2f %%" % (idle["cores"] * 100),
                     "yes" if idle["cores"] < 0.01 else "**no**"])
        rows.append(["idle, wake-ups a second and session", "", "< 20", "%.1f" % idle["wakeups"], "yes" if idle["wakeups"] < 20 else "**no**"])
    return table(["job", "against", "goal", "reached", ""], rows)


def budget(s, cpus):
    """what the processors leave for both programs at the rates that are wanted"""
    ends2, ends1 = ["nbdkit-2", "qemu-2"], [p for p in PEERS if PEERS[p][1] == 1]
    tcp = [p for p in ends1 if PEERS[p][2] == "tcp"]
    rows = []
    for jobs, peers, least in (([R32, W32], ends2, 3), ([R32, W32], ends1, 1), (LARGE, ends2, 1.5), (LARGE, tcp, 1)):
        for j in jobs:
            x, p = s.worst(j, peers)
            client = list(s.get("rdblk", j, "client").values())
            if x is None or round(x, 2) >= least or not client:
                continue
            small = j.startswith("4k")
            rate = least * med(s.get(p, j, "rate").values())
            unit, k = ("µs", 10) if small else ("s", 1)  # an operation, or a GiB
            all_ = cpus / rate * 1e3 if small else cpus / rate * 1024
            c, have = med(client) * k, med(s.get("rdblk", j, "cpu").values()) * k
            rows.append([j, "%.1f × %s" % (least, LABEL[p]), ("%s 000 op/s" if small else "%s MiB/s") % num(rate)]
                        + ["%.2f %s" % (y, unit) for y in (all_, c, all_ - c, have)])
    return table(["job", "wanted", "that is", "all processors", "fio takes", "leaves", "rdblk takes"], rows) if rows else ""


def handoffs(v):
    """what it cost one processor to write where the other had read"""
    if not v:
        return ""
    small, large = [r["small"] for r in v], [r["large"] for r in v]
    bound = sorted(small)[len(small) * 9 // 10] / 2  # the best of all may be an outlier
    slow = sum(x < bound for x in small)
    return """- From one processor to the other (`test/bench/handoff`, before each job of a round): one copies 64 KiB at a time to where the
  other has just read at %.1f to %.1f GB/s (median %.1f), where that is long ago at %.1f to %.1f (%.1f). In %d of %d cases the first
  was below %.1f, half of the ninth decile: a host that moves the processors of a virtual machine apart makes all that passes data on slower.
""" % (min(small), max(small), med(small), min(large), max(large), med(large), slow, len(v), bound)


def host(head, recs):
    """the section of measurements on one machine"""
    rounds = head["rounds"]
    foreign = [s["foreign"] for s in recs if "foreign" in s]
    irq = [s["irq"] for s in recs if "irq" in s]
    steal = [s["steal"] for s in recs if "steal" in s]
    out = """### Method

- Machine: %d cores (%s), Linux %s. Everything on this machine: clients, both programs, peers.
- Date %s; %s.
- Back end: a file of %d MiB on %s, buffered. Provider: iwarp, the software RDMA NIC, over TCP loopback; %d queue(s).
- Driver: fio's `nbd` engine, one connection; %g s a sample, %d round(s), interleaved: each round runs each job on
  all endpoints, in rotating order. A ratio is the median of the ratios of samples of one round.
- CPU is user and system time of the serving processes, all hops together, without fio's.
- TCP: congestion control %s for peers, rdblk's own choice for its connections (`congestion_control`: reno inside one machine).
- Others on the machine took at most %.2f cores in the median sample and %.2f in the worst (kernel threads included, and
  interrupts, %.2f; a hypervisor's share %.2f).%s%s
""" % (head["cpus"], head["model"], head["kernel"], head["date"], head["versions"], head["size"], head["dir"], head["queues"],
       head["secs"], rounds, head.get("tcp", "?"), med(foreign or [0]), max(foreign or [0]), med(irq or [0]), med(steal or [0]),
       " **The machine was not quiet: ratios count, figures do not.**" if foreign and med(foreign) > 0.1 else "",
       "\n- ± is half the distance between the lowest and the highest sample, in percent of the median." if rounds > 1 else "")
    out += handoffs([r for r in recs if r["part"] == "handoff"])
    s = Samples(recs, "peers")
    idle = next((r for r in recs if r["part"] == "idle"), None)
    if s.peers:
        out += "\nEndpoints (client → server):\n\n" + "".join("- %s: %s\n" % (LABEL[p], PEERS[p][0]) for p in s.peers)
    if s.peers or idle:
        out += "\n### Goals\n\nThe best is that with the smallest ratio. The byte relay, which knows nothing of NBD, is no peer with two hops but a floor.\n\n"
        out += goals(s, idle)
    if s.peers:
        b = budget(s, head["cpus"])
        if b:
            out += """
What is missed, in processor time of an operation (4k) or a GiB: what %d processors have at the rate that is wanted, what of that
fio takes when rdblk serves it, what is left for both programs, and what they take (medians).

%s""" % (head["cpus"], b)
    if s.peers:
        out += "\n### File in memory\n\n" + matrices(s)
        rows = []
        for p in s.peers:
            v = [(s.get(p, j, "mean").values(), s.get(p, j, "p99").values()) for j in s.jobs]
            rows.append([LABEL[p]] + ["%s / %s" % (num(med(a)), num(med(b))) if a else "" for a, b in v])
        out += "Latency, mean / 99th percentile, µs:\n\n" + table(["endpoint"] + s.jobs, rows)
    d = Samples(recs, "disk")
    if d.peers:
        out += "\n### File on disk, in the page cache\n\nA file in %s; %d round(s).\n\n" % (head["disk_dir"], rounds) + matrices(d)
    w = {j: [s for s in recs if s["part"] == "wire" and s["job"] == j] for j in JOBS}
    if any(w.values()):
        rows = [[j, num(med([x["iops"] / 1e3 for x in v])) + spread([x["iops"] for x in v]), num(med([x["mib"] for x in v])),
                 num(med([x["mean"] for x in v])), num(med([x["p99"] for x in v])), num(med([x["cpu"] / x["ios"] * 1e6 for x in v]))]
                for j, v in w.items() if v]
        out += "\n### The wire alone\n\n`rdinit bench`: the same jobs without the NBD hop, one queue. CPU is `rdtarget`'s, per operation.\n\n"
        out += table(["job", "1000 op/s", "MiB/s", "mean µs", "p99 µs", "target CPU µs"], rows)
    scale = [r for r in recs if r["part"] == "scale"]
    if scale:
        out += "\n### How it grows\n\nrdblk alone; %d round(s).\n" % rounds

        def growth(title, what, cols):
            nonlocal out
            ns = sorted({r["n"] for r in scale if r["job"] == what})
            rows = []
            for n in ns:
                v = [[f(r) for r in scale if r["job"] == what and r["n"] == n] for _, f in cols]
                rows.append([str(n)] + [num(med(x)) + spread(x) for x in v])
            if rows:
                out += "\n%s\n\n" % title + table([what.split()[0]] + [c for c, _ in cols], rows)

        kiops, mib, mean = ("1000 op/s", lambda r: r["iops"] / 1e3), ("MiB/s", lambda r: r["mib"]), ("mean µs", lambda r: r["mean"])
        p99, cost = ("p99 µs", lambda r: r["p99"]), ("CPU µs per op", lambda r: r["cpu"] / r["ios"] * 1e6)
        growth("4k random read by depth, one queue:", "depth", [kiops, mean, p99, cost])
        growth("4k random read by queues, a connection each, depth 32 altogether:", "queues 4k", [kiops, mean, p99, cost])
        growth("128k sequential read by queues, depth 8 altogether:", "queues 128k", [mib, mean, p99, cost])
        growth("128k sequential write by queues, depth 8 altogether:", "queues 128k write", [mib, mean, p99, cost])
        growth("4k random read by attached hosts, each its own `rdinit`, depth 64 altogether:", "hosts", [kiops, mean, p99, cost])
    m = next((r for r in recs if r["part"] == "memory"), None)
    if m:
        t = {int(k): v / 2**20 for k, v in m["target"].items()}
        most = max(t)
        out += "\nResident anonymous memory, MiB:\n\n" + table(["process", "idle", "after the load above"], [
            ["`rdtarget`, no host", num(t[0]), ""],
            ["`rdtarget`, %d hosts" % most, num(t[most]), num(t[-most])],
            ["each host there", "%.2f" % ((t[most] - t[0]) / most), "%.2f" % ((t[-most] - t[0]) / most)],
            ["`rdinit`, one device of one queue", num(m["rdinit_idle"] / 2**20), num(m["rdinit_used"] / 2**20)]])
    if idle:
        out += "\n### Idle\n\n%d devices attached, each its own `rdinit` with one queue, no I/O for %d s: all processes %.2f %% of one core (`rdtarget` %.2f %%); " \
            "%.1f wake-ups a second and session in both programs together, %.1f of them in `rdtarget`.\n" % (
                idle["devices"], idle["secs"], idle["cores"] * 100, idle["target_cores"] * 100, idle["wakeups"], idle["target_wakeups"])
    return out


def ratios(recs, path, base, job):
    """one way to another, round by round"""
    v, b = ({r["round"]: r["iops"] for r in recs if r["path"] == p and r["job"] == job} for p in (path, base))
    return [v[r] / b[r] for r in v if b.get(r)]


def vm(recs):
    """the section of test/vm/guest/bench.sh: samples with net, path, job, round, iops, mib, mean"""
    head = next((r for r in recs if "kernel" in r), {})
    recs = [r for r in recs if "path" in r]
    base = "kernel → kernel"
    out = "Date %s, Linux %s, %s. Medians of %d interleaved round(s); ratios are paired within rounds. Emulation: only the ratios mean anything.\n" % (
        head.get("date", "?"), head.get("kernel", "?"), head.get("machine", "?"), 1 + max(r["round"] for r in recs))
    for net in sorted({r["net"] for r in recs}):
        here = [r for r in recs if r["net"] == net]
        jobs, paths = list(dict.fromkeys(r["job"] for r in here)), sorted({r["path"] for r in here})
        rows = []
        for p in paths:
            row = [p]
            for j in jobs:
                v = {r["round"]: r["iops"] for r in here if r["path"] == p and r["job"] == j}
                x = ratios(here, p, base, j)
                row.append("%s%s (%s)" % (num(med(v.values())), spread(list(v.values())), "%.2f" % med(x) if x else "–") if v else "")
            rows.append(row)
        out += "\nOver %s, operations a second (ratio to %s):\n\n" % (net, base) + table(["host → target"] + jobs, rows)
        rows = [[p] + [num(med([r["cpu"] / r["ios"] * 1e5 for r in here if r["path"] == p and r["job"] == j and r["ios"]])) for j in jobs]
                for p in paths if p != base]
        out += "\nCPU seconds of our programs per 100 000 operations (the kernel's own threads are not counted):\n\n" + table(["host → target"] + jobs, rows)
        if net == "rxe":
            goal = {"kernel → rdtarget": 1.0, "rdinit → rdtarget": 0.7}
            rows = []
            for p, least in goal.items():
                for j in jobs:
                    x = ratios(here, p, base, j)
                    if x:
                        rows.append([p, j, "≥ %.1f" % least, "%.2f" % med(x), "%.2f to %.2f" % (min(x), max(x)), "yes" if round(med(x), 2) >= least else "**no**"])
            out += "\nGoals, ratios to %s:\n\n" % base + table(["host → target", "job", "goal", "reached", "rounds", ""], rows)
    return out
