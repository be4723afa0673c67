package protocol

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// statusConstants reads the constants of type Status from status.go, so that a
// new one cannot be forgotten in the tables.
func statusConstants(t *testing.T) map[string]Status {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "status.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]Status{}
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			if id, ok := v.Type.(*ast.Ident); !ok || id.Name != "Status" {
				continue
			}
			n, err := strconv.ParseUint(v.Values[0].(*ast.BasicLit).Value, 0, 16)
			if err != nil {
				t.Fatal(err)
			}
			all[v.Names[0].Name] = Status(n)
		}
	}
	for _, flag := range []string{"StatusCodeMask", "StatusCRDMask", "StatusMore", "StatusDNR"} {
		if _, ok := all[flag]; !ok {
			t.Fatalf("no constant %s", flag)
		}
		delete(all, flag)
	}
	return all
}

// TestStatusNumbers has the numbers of the specification's status tables, taken
// from the implementer's notes and libnvme, not from status.go.
func TestStatusNumbers(t *testing.T) {
	want := map[Status]int{
		StatusSuccess: 0x00, StatusInvalidOpcode: 0x01, StatusInvalidField: 0x02, StatusCommandIDConflict: 0x03,
		StatusDataTransferError: 0x04, StatusAbortedPowerLoss: 0x05, StatusInternalError: 0x06, StatusAbortRequested: 0x07,
		StatusAbortedSQDeletion: 0x08, StatusAbortedFailedFused: 0x09, StatusAbortedMissingFused: 0x0A,
		StatusInvalidNamespace: 0x0B, StatusCommandSequenceError: 0x0C, StatusInvalidSGLSegment: 0x0D,
		StatusInvalidSGLCount: 0x0E, StatusDataSGLLengthInvalid: 0x0F, StatusMetadataSGLLengthInvalid: 0x10,
		StatusSGLTypeInvalid: 0x11, StatusInvalidCMBUse: 0x12, StatusPRPOffsetInvalid: 0x13,
		StatusAtomicWriteUnitExceeded: 0x14, StatusOperationDenied: 0x15, StatusSGLOffsetInvalid: 0x16,
		StatusHostIDInconsistent: 0x18, StatusKeepAliveExpired: 0x19, StatusKeepAliveInvalid: 0x1A,
		StatusAbortedPreempt: 0x1B, StatusSanitizeFailed: 0x1C, StatusSanitizeInProgress: 0x1D,
		StatusSGLGranularityInvalid: 0x1E, StatusNotSupportedInCMBQueue: 0x1F, StatusNamespaceWriteProtected: 0x20,
		StatusCommandInterrupted: 0x21, StatusTransientTransportError: 0x22, StatusProhibitedByLockdown: 0x23,
		StatusAdminMediaNotReady: 0x24, StatusInvalidIOCommandSetGeneric: 0x2C, StatusLBAOutOfRange: 0x80,
		StatusCapacityExceeded: 0x81, StatusNamespaceNotReady: 0x82, StatusReservationConflict: 0x83, StatusFormatInProgress: 0x84,

		StatusCQInvalid: 0x100, StatusInvalidQueueID: 0x101, StatusInvalidQueueSize: 0x102, StatusAbortLimitExceeded: 0x103,
		StatusAsyncEventLimitExceeded: 0x105, StatusInvalidFirmwareSlot: 0x106, StatusInvalidFirmwareImage: 0x107,
		StatusInvalidInterruptVector: 0x108, StatusInvalidLogPage: 0x109, StatusInvalidFormat: 0x10A,
		StatusFirmwareConventionalReset: 0x10B, StatusInvalidQueueDeletion: 0x10C,
		StatusFeatureNotSaveable: 0x10D, StatusFeatureNotChangeable: 0x10E, StatusFeatureNotNamespace: 0x10F,
		StatusFirmwareSubsystemReset: 0x110, StatusFirmwareReset: 0x111, StatusFirmwareMaxTime: 0x112, StatusFirmwareProhibited: 0x113,
		StatusOverlappingRange: 0x114, StatusNamespaceNoCapacity: 0x115, StatusNamespaceIDUnavailable: 0x116,
		StatusNamespaceAlreadyAttached: 0x118, StatusNamespacePrivate: 0x119, StatusNamespaceNotAttached: 0x11A,
		StatusThinProvisioningNotSupported: 0x11B, StatusControllerListInvalid: 0x11C, StatusSelfTestInProgress: 0x11D,
		StatusBootPartitionProhibited: 0x11E, StatusInvalidControllerID: 0x11F, StatusInvalidSecondaryState: 0x120,
		StatusInvalidControllerResources: 0x121, StatusInvalidResourceID: 0x122, StatusSanitizeProhibitedPMR: 0x123,
		StatusANAGroupIDInvalid: 0x124, StatusANAAttachFailed: 0x125, StatusInsufficientCapacity: 0x126,
		StatusNamespaceAttachLimit: 0x127, StatusProhibitNotSupported: 0x128, StatusIOCommandSetNotSupported: 0x129,
		StatusIOCommandSetNotEnabled: 0x12A, StatusIOCommandSetCombination: 0x12B, StatusInvalidIOCommandSet: 0x12C,
		StatusIDUnavailable: 0x12D,

		StatusConflictingAttributes: 0x180, StatusInvalidPI: 0x181, StatusWriteToReadOnlyRange: 0x182, StatusCommandSizeExceeded: 0x183,
		StatusConnectInvalidHost: 0x184, StatusDisconnectInvalidQueueType: 0x185, StatusDiscoveryRestart: 0x190,
		StatusAuthenticationRequired: 0x191,

		StatusWriteFault: 0x280, StatusUnrecoveredRead: 0x281, StatusGuardCheckError: 0x282, StatusAppTagCheckError: 0x283,
		StatusRefTagCheckError: 0x284, StatusCompareFailure: 0x285, StatusAccessDenied: 0x286, StatusDeallocatedBlock: 0x287,
		StatusStorageTagCheckError: 0x288,

		StatusInternalPathError: 0x300, StatusANAPersistentLoss: 0x301, StatusANAInaccessible: 0x302, StatusANATransition: 0x303,
		StatusControllerPathError: 0x360, StatusHostPathError: 0x370, StatusAbortedByHost: 0x371,
	}
	for s, n := range want {
		if int(s) != n {
			t.Errorf("%v is %#x, want %#x", s, int(s), n)
		}
	}
	if StatusConnectIncompatibleFormat != 0x180 || StatusConnectControllerBusy != 0x181 ||
		StatusConnectInvalidParameters != 0x182 || StatusConnectRestartDiscovery != 0x183 {
		t.Error("connect status numbers")
	}
	for name, s := range statusConstants(t) {
		if _, ok := want[s]; !ok {
			t.Errorf("%s (%#x) is not in the table", name, int(s))
		}
		for _, fabrics := range []bool{false, true} {
			if n := s.Name(fabrics); n == "" || strings.Contains(n, "SCT") {
				t.Errorf("%s has no name", name)
			}
		}
	}
	seen := map[string]Status{}
	for s, n := range statusNames {
		if other, dup := seen[n]; dup && s.Code() != StatusInvalidIOCommandSet && other != StatusInvalidIOCommandSet {
			t.Errorf("%#x and %#x are both %q", int(s), int(other), n)
		}
		seen[n] = s
	}
}

