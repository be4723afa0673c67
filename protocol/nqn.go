package protocol

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxNQNLength is the longest NVMe Qualified Name in bytes.
const MaxNQNLength = 223

// DiscoveryNQN is the well-known name of the discovery subsystem.
const DiscoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

const uuidNQNPrefix = "nqn.2014-08.org.nvmexpress:uuid:"

// UUIDNQN returns the UUID form of a qualified name, the usual host NQN.
func UUIDNQN(u UUID) string { return uuidNQNPrefix + u.String() }

// NQNUUID returns the UUID inside a name in UUID form.
func NQNUUID(nqn string) (UUID, bool) {
	rest, ok := strings.CutPrefix(nqn, uuidNQNPrefix)
	if !ok {
		return UUID{}, false
	}
	u, err := ParseUUID(rest)
	return u, err == nil
}

// UUIDFormBroken tells whether a name begins as one in UUID form and has no UUID in it, as when it
// was not copied whole.
func UUIDFormBroken(nqn string) bool {
	_, ok := NQNUUID(nqn)
	return strings.HasPrefix(nqn, uuidNQNPrefix) && !ok
}

// CheckNQN reports whether a name can be used at all: 1 to 223 bytes of printable
// UTF-8 without spaces. It is what can be asked of a peer's name, since targets
// are configured with names that have no nqn form ("testnqn").
func CheckNQN(s string) error {
	if s == "" {
		return fmt.Errorf("%w: NQN is empty", ErrInvalid)
	}
	if len(s) > MaxNQNLength {
		return fmt.Errorf("%w: NQN is %d bytes long, the limit is %d", ErrInvalid, len(s), MaxNQNLength)
	}
	for i, r := range s {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(s[i:]); n <= 1 {
				return fmt.Errorf("%w: NQN %q: byte %d is not UTF-8", ErrInvalid, s, i)
			}
		}
		if r == ' ' || !unicode.IsPrint(r) {
			return fmt.Errorf("%w: NQN %q: character at byte %d is not printable", ErrInvalid, s, i)
		}
	}
	return nil
}

// ValidateNQN reports whether a name is one that may be given to something new:
// [CheckNQN], and of the form nqn.YYYY-MM.reverse.domain[:anything], with a real
// UUID if it claims the UUID form.
func ValidateNQN(s string) error {
	if err := CheckNQN(s); err != nil {
		return err
	}
	rest, ok := strings.CutPrefix(s, "nqn.")
	if !ok || len(rest) < len("YYYY-MM.x") || rest[4] != '-' || rest[7] != '.' ||
		!digits(rest[0:4]) || !digits(rest[5:7]) || rest[5:7] < "01" || rest[5:7] > "12" {
		return fmt.Errorf("%w: NQN %q: want nqn.YYYY-MM.reverse.domain:name", ErrInvalid, s)
	}
	domain, _, _ := strings.Cut(rest[8:], ":")
	for label := range strings.SplitSeq(domain, ".") {
		if !domainLabel(label) {
			return fmt.Errorf("%w: NQN %q: %q is no reversed domain name", ErrInvalid, s, domain)
		}
	}
	if UUIDFormBroken(s) {
		return fmt.Errorf("%w: NQN %q: what follows uuid: is no UUID", ErrInvalid, s)
	}
	return nil
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

func domainLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}
