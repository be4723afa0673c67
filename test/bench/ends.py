"""The things that are measured: rdblk and its peers as processes with an NBD URI."""
import ctypes, json, os, re, signal, socket, subprocess, sys, time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TICK = os.sysconf("SC_CLK_TCK")
PROCS = []
libc = ctypes.CDLL(None)

# name: what it is, hops, transport of the client
PEERS = {
    "rdblk": ("rdinit → software RDMA NIC over TCP → rdtarget", 2, "unix"),
    "nbdkit-1": ("nbdkit file", 1, "unix"),
    "qemu-1": ("qemu-nbd --aio=io_uring", 1, "unix"),
    "nbdserver-1": ("nbd-server", 1, "unix"),
    "nbdkit-tcp": ("nbdkit file, client over TCP", 1, "tcp"),
    "qemu-tcp": ("qemu-nbd --aio=io_uring, client over TCP", 1, "tcp"),
    "nbdserver-tcp": ("nbd-server, client over TCP", 1, "tcp"),
    "nbdkit-2": ("nbdkit nbd → TCP → nbdkit file", 2, "unix"),
    "qemu-2": ("qemu-nbd nbd:// → TCP → nbdkit file", 2, "unix"),
    "relay": ("socat, which only copies bytes → TCP → nbdkit file", 2, "unix"),
}
# qemu-nbd → qemu-nbd is not here: the far one is asked for extents before each read, which takes milliseconds
# on a tmpfs (some 200 reads a second), so nbdkit stands in its place.
# glibc gives freed buffers back to the system and faults them in again for each request
# of qemu-nbd; without that it is at its best.
QEMU_ENV = dict(os.environ, MALLOC_MMAP_THRESHOLD_="1073741824", MALLOC_TRIM_THRESHOLD_="2147483648", MALLOC_TOP_PAD_="67108864")


def die(msg):
    sys.exit("bench: " + msg)


def child():
    libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: nothing outlives this script


def start(argv, log, **kw):
    p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=open(log, "a"), preexec_fn=child, **kw)
    PROCS.append(p)
    return p


def stop(procs):
    for p in procs:
        if p.poll() is None:
            p.terminate()
    for p in procs:
        try:
            p.wait(12)
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()
        if p in PROCS:
            PROCS.remove(p)


def stop_all():
    stop(list(reversed(PROCS)))


def ready(argv, log):
    """starts one of our programs, returns it and its ready line"""
    p = start(argv, log, stdout=subprocess.PIPE, text=True)
    line = p.stdout.readline()
    if not line:
        die("%s did not start: %s" % (argv[0], open(log).read()[-500:]))
    return p, line


def wait_for(addr, p, log):
    """waits until something listens on a path or a port"""
    end = time.time() + 15
    while time.time() < end and p.poll() is None:
        try:
            with socket.socket(socket.AF_UNIX if isinstance(addr, str) else socket.AF_INET) as s:
                s.settimeout(1)
                s.connect(addr if isinstance(addr, str) else ("127.0.0.1", addr))
                return
        except OSError:
            time.sleep(0.02)
    die("nothing listens on %s: %s" % (addr, open(log).read()[-500:]))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class End:
    """an endpoint: its URI and the processes that serve it"""

    def __init__(self, name, uri, procs):
        self.name, self.uri, self.procs = name, uri, procs


class Target:
    """rdtarget, serving one file"""

    def __init__(self, run, file, *args):
        self.run, self.n = run, 0
        self.proc, line = ready([ROOT + "/bin/rdtarget", "serve", "--listen", "127.0.0.1:0", "--log-level", "warn",
                                 "--run-dir", run + "/ctl", *args, file], run + "/rdtarget.log")
        m = re.search(r"serving (\S+) on (\S+:\d+)", line) or die("ready line of rdtarget: " + line)
        self.nqn, self.addr = m.group(1), m.group(2)

    def attach(self, queues=1, *args):
        """one more rdinit: its process and its socket"""
        self.n += 1
        sock = "%s/rdinit-%d.sock" % (self.run, self.n)
        p, _ = ready([ROOT + "/bin/rdinit", "attach", self.addr, "--nqn", self.nqn, "--socket", sock, "--queues", str(queues),
                      "--log-level", "warn", "--run-dir", self.run + "/ctl", *args], self.run + "/rdinit.log")
        return p, sock


def unix_uri(sock, export=""):
    return "nbd+unix:///%s?socket=%s" % (export, sock)


