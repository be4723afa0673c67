package initiator

import (
	"testing"

	"rdblk/rdma"
)

// whole is a connection that nothing has been heard of.
type whole struct{ rdma.Conn }

func (whole) Err() error { return nil }

// A connection that is lost in the middle of an attempt is one of the things that pass: a device may flush what was posted
// before it tells that the connection has ended, or find the peer gone itself.
func TestLostConnectionPasses(t *testing.T) {
	l := &lane{conn: whole{}}
	for status, want := range map[rdma.Status]bool{
		rdma.StatusFlush: true, rdma.StatusRetryExceeded: true, rdma.StatusRNRRetryExceeded: true,
		rdma.StatusLocalProtection: false, rdma.StatusRemoteAccess: false,
	} {
		err := &AttemptError{Op: "connect to", Err: l.failure(&rdma.WC{Status: status})}
		if err.Transient() != want {
			t.Errorf("%v: transient is %v", err, !want)
		}
	}
}
