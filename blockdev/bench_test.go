package blockdev

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/internal/worker"
)

func benchFile(b testing.TB, size int64) string {
	path := filepath.Join(b.TempDir(), "disk.img")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := make([]byte, 1<<20)
	for i := range p {
		p[i] = byte(i)
	}
	for off := int64(0); off < size; off += int64(len(p)) {
		if _, err := f.WriteAt(p, off); err != nil {
			b.Fatal(err)
		}
	}
	return path
}

// BenchmarkQueue keeps depth requests in flight on one worker.
func BenchmarkQueue(b *testing.B) {
	path := benchFile(b, 64<<20)
	for _, dev := range []string{"null:64M", "mem:64M", path} {
		for _, c := range []struct {
			name  string
			op    Op
			size  int
			depth int
			cfg   QueueConfig
		}{
			{"read4k/inline", OpRead, 4096, 1, QueueConfig{}},
			{"read4k/executor", OpRead, 4096, 1, QueueConfig{MaxInline: -1}},
			{"read4k/executor-d32", OpRead, 4096, 32, QueueConfig{MaxInline: -1}},
			{"read256k/inline-d8", OpRead, 256 << 10, 8, QueueConfig{}},
			{"read256k/executor-d8", OpRead, 256 << 10, 8, QueueConfig{MaxInline: -1}},
			{"write4k/inline", OpWrite, 4096, 1, QueueConfig{}},
			{"write4k/executor", OpWrite, 4096, 1, QueueConfig{MaxInline: -1}},
			{"write4k/executor-d32", OpWrite, 4096, 32, QueueConfig{MaxInline: -1}},
		} {
			kind := "file"
			if dev != path {
				kind = dev[:4]
			}
			b.Run(fmt.Sprintf("%s/%s", kind, c.name), func(b *testing.B) {
				d, err := Open(dev, Options{})
				if err != nil {
					b.Fatal(err)
				}
				defer d.Close()
				w, err := worker.New(worker.Config{})
				if err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				q, err := NewQueue(d, w, c.cfg)
				if err != nil {
					b.Fatal(err)
				}
				defer w.Call(q.Close)
				b.SetBytes(int64(c.size))
				b.ReportAllocs()
				done := make(chan struct{})
				left, running := b.N, c.depth
				b.ResetTimer()
				w.Call(func() {
					for i := range c.depth {
						r := &Request{Op: c.op, Buf: q.Alloc(c.size), Off: int64(i * c.size)}
						r.Done = func(r *Request) {
							if r.Err != nil {
								b.Error(r.Err)
							}
							if left--; left > 0 {
								if r.Off += int64(c.size * c.depth); r.Off >= 64<<20-int64(c.size) {
									r.Off = int64(i * c.size)
								}
								q.Submit(r)
								return
							}
							q.Free(r.Buf)
							if running--; running == 0 {
								close(done)
							}
						}
						q.Submit(r)
					}
				})
				<-done
			})
		}
	}
}

// BenchmarkDirect reads 4 KiB at random places of a file past the page cache. Compare with
//
//	fio --name=r --filename=FILE --rw=randread --bs=4k --direct=1 --ioengine=io_uring --iodepth=32
//
// on the same file. BLOCKDEV_BENCH_FILE names a file that is laid out already.
func BenchmarkDirect(b *testing.B) {
	path := os.Getenv("BLOCKDEV_BENCH_FILE")
	if path == "" {
		path = benchFile(b, 256<<20)
	}
	d, err := Open(path, Options{Direct: true})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	w, err := worker.New(worker.Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	ex := NewExecutor(32)
	defer ex.Close()
	blocks := d.Info().Size / 4096
	for _, c := range []struct {
		depth int
		off   bool
	}{{1, false}, {1, true}, {32, false}, {32, true}} {
		depth := c.depth
		b.Run(fmt.Sprintf("d%d/uring=%v", depth, !c.off), func(b *testing.B) {
			q, err := NewQueue(d, w, QueueConfig{Executor: ex, NoURing: c.off})
			if err != nil {
				b.Fatal(err)
			}
			defer w.Call(q.Close)
			done := make(chan struct{})
			left, running := b.N, depth
			rng := rand.New(rand.NewPCG(1, 2))
			b.ResetTimer()
			w.Call(func() {
				for range depth {
					r := &Request{Op: OpRead, Buf: q.Alloc(4096), Off: rng.Int64N(blocks) * 4096}
					r.Done = func(r *Request) {
						if r.Err != nil {
							b.Error(r.Err)
						}
						if left--; left > 0 {
							r.Off = rng.Int64N(blocks) * 4096
							q.Submit(r)
							return
						}
						q.Free(r.Buf)
						if running--; running == 0 {
							close(done)
						}
					}
					q.Submit(r)
				}
			})
			<-done
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
		})
	}
}

// BenchmarkCold reads pages of a file that are not in the page cache, in random
// order, each once.
func BenchmarkCold(b *testing.B) {
	path := benchFile(b, 256<<20)
	for _, depth := range []int{1, 32} {
		for _, off := range []bool{false, true} {
			b.Run(fmt.Sprintf("d%d/uring=%v", depth, !off), func(b *testing.B) {
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				if err != nil {
					b.Fatal(err)
				}
				defer f.Close()
				f.Sync()
				unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
				d, err := Open(path, Options{})
				if err != nil {
					b.Fatal(err)
				}
				defer d.Close()
				w, err := worker.New(worker.Config{})
				if err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				q, err := NewQueue(d, w, QueueConfig{NoURing: off})
				if err != nil {
					b.Fatal(err)
				}
				defer w.Call(q.Close)
				order := rand.New(rand.NewPCG(1, 2)).Perm(64 << 10)
				done := make(chan struct{})
				left, running := b.N, depth
				b.ResetTimer()
				w.Call(func() {
					for range depth {
						r := &Request{Op: OpRead, Buf: q.Alloc(4096), Off: int64(order[(left+len(order))%len(order)]) * 4096}
						r.Done = func(r *Request) {
							if r.Err != nil {
								b.Error(r.Err)
							}
							if left--; left > 0 {
								r.Off = int64(order[(left+len(order))%len(order)]) * 4096
								q.Submit(r)
								return
							}
							q.Free(r.Buf)
							if running--; running == 0 {
								close(done)
							}
						}
						q.Submit(r)
					}
				})
				<-done
				s := StatsOf(q)
				b.ReportMetric(float64(s.Inline)/float64(b.N), "hits/op")
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
			})
		}
	}
}
