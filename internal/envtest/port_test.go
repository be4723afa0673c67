package envtest

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

// The port refuses connections while nobody listens, can be listened on again and again, and is given to nobody else.
func TestPort(t *testing.T) {
	addr := Port(t).String()
	for range 3 {
		if c, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("%v, %v", c, err)
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		s.Close() // the end with TIME_WAIT is the server's
		c.Close()
		l.Close()
	}
	var all []net.Listener
	defer func() {
		for _, l := range all {
			l.Close()
		}
	}()
	for range 200 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, l); l.Addr().String() == addr {
			t.Fatal("given to somebody else")
		}
	}
}