def launch(name, run, ours, theirs, o):
    """starts an endpoint; peers share the file theirs"""
    log, sock, port = "%s/%s.log" % (run, name), "%s/%s.sock" % (run, name), free_port()
    uri = unix_uri(sock)
    qemu = ["qemu-nbd", "-t", "-e", "8", "--cache=writeback"]
    image = ["--aio=io_uring", "--image-opts", "driver=raw,file.driver=file,file.filename=%s,file.locking=off" % theirs]

    def up(addr, argv, **kw):
        p = start(argv, log, **kw)
        wait_for(addr, p, log)
        return p

    kind, how = name.split("-") if "-" in name else (name, "")
    if name == "rdblk":
        d = run + "/" + name
        os.makedirs(d, exist_ok=True)
        t = Target(d, ours)
        p, s = t.attach(o.queues)
        e = End(name, unix_uri(s), [t.proc, p])
        e.target = t
        return e
    if how == "1" and kind == "nbdkit":
        return End(name, uri, [up(sock, ["nbdkit", "-f", "-U", sock, "file", theirs])])
    if how == "tcp" and kind == "nbdkit":
        return End(name, "nbd://127.0.0.1:%d/" % port, [up(port, ["nbdkit", "-f", "-i", "127.0.0.1", "-p", str(port), "file", theirs])])
    if how == "1" and kind == "qemu":
        return End(name, uri, [up(sock, qemu + ["-k", sock] + image, env=QEMU_ENV)])
    if how == "tcp" and kind == "qemu":
        return End(name, "nbd://127.0.0.1:%d/" % port, [up(port, qemu + ["-b", "127.0.0.1", "-p", str(port)] + image, env=QEMU_ENV)])
    if kind == "nbdserver":
        conf = "%s/%s.conf" % (run, name)
        with open(conf, "w") as f:
            f.write("[generic]\nport = %d\nlistenaddr = 127.0.0.1\nunixsock = %s\nduallisten = true\n[x]\nexportname = %s\n" % (port, sock, theirs))
        # Only the daemon forks a process per client: -d serves one and ends.
        start(["nbd-server", "-C", conf, "-p", conf + ".pid"], log).wait()
        for _ in range(500):
            if os.path.exists(conf + ".pid") and open(conf + ".pid").read().strip():
                break
            time.sleep(0.02)
        p = Daemon(int(open(conf + ".pid").read()))
        PROCS.append(p)
        wait_for(port, p, log)
        return End(name, unix_uri(sock, "x") if how == "1" else "nbd://127.0.0.1:%d/x" % port, [p])
    if name in ("nbdkit-2", "relay"):
        far = up(port, ["nbdkit", "-f", "-i", "127.0.0.1", "-p", str(port), "file", theirs])
        near = ["nbdkit", "-f", "-U", sock, "nbd", "uri=nbd://127.0.0.1:%d/" % port] if name == "nbdkit-2" else \
            ["socat", "-b", "1048576", "UNIX-LISTEN:%s,fork" % sock, "TCP:127.0.0.1:%d,nodelay" % port]
        return End(name, uri, [up(sock, near), far])
    if name == "qemu-2":
        # qemu-nbd asks for extents before each read, see PEERS.
        far = up(port, ["nbdkit", "-f", "-i", "127.0.0.1", "-p", str(port), "--filter=noextents", "file", theirs])
        return End(name, uri, [up(sock, qemu + ["-k", sock, "-f", "raw", "nbd://127.0.0.1:%d/" % port], env=QEMU_ENV), far])
    die("no endpoint " + name)


class Daemon:
    """a process that is not our child, with as much of Popen as is used here"""

    def __init__(self, pid):
        self.pid = pid

    def poll(self):
        try:
            return None if open("/proc/%d/stat" % self.pid).read().rsplit(")", 1)[1][1] not in "ZX" else 0
        except OSError:
            return 0

    def signal(self, sig):
        for pid in tree([self.pid]):
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                pass

    def terminate(self):
        self.signal(signal.SIGTERM)

    def kill(self):
        self.signal(signal.SIGKILL)

    def wait(self, secs=5):
        end = time.time() + secs
        while self.poll() is None:
            if time.time() > end:
                raise subprocess.TimeoutExpired("daemon", secs)
            time.sleep(0.02)


# ---- what processes and the machine have used


def stat(pid):
    s = open("/proc/%d/stat" % pid).read()
    return s[s.rindex(")") + 2:].split()


