package initiator

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/rdma"
)

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Helper()
	if testing.Verbose() {
		w.t.Log(string(bytes.TrimSpace(b)))
	}
	return len(b), nil
}

func testLogger(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return nil
	}
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func TestAttachReadWrite(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*fakeTarget, *Config, *crooked)
	}{
		{"windows and in-capsule data", func(*fakeTarget, *Config, *crooked) {}},
		{"no in-capsule data", func(_ *fakeTarget, c *Config, _ *crooked) { c.NoInCapsule = true }},
		{"target takes no in-capsule data", func(f *fakeTarget, _ *Config, _ *crooked) { f.ctrl.SetInCapsuleSize(0) }},
		{"no windows", func(_ *fakeTarget, c *Config, _ *crooked) { c.NoWindows = true }},
		{"device without windows", func(_ *fakeTarget, _ *Config, p *crooked) { p.info = func(i *rdma.DeviceInfo) { i.MemWindows = false } }},
		{"device with one SGE", func(_ *fakeTarget, _ *Config, p *crooked) { p.info = func(i *rdma.DeviceInfo) { i.MaxSGE = 1 } }},
		{"device without Send with Invalidate", func(f *fakeTarget, _ *Config, p *crooked) {
			p.info = func(i *rdma.DeviceInfo) { i.SendInv = false }
			f.hook = func(k *fakeCommand) bool {
				if k.data.Invalidate {
					f.t.Error("asked for what the device cannot take")
				}
				return false
			}
		}},
		{"plain Sends", func(f *fakeTarget, _ *Config, _ *crooked) { f.plainSend = true }},
		{"4 KiB blocks", func(f *fakeTarget, _ *Config, _ *crooked) { f.spaces[1] = newFakeSpace(1<<20, 12) }},
		{"depth 2", func(_ *fakeTarget, c *Config, _ *crooked) { c.Depth = 2 }},
		{"old target", func(f *fakeTarget, _ *Config, _ *crooked) { f.noNVM, f.noSmart, f.vs = true, true, 0x00010200 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			p := &crooked{Provider: newProvider(t)}
			cfg := testConfig(f, p)
			c.set(f, &cfg, p)
			s := connect(t, cfg)
			d := device(t, s)
			info := d.Info()
			if info.Size != 1<<20 || info.BlockSize != 1<<f.spaces[1].shift || !info.WriteCache || !info.FUA || !info.Discard || info.DiscardZeros || !info.WriteZeroes {
				t.Errorf("info %+v", info)
			}
			block := info.BlockSize
			for i, n := range []int{block, 4096, 8192, 128 << 10, 128<<10 + block, 512 << 10} {
				n = n / block * block
				off := int64(i * block)
				want := pattern(byte(i), n)
				if err := d.WriteAt(want, off, 0); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, n)
				if err := d.ReadAt(got, off); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, want) {
					t.Fatalf("%d bytes at %d came back different", n, off)
				}
				if !bytes.Equal(f.spaces[1].content(off, n), want) {
					t.Fatalf("%d bytes at %d are not at the target", n, off)
				}
			}
			if err := d.WriteAt(pattern(9, block), 0, blockdev.WriteFUA); err != nil || f.spaces[1].fua.Load() != 1 {
				t.Errorf("FUA write: %v, %d at the target", err, f.spaces[1].fua.Load())
			}
			if err := d.Zero(0, 64<<10, 0); err != nil || !bytes.Equal(f.spaces[1].content(0, 64<<10), make([]byte, 64<<10)) {
				t.Errorf("zero: %v", err)
			}
			if err := d.Discard(0, 64<<10); err != nil || f.spaces[1].discards.Load() != 1 {
				t.Errorf("discard: %v", err)
			}
			if err := d.Flush(); err != nil || f.spaces[1].flushes.Load() != 1 {
				t.Errorf("flush: %v", err)
			}
			ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
			defer stop()
			if err := s.Close(ctx); err != nil {
				t.Errorf("close: %v", err)
			}
			if n := f.shutdowns.Load(); n != 1 {
				t.Errorf("%d shutdown notifications", n)
			}
			if err := d.ReadAt(make([]byte, block), 0); !errors.Is(err, ErrClosed) || !errors.Is(err, blockdev.ErrClosed) {
				t.Errorf("read after close: %v", err)
			}
			eventually(t, "queue pairs closed", func() bool { return p.opened.Load() == p.closed.Load() })
		})
	}
}
