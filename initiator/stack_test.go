package initiator_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/initiator"
	"rdblk/internal/envtest"
	"rdblk/rdma/iwarp"
	"rdblk/target"
)

const testNQN = "nqn.2026-11.io.rdblk:test"

func nic(t testing.TB) *iwarp.Provider {
	t.Helper()
	p, err := iwarp.New(iwarp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// server is a target that can be stopped and started again with the same devices.
type server struct {
	t    testing.TB
	cfg  target.Config
	nic  *iwarp.Provider
	devs []blockdev.Device
	addr netip.AddrPort
	tgt  *target.Target
}

func serve(t testing.TB, cfg target.Config, devs ...blockdev.Device) *server {
	t.Helper()
	cfg.NQN, cfg.AllowAnyHost = testNQN, true
	if cfg.Workers == 0 {
		cfg.Workers = 2
	}
	cfg.Logger = initiator.TestLogger(t)
	if cfg.Logger == nil {
		cfg.Logger = discard
	}
	s := &server{t: t, cfg: cfg, nic: nic(t), devs: devs, addr: envtest.Port(t)}
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *server) start() {
	s.t.Helper()
	tgt, err := target.New(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, d := range s.devs {
		if _, err := tgt.AddNamespace(0, d); err != nil {
			s.t.Fatal(err)
		}
	}
	if s.addr, err = tgt.Listen(s.nic, s.addr); err != nil {
		s.t.Fatal(err)
	}
	s.tgt = tgt
}

func (s *server) stop() {
	if s.tgt != nil {
		if err := s.tgt.Close(); err != nil {
			s.t.Errorf("target: %v", err)
		}
		s.tgt = nil
	}
}

func (s *server) config() initiator.Config {
	return initiator.Config{
		Provider: nic(s.t), Addr: s.addr, SubNQN: testNQN, Queues: 2, BufferMemory: 16 << 20,
		ReconnectDelay: 5 * time.Millisecond, ReconnectMaxDelay: 50 * time.Millisecond, Logger: initiator.TestLogger(s.t),
	}
}

func attach(t testing.TB, cfg initiator.Config) *initiator.Device {
	t.Helper()
	d, err := initiator.Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func mem(t testing.TB, size int64, o blockdev.Options) blockdev.Device {
	t.Helper()
	d, err := blockdev.NewMem("test", size, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func file(t testing.TB, size int64, o blockdev.Options) blockdev.Device {
	t.Helper()
	name := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, size); err != nil {
		t.Fatal(err)
	}
	d, err := blockdev.Open(name, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// A remote device is a block device like any other.
func TestDeviceContract(t *testing.T) {
	for _, c := range []struct {
		name string
		back func(testing.TB) blockdev.Device
		tgt  target.Config
		ini  func(*initiator.Config)
	}{
		{"memory", func(t testing.TB) blockdev.Device { return mem(t, 8<<20, blockdev.Options{}) }, target.Config{}, nil},
		{"memory, 4 KiB blocks, no windows, nothing in capsules, small transfers", func(t testing.TB) blockdev.Device {
			return mem(t, 8<<20, blockdev.Options{BlockSize: 4096})
		}, target.Config{InCapsule: -1, MaxIO: 16 << 10}, func(c *initiator.Config) { c.NoWindows = true }},
		{"file", func(t testing.TB) blockdev.Device { return file(t, 8<<20, blockdev.Options{}) }, target.Config{QueueDepth: 8}, func(c *initiator.Config) { c.Depth = 4 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
				s := serve(t, c.tgt, c.back(t))
				cfg := s.config()
				if c.ini != nil {
					c.ini(&cfg)
				}
				return attach(t, cfg)
			}, blockdevtest.Short())
		})
	}
}

func TestReadOnlyContract(t *testing.T) {
	blockdevtest.RunReadOnly(t, func(t testing.TB) blockdev.Device {
		return attach(t, serve(t, target.Config{}, mem(t, 8<<20, blockdev.Options{ReadOnly: true})).config())
	})
}

// Whatever is acknowledged as durable survives a power cut of the disk, with the whole
// path above it.
func TestCrashesUnderTheWholePath(t *testing.T) {
	seed := blockdevtest.Seed(t)
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	err := blockdevtest.RunCrashes(blockdevtest.NewCrashable(4<<20, seed), rounds, blockdevtest.RandomConfig{Seed: seed, Ops: 400, Workers: 8},
		func(d *blockdevtest.Crashable) (blockdev.Device, func()) {
			s := serve(t, target.Config{}, d)
			dev := attach(t, s.config())
			return dev, func() { dev.Close(); s.stop() }
		})
	if err != nil {
		t.Error(err)
	}
}

// The target's process is killed and started again, again and again, under load.
func TestRestartsOfTheTarget(t *testing.T) {
	rnd := initiator.NewRand(t)
	s := serve(t, target.Config{}, file(t, 8<<20, blockdev.Options{}))
	dev := attach(t, s.config())
	all := initiator.Play(t, dev, 8, 128<<10, rnd)
	rounds := 15
	if testing.Short() {
		rounds = 3
	}
	for i := range rounds {
		marks := make([]int64, len(all))
		for i, p := range all {
			marks[i] = p.Answers()
		}
		for i, p := range all {
			for p.Answers() < marks[i]+3 && !t.Failed() {
				runtime.Gosched()
			}
		}
		s.stop()
		if rnd.IntN(2) == 0 {
			s.cfg.Workers = 1 + rnd.IntN(3)
		}
		s.start()
		if t.Failed() {
			t.Fatalf("round %d", i)
		}
	}
	initiator.FinishPlay(t, all)
	st := dev.Session().Status()
	if st.Reconnects < uint64(rounds) || st.Requests != 0 {
		t.Errorf("%+v", st)
	}
	stats := dev.Session().Stats()
	t.Logf("%d reconnects, %d sent again", st.Reconnects, stats.Resent)
	for op, o := range stats.Ops {
		if o.Failed != 0 {
			t.Errorf("%d failed: %s", o.Failed, blockdev.Op(op))
		}
	}
}

// A boot of the target's machine is told from a restart of its process.
func TestBootOfTheTarget(t *testing.T) {
	for _, boot := range []bool{false, true} {
		s := serve(t, target.Config{PowerCycles: 7}, file(t, 1<<20, blockdev.Options{}))
		dev := attach(t, s.config())
		if err := dev.WriteAt(make([]byte, 4096), 0, 0); err != nil || !dev.Info().WriteCache {
			t.Fatal(err)
		}
		s.stop()
		if boot {
			s.cfg.PowerCycles++
		}
		s.start()
		if err := dev.ReadAt(make([]byte, 4096), 0); errors.Is(err, initiator.ErrCacheLost) != boot || !boot && err != nil {
			t.Errorf("boot %v: read: %v", boot, err)
		}
		if err := dev.Flush(); errors.Is(err, blockdev.ErrFlushFailed) != boot || !boot && err != nil {
			t.Errorf("boot %v: flush: %v", boot, err)
		}
	}
}

// Failures of the store arrive as themselves, and alone.
func TestStoreFailures(t *testing.T) {
	back := blockdevtest.Faulty(file(t, 1<<20, blockdev.Options{}))
	dev := attach(t, serve(t, target.Config{}, back).config())
	b := make([]byte, 4096)
	for _, c := range []struct {
		name string
		rule blockdevtest.Rule
		call func() error
		is   error
	}{
		{"no space", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpWrite}}, Err: syscall.ENOSPC}, func() error { return dev.WriteAt(b, 0, 0) }, syscall.ENOSPC},
		{"write error", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpWrite}}, Err: syscall.EIO}, func() error { return dev.WriteAt(b, 0, 0) }, syscall.EIO},
		{"read error", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}}, Err: syscall.EIO}, func() error { return dev.ReadAt(b, 0) }, syscall.EIO},
		{"busy once", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}}, Count: 1, Err: syscall.EAGAIN}, func() error { return dev.ReadAt(b, 0) }, nil},
		{"zero refused", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpZero}}, Err: syscall.EOPNOTSUPP}, func() error { return dev.Zero(0, 4096, 0) }, nil},
		{"flush error", blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpFlush}}, Err: syscall.EIO}, func() error { return dev.Flush() }, syscall.EIO},
	} {
		back.Set(c.rule)
		if err := c.call(); !errors.Is(err, c.is) {
			t.Errorf("%s: %v, want %v", c.name, err, c.is)
		}
		back.Set()
		if err := errors.Join(dev.WriteAt(b, 4096, 0), dev.ReadAt(b, 4096)); err != nil {
			t.Errorf("after %s: %v", c.name, err)
		}
	}
	if err := dev.Flush(); !errors.Is(err, blockdev.ErrFlushFailed) {
		t.Errorf("flush after a failed flush: %v", err)
	}
	if n := dev.Session().Status().Reconnects; n != 0 {
		t.Errorf("%d associations were lost", n)
	}
}