def tree(roots):
    """the processes with their descendants"""
    kids = {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                kids.setdefault(int(stat(int(d))[1]), []).append(int(d))
            except OSError:
                pass
    seen, todo = [], list(roots)
    while todo:
        p = todo.pop()
        if p not in seen:
            seen.append(p)
            todo += kids.get(p, [])
    return seen


def cpu(procs):
    """user and system seconds of processes with their children, also those that have ended"""
    t = 0
    for pid in tree([p.pid for p in procs]):
        try:
            t += sum(map(int, stat(pid)[11:15]))
        except OSError:
            pass
    return t / TICK


def tasks(procs):
    """precise seconds on a processor and wake-ups (voluntary switches) of all threads"""
    run = switches = 0
    for p in procs:
        for t in os.listdir("/proc/%d/task" % p.pid):
            d = "/proc/%d/task/%s/" % (p.pid, t)
            try:
                run += int(open(d + "schedstat").read().split()[0])
                switches += int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", open(d + "status").read()).group(1))
            except OSError:
                pass
    return run / 1e9, switches


def memory(p):
    """resident anonymous memory of a process in bytes: without program text, which is shared as soon as a second one runs"""
    s = open("/proc/%d/smaps_rollup" % p.pid).read()
    return int(re.search(r"^Anonymous:\s+(\d+)", s, re.M).group(1)) << 10


def machine():
    """busy seconds of the whole machine, with interrupts; those of interrupts; and what a hypervisor took"""
    f = [int(x) for x in open("/proc/stat").readline().split()[1:9]]
    irq = (f[5] + f[6]) / TICK
    return (f[0] + f[1] + f[2]) / TICK + irq, irq, f[7] / TICK


def congestion(name=""):
    """TCP's congestion control of this machine; name puts this process and its children into a network of their own with that"""
    path = "/proc/sys/net/ipv4/tcp_congestion_control"
    if name:
        if libc.unshare(0x40000000):  # CLONE_NEWNET
            die("--congestion makes a network namespace, which takes root")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        try:
            with open(path, "w") as f:
                f.write(name)
        except OSError as e:
            die("--congestion %s: %s: the kernel has %s" % (name, e.strerror, open("/proc/sys/net/ipv4/tcp_available_congestion_control").read().strip()))
    return open(path).read().strip()


# ---- load


def fio(uris, rw, bs, depth, secs, size):
    """one job for each URI, all at once"""
    part = size if rw.startswith("rand") else size // len(uris) >> 20 << 20  # each its own part in order
    a = ["fio", "--ioengine=nbd", "--rw=" + rw, "--bs=" + bs, "--iodepth=%d" % depth, "--size=%d" % part, "--norandommap",
         "--randrepeat=0", "--scramble_buffers=0", "--time_based", "--runtime=%dms" % (secs * 1000), "--group_reporting", "--output-format=json"]
    for i, u in enumerate(uris):
        a += ["--name=j%d" % i, "--uri=" + u]
        if part < size:
            a += ["--offset=%d" % (part * i)]
    p = subprocess.run(a, capture_output=True, text=True, timeout=secs + 120)
    if p.returncode or "{" not in p.stdout:
        die("fio on %s, %s %s: %s" % (uris[0], rw, bs, (p.stderr or p.stdout)[-500:]))
    j = json.loads(p.stdout[p.stdout.index("{"):])["jobs"][0]
    if j["error"]:
        die("fio on %s, %s %s: error %d" % (uris[0], rw, bs, j["error"]))
    r = j["write" if "write" in rw else "read"]
    return {"iops": r["iops"], "mib": r["bw_bytes"] / 2**20, "ios": r["total_ios"], "bytes": r["io_bytes"], "mean": r["lat_ns"]["mean"] / 1e3,
            "p99": r["clat_ns"].get("percentile", {}).get("99.000000", 0) / 1e3}


def rdinit_bench(t, rw, bs, depth, secs):
    a = [ROOT + "/bin/rdinit", "bench", t.addr, "--nqn", t.nqn, "--rw", rw, "--bs", bs, "--iodepth", str(depth), "--queues", "1",
         "--runtime", "%gs" % secs, "-o", "json", "--log-level", "warn"] + (["--destroy-data"] if "write" in rw else [])
    p = subprocess.run(a, capture_output=True, text=True, timeout=secs + 60)
    if p.returncode:
        die("rdinit bench, %s %s: %s" % (rw, bs, p.stderr[-500:]))
    j = json.loads(p.stdout)
    return {"iops": j["iops"], "mib": j["mib_per_second"], "mean": j["latency"]["mean_us"], "p99": j["latency"]["p99_us"],
            "ios": j["operations"], "bytes": j["bytes"]}
