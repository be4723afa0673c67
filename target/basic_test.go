package target

import (
	"bytes"
	"testing"

	"rdblk/protocol"
)

func TestReadWrite(t *testing.T) {
	dev := memDevice(t, 64<<20)
	r := newRig(t, Config{}, dev)
	s := r.attach(sessionOptions{queues: 2})
	for _, n := range []int{512, 4096, 4096 + 512, 65536, 1 << 20} {
		for i, q := range s.io {
			lba := uint64(i*4096 + n/512)
			want := pattern(uint64(n+i), n)
			copy(q.data, want)
			q.ok(q.rw(protocol.OpWrite, lba, n, 0, 0))
			got := make([]byte, n)
			if err := dev.ReadAt(got, int64(lba)*512); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d bytes on queue %d: not what was written (%v)", n, i, err)
			}
			fill(q.data[n:2*n], 0)
			q.ok(q.rw(protocol.OpRead, lba, n, n, 0))
			if !bytes.Equal(q.data[n:2*n], want) {
				t.Fatalf("%d bytes on queue %d: not what was read", n, i)
			}
		}
	}
}
