package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel's generic netlink family "nbd" (linux/nbd-netlink.h): the few
// messages that an attachment needs. Numbers are in the machine's byte order, attributes padded to 4 bytes.

const (
	genlFamilyNBD  = "nbd"
	genlVersionNBD = 1

	genlConnect     = 1
	genlDisconnect  = 2
	genlReconfigure = 3
	genlStatus      = 5

	attrIndex       = 1  // u32
	attrSize        = 2  // u64, bytes
	attrBlockSize   = 3  // u64, bytes
	attrTimeout     = 4  // u64, s
	attrServerFlags = 5  // u64
	attrClientFlags = 6  // u64
	attrSockets     = 7  // nest of attrSockItem
	attrDeadConn    = 8  // u64, s
	attrDeviceList  = 9  // nest of attrDeviceItem
	attrBackend     = 10 // string

	attrSockItem = 1 // nest of attrSockFD
	attrSockFD   = 1 // u32

	attrDeviceItem      = 1 // nest of the two below
	attrDeviceIndex     = 1 // u32
	attrDeviceConnected = 2 // u8

	ctrlGetFamily      = 3
	ctrlAttrFamilyID   = 1 // u16
	ctrlAttrFamilyName = 2 // string

	attrTypeMask = 0x3fff // without NLA_F_NESTED and NLA_F_NET_BYTEORDER
	attrNested   = 0x8000

	nlHeaderSize   = 16
	genlHeaderSize = 4
	attrHeaderSize = 4
)

var (
	// errNoFamily: this kernel, or this network namespace, has no netlink family "nbd".
	errNoFamily = errors.New(`no netlink family "nbd"`)
	errMessage  = errors.New("netlink message is malformed")
)

func align4(n int) int { return (n + 3) &^ 3 }

// appendAttr appends an attribute with its padding.
func appendAttr(b []byte, typ uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeaderSize+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, data...)
	return append(b, make([]byte, align4(len(data))-len(data))...)
}

func appendU32(b []byte, typ uint16, v uint32) []byte {
	return appendAttr(b, typ, binary.NativeEndian.AppendUint32(nil, v))
}

func appendU64(b []byte, typ uint16, v uint64) []byte {
	return appendAttr(b, typ, binary.NativeEndian.AppendUint64(nil, v))
}

// eachAttr calls fn for all attributes in b. Lengths are strict: an attribute that reaches over
// the end, and bytes after the last one that are more than its padding, are errors.
func eachAttr(b []byte, fn func(typ uint16, data []byte) error) error {
	for len(b) > 0 {
		if len(b) < attrHeaderSize {
			return fmt.Errorf("%w: %d bytes are no attribute", errMessage, len(b))
		}
		n := int(binary.NativeEndian.Uint16(b))
		typ := binary.NativeEndian.Uint16(b[2:])
		if n < attrHeaderSize || n > len(b) {
			return fmt.Errorf("%w: attribute %d has %d of %d bytes", errMessage, typ&attrTypeMask, n, len(b))
		}
		if err := fn(typ&attrTypeMask, b[attrHeaderSize:n]); err != nil {
			return err
		}
		b = b[min(align4(n), len(b)):] // the last may lack its padding
	}
	return nil
}

func wantLen(typ uint16, data []byte, n int) error {
	if len(data) != n {
		return fmt.Errorf("%w: attribute %d has %d bytes of data, not %d", errMessage, typ, len(data), n)
	}
	return nil
}

// appendMessage appends a request to family with an acknowledgement asked for.
func appendMessage(b []byte, family uint16, seq uint32, cmd, version byte, attrs []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(nlHeaderSize+genlHeaderSize+len(attrs)))
	b = binary.NativeEndian.AppendUint16(b, family)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // port: the kernel fills it in
	b = append(b, cmd, version, 0, 0)
	return append(b, attrs...)
}

// A nlAnswer is what came back on a request.
type nlAnswer struct {
	done  bool       // the acknowledgement, or an error, has come
	errno unix.Errno // 0: done without error
	cmd   byte       // of the answer proper
	attrs []byte     // of the answer proper, nil if there was none
}

