package protocol

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestImports holds the package to its place at the bottom: nothing of ours, no
// I/O, and nothing that is not in the standard library.
func TestImports(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	forbidden := map[string]bool{"net": true, "os": true, "log": true, "log/slog": true, "time/tzdata": true, "unsafe": true, "C": true}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range f.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			first, _, _ := strings.Cut(path, "/")
			if first == "rdblk" || strings.Contains(first, ".") || forbidden[path] {
				t.Errorf("%s imports %s", name, path)
			}
		}
	}
}

// TestNoAllocations: what is done once per I/O does not allocate.
func TestNoAllocations(t *testing.T) {
	capsule := make([]byte, CommandSize+4096)
	response := make([]byte, CompletionSize)
	ranges := make([]byte, MaxDSMRanges*DSMRangeSize)
	trace := make([]byte, 0, 512)
	var sink uint64
	for name, f := range map[string]func(){
		"host builds a read": func() {
			c, _ := CommandView(capsule)
			c.InitRW(OpRead, 1, 1, 8, 8, 0)
			c.SetKeyedSGL(0x1000, 4096, 1, true)
		},
		"host builds a write": func() {
			c, _ := CommandView(capsule)
			c.InitRW(OpWrite, 1, 1, 8, 8, ControlFUA)
			c.SetInCapsuleSGL(0, 4096)
		},
		"target reads a command": func() {
			c, _ := CommandView(capsule)
			if c.CheckFlags() != StatusSuccess {
				t.Fatal("flags")
			}
			d, st := c.Data(c.Direction(), Capsule{InCapsuleSize: 4096, Received: uint32(len(capsule))})
			if st != StatusSuccess || d.Exactly(uint64(c.Blocks())<<9) != StatusSuccess {
				t.Fatal(st)
			}
			off, n, ok := ByteRange(c.SLBA(), uint64(c.Blocks()), 9, 1<<20)
			if !ok {
				t.Fatal("range")
			}
			sink += uint64(off+n) + uint64(len(d.Bytes(capsule)))
		},
		"target answers": func() {
			e, _ := CompletionView(response)
			e.Init(1, StatusSuccess)
			e.SetSQHD(5)
		},
		"host reads the answer": func() {
			e, _ := CompletionView(response)
			if e.Status().Err() != nil {
				t.Fatal(e.Status())
			}
			sink += uint64(e.ID())
		},
		"ranges": func() {
			r, _ := DSMRangesView(ranges, MaxDSMRanges)
			for d := range r.All() {
				sink += d.SLBA
			}
			if !r.Inside(1) {
				t.Fatal("range")
			}
		},
		"trace": func() {
			c, _ := CommandView(capsule)
			trace = AppendDescription(trace[:0], c, false)
		},
	} {
		c, _ := CommandView(capsule)
		c.InitRW(OpWrite, 1, 1, 8, 8, 0)
		c.SetInCapsuleSGL(0, 4096)
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	_ = sink
}

func BenchmarkTargetParse(b *testing.B) {
	capsule := make([]byte, CommandSize)
	c, _ := CommandView(capsule)
	c.InitRW(OpRead, 1, 1, 8, 8, 0)
	c.SetKeyedSGL(0x1000, 4096, 1, true)
	b.ReportAllocs()
	for b.Loop() {
		if c.CheckFlags() != StatusSuccess {
			b.Fatal("flags")
		}
		d, st := c.Data(c.Direction(), Capsule{Received: CommandSize})
		if st != StatusSuccess || d.Exactly(4096) != StatusSuccess {
			b.Fatal(st)
		}
		if _, _, ok := ByteRange(c.SLBA(), uint64(c.Blocks()), 9, 1<<20); !ok {
			b.Fatal("range")
		}
	}
}