func TestStatusText(t *testing.T) {
	for s, want := range map[Status]string{
		StatusSuccess:                                   "success (0x0)",
		StatusInvalidField.WithDNR():                    "invalid field in command (0x2, do not retry)",
		StatusNamespaceNotReady.WithCRD(2) | StatusMore: "namespace not ready (0x82, retry delay 2)",
		StatusConnectInvalidHost:                        "connect invalid host (0x184)",
		StatusCommandSizeExceeded:                       "command size limit exceeded or connect restart discovery (0x183)",
		0x7C5:                                           "status SCT 7 SC 0xc5 (0x7c5)",
	} {
		if got := s.Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got, want := (FabricsError{StatusConnectRestartDiscovery}).Error(), "connect restart discovery (0x183)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestStatusBits walks through every status and its wire form.
func TestStatusBits(t *testing.T) {
	for v := range 1 << 16 {
		s := StatusFromWire(uint16(v))
		if s > 0x7FFF {
			t.Fatalf("%#x: %#x has the phase in it", v, int(s))
		}
		if got := s.Wire(v&1 != 0); got != uint16(v) {
			t.Fatalf("%#x: wire form %#x", v, got)
		}
		if int(s.SC()) != v>>1&0xFF || int(s.SCT()) != v>>9&7 || int(s.CRD()) != v>>12&3 ||
			s.More() != (v>>14&1 == 1) || s.DoNotRetry() != (v>>15&1 == 1) {
			t.Fatalf("%#x: SC %#x SCT %d CRD %d more %v dnr %v", v, s.SC(), s.SCT(), s.CRD(), s.More(), s.DoNotRetry())
		}
		if s.OK() != (v>>1&0x7FF == 0) || (s.Err() == nil) != s.OK() {
			t.Fatalf("%#x: OK %v, Err %v", v, s.OK(), s.Err())
		}
		var e Completion
		e.SetStatus(s)
		if e.Status() != s || e.Phase() {
			t.Fatalf("%#x: completion %v %v", v, e.Status(), e.Phase())
		}
	}
	s := StatusInternalError.WithDNR().WithCRD(3)
	if s != 0x5806 || s.WithoutDNR() != 0x1806 || s.WithCRD(0) != 0x4006 || s.Code() != StatusInternalError {
		t.Errorf("flags: %#x", int(s))
	}
	if StatusSuccess.WithDNR() != StatusSuccess {
		t.Error("success with DNR")
	}
}

func TestStatusIsError(t *testing.T) {
	err := fmt.Errorf("read: %w", StatusUnrecoveredRead.WithDNR()|StatusMore)
	if !errors.Is(err, StatusUnrecoveredRead) {
		t.Error("flags matter to errors.Is")
	}
	if errors.Is(err, StatusWriteFault) || errors.Is(err, StatusSuccess) {
		t.Error("another code matches")
	}
	if !errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENOSPC) {
		t.Error("the errno inside is not found")
	}
	var s Status
	if !errors.As(err, &s) || !s.DoNotRetry() || !s.More() {
		t.Errorf("errors.As: %v", s)
	}
	var e syscall.Errno
	if !errors.As(err, &e) || e != syscall.EIO {
		t.Errorf("errors.As: %v", e)
	}
	if !errors.Is(FabricsError{StatusConnectInvalidHost}, StatusConnectInvalidHost) {
		t.Error("FabricsError hides its status")
	}
	if !errors.Is(StatusAccessDenied, fs.ErrPermission) {
		t.Error("access denied is no permission error")
	}
	if StatusSuccess.Unwrap() != nil {
		t.Error("success has an errno")
	}
}

// TestStatusFromErrno is the whole mapping, by kind of command.
func TestStatusFromErrno(t *testing.T) {
	type row struct{ read, write, flush, dsm, zeroes Status }
	all := func(s Status) row { return row{s, s, s, s, s} }
	media := row{StatusUnrecoveredRead | StatusDNR, StatusWriteFault | StatusDNR, StatusWriteFault | StatusDNR,
		StatusWriteFault | StatusDNR, StatusWriteFault | StatusDNR}
	unsupported := row{StatusInvalidOpcode | StatusDNR, StatusInvalidOpcode | StatusDNR, StatusInvalidOpcode | StatusDNR,
		StatusCommandSizeExceeded | StatusDNR, StatusCommandSizeExceeded | StatusDNR}
	want := map[syscall.Errno]row{
		0:                    all(StatusSuccess),
		syscall.ENOSPC:       all(0x4081),
		syscall.EDQUOT:       all(0x4081),
		syscall.EFBIG:        all(0x4081),
		syscall.EREMOTEIO:    all(0x4080),
		syscall.EROFS:        all(0x4020),
		syscall.EPERM:        all(0x4286),
		syscall.EACCES:       all(0x4286),
		syscall.EOPNOTSUPP:   unsupported,
		syscall.ENOSYS:       unsupported,
		syscall.ENOTTY:       unsupported,
		syscall.EIO:          media,
		syscall.ENODATA:      media,
		syscall.EILSEQ:       media,
		syscall.EBADMSG:      media,
		syscall.EUCLEAN:      media,
		syscall.EBADE:        all(0x4083),
		syscall.ENOMEM:       all(0x0006),
		syscall.EAGAIN:       all(0x0082),
		syscall.EBUSY:        all(0x0082),
		syscall.EINTR:        all(0x0082),
		syscall.ETIMEDOUT:    all(0x0082),
		syscall.ENODEV:       all(0x0300),
		syscall.ENXIO:        all(0x0300),
		syscall.ENOLINK:      all(0x0300),
		syscall.ESHUTDOWN:    all(0x0300),
		syscall.ENOTCONN:     all(0x0300),
		syscall.ECONNRESET:   all(0x0300),
		syscall.ECONNABORTED: all(0x0300),
		syscall.EPIPE:        all(0x0300),
		syscall.ENETDOWN:     all(0x0300),
		syscall.ENETUNREACH:  all(0x0300),
		syscall.EHOSTDOWN:    all(0x0300),
		syscall.EHOSTUNREACH: all(0x0300),
		syscall.ESTALE:       all(0x0300),
	}
	for e := range syscall.Errno(256) {
		w, ok := want[e]
		if !ok {
			w = all(0x4006)
		}
		got := row{StatusFromErrno(OpRead, e), StatusFromErrno(OpWrite, e), StatusFromErrno(OpFlush, e),
			StatusFromErrno(OpDatasetManagement, e), StatusFromErrno(OpWriteZeroes, e)}
		if got != w {
			t.Errorf("%v: %+v, want %+v", e, got, w)
		}
		if e != 0 && got.write.OK() {
			t.Errorf("%v is a success", e)
		}
	}
	for _, op := range []Opcode{OpCompare, OpVerify} {
		if got := StatusFromErrno(op, syscall.EIO); got != StatusUnrecoveredRead|StatusDNR {
			t.Errorf("%v: %v", op, got)
		}
	}
}

func TestStatusFromError(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want Status
	}{
		{"nil", nil, StatusSuccess},
		{"errno", syscall.ENOSPC, 0x4081},
		{"path error", &fs.PathError{Op: "write", Path: "/x", Err: syscall.EIO}, 0x4280},
		{"status", fmt.Errorf("remote: %w", StatusNamespaceNotReady), StatusNamespaceNotReady},
		{"status keeps its flags", StatusInternalError.WithCRD(1), StatusInternalError.WithCRD(1)},
		{"fabrics", FabricsError{StatusInternalError}, StatusInternalError},
		{"end of file", fmt.Errorf("x: %w", io.ErrUnexpectedEOF), 0x4280},
		{"unknown", errors.New("what"), 0x4006},
		// An error that claims to be a success must not become one.
		{"success as an error", StatusSuccess, 0x4006},
		{"errno 0 as an error", syscall.Errno(0), 0x4006},
	} {
		if got := StatusFromError(OpWrite, tc.err); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
	if got := StatusFromError(OpRead, io.EOF); got != 0x4281 {
		t.Errorf("read: end of file: %v", got)
	}
}

func TestStatusErrno(t *testing.T) {
	want := map[Status]syscall.Errno{
		StatusSuccess:                 0,
		StatusCapacityExceeded:        syscall.ENOSPC,
		StatusLBAOutOfRange:           syscall.EREMOTEIO,
		StatusNamespaceNotReady:       syscall.EREMOTEIO,
		StatusCommandInterrupted:      syscall.EREMOTEIO,
		StatusNamespaceWriteProtected: syscall.EROFS,
		StatusWriteToReadOnlyRange:    syscall.EROFS,
		StatusInvalidNamespace:        syscall.ENODEV,
		StatusInvalidOpcode:           syscall.EOPNOTSUPP,
		StatusInvalidField:            syscall.EOPNOTSUPP,
		StatusConflictingAttributes:   syscall.EOPNOTSUPP,
		StatusCommandSizeExceeded:     syscall.EOPNOTSUPP,
		StatusGuardCheckError:         syscall.EILSEQ,
		StatusAppTagCheckError:        syscall.EILSEQ,
		StatusRefTagCheckError:        syscall.EILSEQ,
		StatusStorageTagCheckError:    syscall.EILSEQ,
		StatusCompareFailure:          syscall.EILSEQ,
		StatusInvalidPI:               syscall.EILSEQ,
		StatusAccessDenied:            syscall.EACCES,
		StatusOperationDenied:         syscall.EACCES,
		StatusConnectInvalidHost:      syscall.EACCES,
		StatusAuthenticationRequired:  syscall.EACCES,
		StatusDeallocatedBlock:        syscall.ENODATA,
		StatusReservationConflict:     syscall.EBADE,
		StatusAbortedByHost:           syscall.ECANCELED,
		StatusTransientTransportError: syscall.ENOLINK,
	}
	for code := range Status(0x800) {
		w, ok := want[code]
		switch {
		case ok:
		case code>>8 == SCTPath:
			w = syscall.ENOLINK
		default:
			w = syscall.EIO
		}
		for _, flags := range []Status{0, StatusDNR, StatusMore, StatusCRDMask} {
			if got := (code | flags).Errno(); got != w {
				t.Errorf("%v: %v, want %v", code|flags, got, w)
			}
		}
	}
}

// TestErrnoRoundTrip: what a back end reports is what the other side reads, for
// the conditions that mean something to an application.
func TestErrnoRoundTrip(t *testing.T) {
	for _, e := range []syscall.Errno{syscall.ENOSPC, syscall.EROFS, syscall.EIO, syscall.EREMOTEIO,
		syscall.EOPNOTSUPP, syscall.EACCES, syscall.EBADE, syscall.ENOLINK} {
		for _, op := range []Opcode{OpRead, OpWrite, OpFlush, OpWriteZeroes, OpDatasetManagement} {
			if got := StatusFromErrno(op, e).Errno(); got != e {
				t.Errorf("%v: %v comes back as %v", op, e, got)
			}
		}
	}
}