// A 4 KiB read and a 4 KiB write cost no allocation on the whole path: protocol, iWARP,
// target and initiator.
func TestNoAllocations(t *testing.T) {
	for _, c := range []struct {
		name string
		tgt  target.Config
		ini  func(*initiator.Config)
	}{
		{"in capsules, windows", target.Config{Workers: 1}, func(*initiator.Config) {}},
		{"by key, windows", target.Config{Workers: 1, InCapsule: -1}, func(*initiator.Config) {}},
		{"by key, no windows", target.Config{Workers: 1, InCapsule: -1}, func(c *initiator.Config) { c.NoWindows = true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, c.tgt, mem(t, 1<<20, blockdev.Options{}))
			cfg := s.config()
			cfg.Queues, cfg.KeepAlive, cfg.RequestTimeout = 1, time.Hour, 24*time.Hour // no timers in between
			c.ini(&cfg)
			dev := attach(t, cfg)
			q, err := dev.OpenQueue(0)
			if err != nil {
				t.Fatal(err)
			}
			for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
				done := make(chan struct{}, 1)
				var buf []byte
				_ = q.Worker().Call(func() { buf = q.Alloc(4096) })
				r := &blockdev.Request{Op: op, Off: 8192, Buf: buf}
				r.Done = func(r *blockdev.Request) {
					if r.Err != nil {
						t.Error(r.Err)
					}
					done <- struct{}{}
				}
				task := &submitTask{q: q, r: r}
				one := func() {
					_ = q.Worker().Submit(task)
					<-done
				}
				for range 200 { // pools and rings take their shape
					one()
				}
				if n := testing.AllocsPerRun(2000, one); n != 0 && !raceEnabled { // the race detector allocates
					t.Errorf("%s: %v allocations", op, n)
				}
				_ = q.Worker().Call(func() { q.Free(buf) })
			}
			if sent := dev.Session().InCapsuleSent(); (sent > 2000) != (c.tgt.InCapsule == 0) {
				t.Errorf("%d in capsules", sent)
			}
			if dev.Session().Windows() == cfg.NoWindows {
				t.Error("windows?")
			}
		})
	}
}

