package envtest

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// Hex reads bytes that were captured: a file of hexadecimal digits, in which lines that
// begin with # are comments.
func Hex(t testing.TB, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var digits strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "#") {
			digits.WriteString(strings.TrimSpace(line))
		}
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil || len(b) == 0 {
		t.Fatalf("%s: %d bytes, %v", file, len(b), err)
	}
	return b
}
