package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

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
