package protocol

import (
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// UUID is a 16-byte universally unique identifier in the order of its text (RFC
// 9562). It is also the form of a host identifier.
type UUID [16]byte

// RandomUUID returns a new random (version 4) UUID.
func RandomUUID() UUID {
	var u UUID
	rand.Read(u[:]) // never fails: the runtime aborts instead
	u.stamp(4)
	return u
}

// NameUUID returns the version 5 UUID of a name in a name space: the same for
// ever, to derive an identity from something stable.
func NameUUID(space UUID, name string) UUID {
	h := sha1.New()
	h.Write(space[:])
	h.Write([]byte(name))
	var u UUID
	copy(u[:], h.Sum(nil))
	u.stamp(5)
	return u
}

// singlePathTag is custom_a (octets 0 to 5) of a version 8 UUID (RFC 9562, section
// 5.8) that is a single-path host identifier.
const singlePathTag = "rdblk\x01"

// SinglePathHostID returns a host identifier (HOSTID in the Connect data) which says
// of itself that the host has one association at a time with it: a new admin Connect
// with the same HOSTNQN, HOSTID and SUBNQN replaces the old association wherever it
// comes from. A HOSTID of another form names a host that may have several, one for
// each path. To a target that does not know the form it is a UUID like any other.
//
// The identifier is the same for ever for the same parts: a UUID of version 8 with
// "rdblk" and 1 in its first 48 bits and, in the other 74, the beginning of the
// SHA-256 of the parts, each behind its length, so that they do not show in it.
func SinglePathHostID(parts ...string) UUID {
	h := sha256.New()
	h.Write([]byte("rdblk single-path host identifier"))
	for _, p := range parts {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
	var u UUID
	copy(u[copy(u[:], singlePathTag):], h.Sum(nil))
	u.stamp(8)
	return u
}

// RandomSinglePathHostID returns a single-path host identifier that nobody else has.
func RandomSinglePathHostID() UUID { return SinglePathHostID(rand.Text()) }

// SinglePath reports the form that [SinglePathHostID] gives.
func (u UUID) SinglePath() bool {
	return string(u[:len(singlePathTag)]) == singlePathTag && u[6]>>4 == 8 && u[8]>>6 == 2
}

func (u *UUID) stamp(version byte) {
	u[6] = u[6]&0x0F | version<<4
	u[8] = u[8]&0x3F | 0x80
}

// IsZero reports the all-zero UUID, which means none.
func (u UUID) IsZero() bool { return u == UUID{} }

// String returns the canonical text, 36 characters in lower case.
func (u UUID) String() string {
	b, _ := u.AppendText(nil)
	return string(b)
}

// AppendText appends the canonical text.
func (u UUID) AppendText(b []byte) ([]byte, error) {
	b = hex.AppendEncode(b, u[0:4])
	for _, part := range [][]byte{u[4:6], u[6:8], u[8:10], u[10:16]} {
		b = append(b, '-')
		b = hex.AppendEncode(b, part)
	}
	return b, nil
}

// MarshalText returns the canonical text.
func (u UUID) MarshalText() ([]byte, error) { return u.AppendText(nil) }

// UnmarshalText parses what [ParseUUID] does.
func (u *UUID) UnmarshalText(b []byte) error {
	v, err := ParseUUID(string(b))
	if err == nil {
		*u = v
	}
	return err
}

// ParseUUID parses the canonical text in either case.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return UUID{}, fmt.Errorf("%w: UUID %q: want 8-4-4-4-12 hexadecimal digits", ErrInvalid, s)
	}
	if _, err := hex.Decode(u[:], []byte(s[0:8]+s[9:13]+s[14:18]+s[19:23]+s[24:36])); err != nil {
		return UUID{}, fmt.Errorf("%w: UUID %q: want 8-4-4-4-12 hexadecimal digits", ErrInvalid, s)
	}
	return u, nil
}

// NGUID is a namespace globally unique identifier, most significant byte first.
type NGUID [16]byte

// IsZero reports the all-zero identifier, which means none.
func (g NGUID) IsZero() bool { return g == NGUID{} }

// String returns 32 hexadecimal digits.
func (g NGUID) String() string { return hex.EncodeToString(g[:]) }

// ParseNGUID parses 32 hexadecimal digits; dashes as in a UUID are accepted.
func ParseNGUID(s string) (NGUID, error) {
	if u, err := ParseUUID(s); err == nil {
		return NGUID(u), nil
	}
	var g NGUID
	if err := decodeHex(g[:], s); err != nil {
		return NGUID{}, fmt.Errorf("%w: NGUID %q: want 32 hexadecimal digits", ErrInvalid, s)
	}
	return g, nil
}

// EUI64 is an IEEE extended unique identifier, most significant byte first.
type EUI64 [8]byte

// IsZero reports the all-zero identifier, which means none.
func (e EUI64) IsZero() bool { return e == EUI64{} }

// String returns 16 hexadecimal digits.
func (e EUI64) String() string { return hex.EncodeToString(e[:]) }

// ParseEUI64 parses 16 hexadecimal digits.
func ParseEUI64(s string) (EUI64, error) {
	var e EUI64
	if err := decodeHex(e[:], s); err != nil {
		return EUI64{}, fmt.Errorf("%w: EUI64 %q: want 16 hexadecimal digits", ErrInvalid, s)
	}
	return e, nil
}

func decodeHex(dst []byte, s string) error {
	if len(s) != 2*len(dst) {
		return hex.ErrLength
	}
	_, err := hex.Decode(dst, []byte(s))
	return err
}