// add takes in a datagram from the kernel: messages on the request seq; others are passed over.
func (a *nlAnswer) add(b []byte, seq uint32) error {
	for len(b) > 0 {
		if len(b) < nlHeaderSize {
			return fmt.Errorf("%w: %d bytes are no message", errMessage, len(b))
		}
		n := binary.NativeEndian.Uint32(b)
		if n < nlHeaderSize || n > uint32(len(b)) {
			return fmt.Errorf("%w: it has %d of %d bytes", errMessage, n, len(b))
		}
		typ, got := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])
		body := b[nlHeaderSize:n]
		b = b[min(align4(int(n)), len(b)):]
		switch {
		case got != seq:
		case typ == unix.NLMSG_ERROR:
			if len(body) < 4 {
				return fmt.Errorf("%w: an error of %d bytes", errMessage, len(body))
			}
			e := int32(binary.NativeEndian.Uint32(body))
			if e > 0 || e < -4095 {
				return fmt.Errorf("%w: error number %d", errMessage, e)
			}
			a.done, a.errno = true, unix.Errno(-e)
		case typ < unix.NLMSG_MIN_TYPE: // NOOP, DONE, OVERRUN: nothing asks for them
		default:
			if len(body) < genlHeaderSize {
				return fmt.Errorf("%w: %d bytes are no generic message", errMessage, len(body))
			}
			a.cmd = body[0]
			a.attrs = append([]byte{}, body[genlHeaderSize:]...)
		}
	}
	return nil
}

// binding is what CONNECT and RECONFIGURE set. Strings and sockets that are empty are left out.
type binding struct {
	index       int
	size        uint64 // bytes
	blockSize   uint64 // bytes
	timeout     uint64 // s
	deadConn    uint64 // s
	serverFlags uint16 // transmission flags; CONNECT only
	backend     string
	sockets     []int // descriptors; the kernel takes references of its own
}

func (r *binding) attrs(cmd byte) []byte {
	b := appendU32(nil, attrIndex, uint32(r.index))
	b = appendU64(b, attrSize, r.size)
	b = appendU64(b, attrBlockSize, r.blockSize)
	b = appendU64(b, attrTimeout, r.timeout)
	b = appendU64(b, attrDeadConn, r.deadConn)
	b = appendU64(b, attrClientFlags, 0)
	if cmd == genlConnect {
		b = appendU64(b, attrServerFlags, uint64(r.serverFlags))
	}
	if r.backend != "" {
		b = appendAttr(b, attrBackend, append([]byte(r.backend), 0))
	}
	if len(r.sockets) > 0 {
		var items []byte
		for _, fd := range r.sockets {
			items = appendAttr(items, attrSockItem|attrNested, appendU32(nil, attrSockFD, uint32(fd)))
		}
		b = appendAttr(b, attrSockets|attrNested, items)
	}
	return b
}

// parseIndex takes the device's number out of the answer on CONNECT.
func parseIndex(attrs []byte) (index int, err error) {
	index = -1
	err = eachAttr(attrs, func(typ uint16, data []byte) error {
		if typ != attrIndex {
			return nil
		}
		if err := wantLen(typ, data, 4); err != nil {
			return err
		}
		v := binary.NativeEndian.Uint32(data)
		if v > maxIndex {
			return fmt.Errorf("%w: device number %d", errMessage, v)
		}
		index = int(v)
		return nil
	})
	if err == nil && index < 0 {
		err = fmt.Errorf("%w: no device number", errMessage)
	}
	return index, err
}

// parseStatus tells from the answer on STATUS which devices are connected.
func parseStatus(attrs []byte) (map[int]bool, error) {
	m := map[int]bool{}
	err := eachAttr(attrs, func(typ uint16, list []byte) error {
		if typ != attrDeviceList {
			return nil
		}
		return eachAttr(list, func(typ uint16, item []byte) error {
			if typ != attrDeviceItem {
				return nil
			}
			index, connected := -1, false
			if err := eachAttr(item, func(typ uint16, data []byte) error {
				switch typ {
				case attrDeviceIndex:
					if err := wantLen(typ, data, 4); err != nil {
						return err
					}
					v := binary.NativeEndian.Uint32(data)
					if v > maxIndex {
						return fmt.Errorf("%w: device number %d", errMessage, v)
					}
					index = int(v)
				case attrDeviceConnected:
					if err := wantLen(typ, data, 1); err != nil {
						return err
					}
					connected = data[0] != 0
				}
				return nil
			}); err != nil {
				return err
			}
			if index < 0 {
				return fmt.Errorf("%w: a device without number", errMessage)
			}
			m[index] = connected
			return nil
		})
	})
	return m, err
}

