package protocol

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
)

// codec reads or writes the fields of a structure at fixed offsets. A structure
// describes its layout once, in a method that takes a codec, and so cannot be
// written differently from how it is read. b has the structure's full size; the
// offsets are constants, never numbers from the wire.
type codec struct {
	b   []byte
	put bool
}

func (x codec) u8(off int, p *uint8) {
	if x.put {
		x.b[off] = *p
	} else {
		*p = x.b[off]
	}
}

func (x codec) u16(off int, p *uint16) {
	if x.put {
		binary.LittleEndian.PutUint16(x.b[off:], *p)
	} else {
		*p = binary.LittleEndian.Uint16(x.b[off:])
	}
}

func (x codec) u32(off int, p *uint32) {
	if x.put {
		binary.LittleEndian.PutUint32(x.b[off:], *p)
	} else {
		*p = binary.LittleEndian.Uint32(x.b[off:])
	}
}

func (x codec) u64(off int, p *uint64) {
	if x.put {
		binary.LittleEndian.PutUint64(x.b[off:], *p)
	} else {
		*p = binary.LittleEndian.Uint64(x.b[off:])
	}
}

func (x codec) u128(off int, p *Uint128) {
	x.u64(off, &p.Lo)
	x.u64(off+8, &p.Hi)
}

// bytes copies a byte string.
func (x codec) bytes(off int, p []byte) {
	if x.put {
		copy(x.b[off:off+len(p)], p)
	} else {
		copy(p, x.b[off:off+len(p)])
	}
}

// ascii is a text of n bytes that is padded with spaces. Trailing spaces and
// NULs are dropped when read; what does not fit is cut when written.
func (x codec) ascii(off, n int, p *string) {
	f := x.b[off : off+n]
	if x.put {
		for i := copy(f, *p); i < n; i++ {
			f[i] = ' '
		}
	} else {
		*p = strings.TrimRight(string(f), " \x00")
	}
}

// text is a text of n bytes that ends with a NUL. Some peers fill the rest with
// spaces or leave a newline: blanks at the end are dropped when read. At most
// n-1 bytes are written.
func (x codec) text(off, n int, p *string) {
	f := x.b[off : off+n]
	if x.put {
		copy(f[:n-1], *p)
	} else {
		if i := bytes.IndexByte(f, 0); i >= 0 {
			f = f[:i]
		}
		*p = strings.TrimRight(string(f), " \t\r\n")
	}
}

// nqn is a name of 256 bytes that ends with a NUL. Names are compared byte by
// byte, so nothing is trimmed.
func (x codec) nqn(off int, p *string) {
	f := x.b[off : off+256]
	if x.put {
		copy(f[:255], *p)
	} else {
		if i := bytes.IndexByte(f, 0); i >= 0 {
			f = f[:i]
		}
		*p = string(f)
	}
}

// grow appends n zero bytes to b and returns all of it and the new part.
func grow(b []byte, n int) (all, part []byte) {
	b = slices.Grow(b, n)
	all = b[:len(b)+n]
	part = all[len(b):]
	clear(part)
	return all, part
}

func utoa(v uint64) string { return strconv.FormatUint(v, 10) }

// Uint128 is a 128-bit little-endian counter.
type Uint128 struct{ Lo, Hi uint64 }

func le16(b []byte) uint16 { return binary.LittleEndian.Uint16(b) }

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
