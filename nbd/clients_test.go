package nbd

import (
	"testing"

	"rdblk/blockdev"
	"rdblk/nbd/nbdtest"
)

// TestClients runs other people's clients against devices of several kinds.
func TestClients(t *testing.T) {
	const size = 64 << 20
	for _, c := range []struct {
		name  string
		dev   blockdev.Device
		tg    nbdtest.Target
		short bool
	}{
		{"inline", tryMemDevice{newMemDevice(size)}, nbdtest.Target{BlockSize: 512, Trim: true, Zero: true}, false},
		{"executor, 4k, no FUA, no trim, no zeroes", newMemDevice(size, func(i *blockdev.Info) {
			i.BlockSize, i.FUA, i.Discard, i.WriteZeroes = 4096, false, false, false
		}), nbdtest.Target{BlockSize: 4096}, false},
		{"read-only", newMemDevice(size, func(i *blockdev.Info) { i.ReadOnly = true }),
			nbdtest.Target{BlockSize: 512, ReadOnly: true, Trim: true, Zero: true}, true},
		{"named", tryMemDevice{newMemDevice(size)}, nbdtest.Target{Export: "disk ü/1", BlockSize: 512, Trim: true, Zero: true}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			tg := c.tg
			s := serve(t, c.dev, func(cfg *Config) { cfg.Exports[0].Name = tg.Export })
			tg.Socket, tg.Size = s.path, size
			if c.short {
				t.Run("nbdinfo", tg.Info)
				t.Run("nbdsh", tg.Shell)
				return
			}
			tg.All(t)
			if st := s.Stats().Exports[0]; tg.Trim && st.Ops[OpTrim].Count == 0 || tg.Zero && st.Ops[OpWriteZeroes].Count == 0 || st.Ops[OpFlush].Count == 0 {
				t.Errorf("an operation was never used: %+v", st.Ops)
			}
		})
	}
}