// parseFamily takes the number of a family out of the controller's answer.
func parseFamily(attrs []byte) (id uint16, err error) {
	err = eachAttr(attrs, func(typ uint16, data []byte) error {
		if typ != ctrlAttrFamilyID {
			return nil
		}
		if err := wantLen(typ, data, 2); err != nil {
			return err
		}
		id = binary.NativeEndian.Uint16(data)
		return nil
	})
	if err == nil && id < unix.NLMSG_MIN_TYPE {
		err = fmt.Errorf("%w: family number %d", errMessage, id)
	}
	return id, err
}

const (
	// netlinkTimeout bounds the wait for an answer. The kernel answers before the request's
	// system call returns; this is for one that does not answer at all.
	netlinkTimeout = 5 * time.Second
	// maxAnswer is the room for an answer: the status of some thousand devices.
	maxAnswer = 256 << 10
)

// ask sends a request on a socket of its own and waits for the answer.
func ask(family uint16, cmd, version byte, attrs []byte) (*nlAnswer, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, os.NewSyscallError("netlink socket", err)
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(int64(netlinkTimeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return nil, os.NewSyscallError("netlink timeout", err)
	}
	const seq = 1
	if err := unix.Sendto(fd, appendMessage(nil, family, seq, cmd, version, attrs), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, os.NewSyscallError("netlink send", err)
	}
	a := &nlAnswer{}
	buf := make([]byte, maxAnswer)
	for end := time.Now().Add(netlinkTimeout); !a.done; {
		if time.Now().After(end) {
			return nil, fmt.Errorf("netlink: no answer within %v", netlinkTimeout)
		}
		n, _, flags, from, err := unix.Recvmsg(fd, buf, nil, 0)
		if err == unix.EINTR {
			continue
		}
		if err == unix.EAGAIN {
			return nil, fmt.Errorf("netlink: no answer within %v", netlinkTimeout)
		}
		if err != nil {
			return nil, os.NewSyscallError("netlink receive", err)
		}
		if k, ok := from.(*unix.SockaddrNetlink); !ok || k.Pid != 0 {
			continue // not the kernel
		}
		if flags&unix.MSG_TRUNC != 0 {
			return nil, fmt.Errorf("%w: it is longer than %d bytes", errMessage, maxAnswer)
		}
		if err := a.add(buf[:n], seq); err != nil {
			return nil, err
		}
	}
	if a.errno != 0 {
		return nil, a.errno
	}
	return a, nil
}

// lookupFamily gives the number of the family "nbd"; errNoFamily if there is none.
func lookupFamily() (uint16, error) {
	a, err := ask(unix.GENL_ID_CTRL, ctrlGetFamily, 1, appendAttr(nil, ctrlAttrFamilyName, append([]byte(genlFamilyNBD), 0)))
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return 0, errNoFamily
	case err != nil:
		return 0, err
	}
	return parseFamily(a.attrs)
}

// netlinkBinder binds devices by netlink.
type netlinkBinder struct{ family uint16 }

func (n *netlinkBinder) method() string { return "netlink" }

func (n *netlinkBinder) connect(r *binding) error {
	a, err := ask(n.family, genlConnect, genlVersionNBD, r.attrs(genlConnect))
	if err != nil {
		return err
	}
	got, err := parseIndex(a.attrs)
	if err == nil && got != r.index {
		err = fmt.Errorf("asked for device %d, the kernel bound %d", r.index, got)
	}
	return err
}

func (n *netlinkBinder) reconfigure(r *binding) error {
	_, err := ask(n.family, genlReconfigure, genlVersionNBD, r.attrs(genlReconfigure))
	return err
}

func (n *netlinkBinder) disconnect(index int) error {
	_, err := ask(n.family, genlDisconnect, genlVersionNBD, appendU32(nil, attrIndex, uint32(index)))
	return err
}

func (n *netlinkBinder) connected(index int) (bool, error) {
	a, err := ask(n.family, genlStatus, genlVersionNBD, appendU32(nil, attrIndex, uint32(index)))
	if err != nil {
		return false, err
	}
	m, err := parseStatus(a.attrs)
	return m[index], err
}