type submitTask struct {
	q blockdev.Queue
	r *blockdev.Request
}

func (s *submitTask) Run() { s.q.Submit(s.r) }

// Buffers, requests, slots: several in flight, more than the queue holds, of all sizes.
func TestManyRequestsAtATime(t *testing.T) {
	s := serve(t, target.Config{}, mem(t, 32<<20, blockdev.Options{}))
	cfg := s.config()
	cfg.Depth = 8
	dev := attach(t, cfg)
	var wg sync.WaitGroup
	for i := range dev.NumQueues() {
		q, err := dev.OpenQueue(i + 2*dev.NumQueues())
		if err != nil {
			t.Fatal(err)
		}
		_ = q.Worker().Call(func() {
			var waiting []*blockdev.Request
			for j := range 64 {
				n := 512 << (j % 12)
				r := &blockdev.Request{Op: blockdev.OpWrite, Off: int64(i*64+j) * 64 << 10, Len: int64(n)}
				if n > 64<<10 {
					r.Off = int64(i) << 24
				}
				waiting = append(waiting, r)
			}
			var next func()
			next = func() {
				for len(waiting) > 0 {
					r := waiting[0]
					if r.Buf = q.Alloc(int(r.Len)); r.Buf == nil {
						return // a Done will come back here
					}
					waiting = waiting[1:]
					wg.Add(1)
					r.Done = func(r *blockdev.Request) {
						if r.Err != nil {
							t.Error(r.Err)
						}
						q.Free(r.Buf)
						next()
						wg.Done()
					}
					q.Submit(r)
				}
			}
			next()
		})
	}
	wg.Wait()
	st := dev.Session().Status()
	for _, q := range st.Queues {
		if q.BufferInUse != 0 || q.Requests != 0 {
			t.Errorf("%+v", q)
		}
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}

func mappings(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "\n")
}

// A thousand times attached and detached: goroutines, descriptors, mappings and what is
// registered return to where they were.
func TestNothingLeaks(t *testing.T) {
	rounds := 1000
	if testing.Short() || raceEnabled {
		rounds = 50
	}
	s := serve(t, target.Config{}, mem(t, 1<<20, blockdev.Options{}))
	prov := nic(t)
	cfg := s.config()
	cfg.Provider, cfg.Depth, cfg.BufferMemory, cfg.Logger = prov, 4, 1<<20, nil
	buf := make([]byte, 4096)
	once := func(i int) {
		d, err := initiator.Open(context.Background(), cfg)
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if err := errors.Join(d.WriteAt(buf, 0, 0), d.ReadAt(buf, 0), d.Close()); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
	settle := func(what string, now func() int, limit int) {
		t.Helper()
		deadline := time.Now().Add(60 * time.Second)
		for now() > limit && time.Now().Before(deadline) {
			runtime.GC()
			time.Sleep(5 * time.Millisecond)
		}
		if n := now(); n > limit {
			t.Errorf("%d %s, %d before", n, what, limit)
		}
	}
	for i := range 10 {
		once(i)
	}
	runtime.GC()
	goroutines, files, maps := runtime.NumGoroutine(), openFiles(t), mappings(t)
	for i := range rounds {
		once(i)
	}
	settle("goroutines", runtime.NumGoroutine, goroutines+2)
	settle("descriptors", func() int { return openFiles(t) }, files+2)
	settle("mappings", func() int { return mappings(t) }, maps+16)
	if err := prov.Device().Close(); err != nil { // counts everything that was made from it
		t.Error(err)
	}
}

// Large reads go on, also where both workers have many connections and never sleep: a socket that is full has to tell when it
// is not any more.
func TestLargeReadsBesideManyConnections(t *testing.T) {
	s := serve(t, target.Config{Workers: 1, BusyPoll: true}, mem(t, 32<<20, blockdev.Options{}))
	cfg := s.config()
	cfg.Queues, cfg.BufferMemory, cfg.RequestTimeout = 1, 64<<20, 10*time.Second
	for range 5 {
		attach(t, cfg)
	}
	dev := attach(t, cfg)
	q, err := dev.OpenQueue(0)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	_ = q.Worker().Call(func() {
		for i := range 32 {
			wg.Add(1)
			left := 8
			r := &blockdev.Request{Op: blockdev.OpRead, Off: int64(i) << 20, Buf: q.Alloc(1 << 20)}
			r.Done = func(r *blockdev.Request) {
				if r.Err != nil {
					t.Error(r.Err)
				}
				if left--; left == 0 {
					q.Free(r.Buf)
					wg.Done()
					return
				}
				q.Submit(r)
			}
			q.Submit(r)
		}
	})
	wg.Wait()
	if n := dev.Session().Status().Reconnects; n != 0 {
		t.Errorf("the connection was given up %d times because nothing moved", n)
	}
}

// A reconnecting host is let in although the target has not noticed its loss yet, and
// gets its old requests done.
func TestTwoAttachmentsOfOneMachine(t *testing.T) {
	s := serve(t, target.Config{}, mem(t, 1<<20, blockdev.Options{}))
	a, b := attach(t, s.config()), attach(t, s.config())
	want := bytes.Repeat([]byte{7}, 4096)
	for range 10 {
		if err := errors.Join(a.WriteAt(want, 0, 0), b.WriteAt(want, 4096, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if a.Session().Status().Reconnects+b.Session().Status().Reconnects != 0 {
		t.Error("they throw each other out")
	}
}

func Example() {
	nic, err := iwarp.New(iwarp.Config{}) // the software RDMA NIC
	if err != nil {
		fmt.Println(err)
		return
	}
	// A target to attach, in the same process.
	disk, _ := blockdev.NewMem("disk", 1<<20, blockdev.Options{})
	tgt, err := target.New(target.Config{NQN: testNQN, AllowAnyHost: true, Logger: discard})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tgt.Close()
	tgt.AddNamespace(0, disk)
	addr, err := tgt.Listen(nic, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		fmt.Println(err)
		return
	}

	// Without a name, discovery finds the only subsystem there.
	dev, err := initiator.Open(context.Background(), initiator.Config{Provider: nic, Addr: addr, Queues: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer dev.Close()
	if err := dev.WriteAt(bytes.Repeat([]byte("hello, RDMA! 16 "), 32), 0, blockdev.WriteFUA); err != nil {
		fmt.Println(err)
		return
	}
	block := make([]byte, 512)
	if err := dev.ReadAt(block, 0); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s: %d bytes, %q\n", dev.Info().Name, dev.Info().Size, block[:12])
	// Output: nqn.2026-11.io.rdblk:test namespace 1: 1048576 bytes, "hello, RDMA!"
}

// BenchmarkRemote is 4 KiB requests through protocol, iWARP and target to memory and
// back, on one queue, without anything above the queue.
func BenchmarkRemote(b *testing.B) {
	for _, op := range []blockdev.Op{blockdev.OpRead, blockdev.OpWrite} {
		for _, depth := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/depth=%d", op, depth), func(b *testing.B) {
				s := serve(b, target.Config{Workers: 1}, mem(b, 16<<20, blockdev.Options{}))
				cfg := s.config()
				cfg.Queues = 1
				dev := attach(b, cfg)
				q, err := dev.OpenQueue(0)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				b.SetBytes(4096)
				left := b.N
				var wg sync.WaitGroup
				b.ResetTimer()
				_ = q.Worker().Call(func() {
					for i := range depth {
						wg.Add(1)
						r := &blockdev.Request{Op: op, Off: int64(i) * 4096, Buf: q.Alloc(4096)}
						r.Done = func(r *blockdev.Request) {
							if r.Err != nil {
								b.Error(r.Err)
							}
							if left--; left < depth {
								q.Free(r.Buf)
								wg.Done()
								return
							}
							q.Submit(r)
						}
						left++
						q.Submit(r)
					}
				})
				wg.Wait()
			})
		}
	}
}

// An attachment without requests costs next to nothing: its workers sleep.
func TestIdleCostsNothing(t *testing.T) {
	dev := attach(t, serve(t, target.Config{}, mem(t, 1<<20, blockdev.Options{})).config())
	if err := dev.ReadAt(make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	before := dev.Session().Stats().Workers
	time.Sleep(3 * time.Second) // what is measured is time
	for i, w := range dev.Session().Stats().Workers {
		if n := w.Wakeups - before[i].Wakeups; n > 6 {
			t.Errorf("worker %d woke up %d times in 3 s", i, n)
		}
	}
}
