package nbdtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Numbers of the protocol, written down from proto.md.
const (
	OptExportName      = 1
	OptAbort           = 2
	OptList            = 3
	OptStartTLS        = 5
	OptInfo            = 6
	OptGo              = 7
	OptStructuredReply = 8
	OptListMetaContext = 9
	OptSetMetaContext  = 10
	OptExtendedHeaders = 11

	RepAck           = 1
	RepServer        = 2
	RepInfo          = 3
	RepErrUnsup      = 1<<31 + 1
	RepErrPolicy     = 1<<31 + 2
	RepErrInvalid    = 1<<31 + 3
	RepErrPlatform   = 1<<31 + 4
	RepErrTLSReqd    = 1<<31 + 5
	RepErrUnknown    = 1<<31 + 6
	RepErrShutdown   = 1<<31 + 7
	RepErrBlockSize  = 1<<31 + 8
	RepErrTooBig     = 1<<31 + 9
	InfoExport       = 0
	InfoName         = 1
	InfoDescription  = 2
	InfoBlockSize    = 3
	ClientFixed      = 1
	ClientNoZeroes   = 2
	CmdRead          = 0
	CmdWrite         = 1
	CmdDisc          = 2
	CmdFlush         = 3
	CmdTrim          = 4
	CmdCache         = 5
	CmdWriteZeroes   = 6
	CmdBlockStatus   = 7
	FlagHasFlags     = 1 << 0
	FlagReadOnly     = 1 << 1
	FlagFlush        = 1 << 2
	FlagFUA          = 1 << 3
	FlagRotational   = 1 << 4
	FlagTrim         = 1 << 5
	FlagWriteZeroes  = 1 << 6
	FlagDF           = 1 << 7
	FlagMultiConn    = 1 << 8
	CmdFlagFUA       = 1 << 0
	CmdFlagNoHole    = 1 << 1
	CmdFlagDF        = 1 << 2
	CmdFlagReqOne    = 1 << 3
	CmdFlagFastZero  = 1 << 4
	EPERM            = 1
	EIO              = 5
	EINVAL           = 22
	ENOSPC           = 28
	EOVERFLOW        = 75
	ESHUTDOWN        = 108
	magicRequest     = 0x25609513
	magicSimple      = 0x67446698
	magicStructured  = 0x668e33ef
	magicInit        = "NBDMAGIC"
	magicOption      = "IHAVEOPT"
	magicOptionReply = 0x3e889045565a9
)

// Info is what the server told about an export.
type Info struct {
	Size                        uint64
	Flags                       uint16
	Name, Description           string
	HasName, HasDescription     bool
	HasBlockSize                bool
	Minimum, Preferred, Maximum uint32
}

// OptionError is an error reply to an option.
type OptionError struct {
	Option, Type uint32
	Text         string
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("option %d: error %d: %s", e.Option, e.Type&^(1<<31), e.Text)
}

// Client is a connection that is driven message by message. It checks every byte
// that the server sends. Sending and receiving may be done by two goroutines.
type Client struct {
	net.Conn
	Structured bool
	Info       Info

	mu      sync.Mutex
	pending map[uint64]pendingRequest
}

type pendingRequest struct {
	cmd    uint16
	off    uint64
	length uint32
}

// A Reply is the whole answer to one request.
type Reply struct {
	Cookie uint64
	Errno  uint32
	Text   string // with a structured error
	Data   []byte // READ
}

// Connect opens a connection and exchanges the greeting with the client flags given.
func Connect(network, addr string, flags uint32) (*Client, error) {
	nc, err := net.DialTimeout(network, addr, 10*time.Second)
	if err != nil {
		return nil, err
	}
	c := &Client{Conn: nc, pending: map[uint64]pendingRequest{}}
	if err := c.greet(flags); err != nil {
		nc.Close()
		return nil, err
	}
	return c, nil
}

// InTransmission makes a client of a connection that has no handshake, as the kernel's have none.
func InTransmission(nc net.Conn) *Client {
	return &Client{Conn: nc, pending: map[uint64]pendingRequest{}}
}

// Open connects and enters transmission for the export by NBD_OPT_GO.
func Open(network, addr, export string, structured bool) (*Client, error) {
	c, err := Connect(network, addr, ClientFixed|ClientNoZeroes)
	if err != nil {
		return nil, err
	}
	if structured {
		err = c.StructuredReply()
	}
	if err == nil {
		err = c.Go(export)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) greet(flags uint32) error {
	var b [18]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return fmt.Errorf("greeting: %w", err)
	}
	if string(b[:8]) != magicInit || string(b[8:16]) != magicOption {
		return fmt.Errorf("greeting %q", b[:16])
	}
	if f := binary.BigEndian.Uint16(b[16:]); f != 3 {
		return fmt.Errorf("handshake flags %#x, not FIXED_NEWSTYLE|NO_ZEROES", f)
	}
	_, err := c.Write(binary.BigEndian.AppendUint32(nil, flags))
	return err
}

// SendOption sends one option.
func (c *Client) SendOption(opt uint32, data []byte) error {
	b := append([]byte(magicOption), make([]byte, 8)...)
	binary.BigEndian.PutUint32(b[8:], opt)
	binary.BigEndian.PutUint32(b[12:], uint32(len(data)))
	_, err := c.Write(append(b, data...))
	return err
}

// ReadOptionReply reads one reply to an option.
func (c *Client) ReadOptionReply(opt uint32) (typ uint32, data []byte, err error) {
	var b [20]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return 0, nil, err
	}
	if m := binary.BigEndian.Uint64(b[:]); m != magicOptionReply {
		return 0, nil, fmt.Errorf("option reply with magic number %#x", m)
	}
	if o := binary.BigEndian.Uint32(b[8:]); o != opt {
		return 0, nil, fmt.Errorf("reply to option %d when %d was sent", o, opt)
	}
	typ = binary.BigEndian.Uint32(b[12:])
	n := binary.BigEndian.Uint32(b[16:])
	if n > 1<<20 {
		return 0, nil, fmt.Errorf("option reply of %d bytes", n)
	}
	data = make([]byte, n)
	_, err = io.ReadFull(c, data)
	return typ, data, err
}

// Ask sends an option and reads its replies up to the final one; an error reply is an *OptionError.
func (c *Client) Ask(opt uint32, data []byte, each func(typ uint32, data []byte) error) error {
	if err := c.SendOption(opt, data); err != nil {
		return err
	}
	for {
		typ, d, err := c.ReadOptionReply(opt)
		switch {
		case err != nil:
			return err
		case typ == RepAck:
			if len(d) != 0 {
				return fmt.Errorf("ACK with %d bytes of data", len(d))
			}
			return nil
		case typ&(1<<31) != 0:
			return &OptionError{opt, typ, string(d)}
		case each == nil:
			return fmt.Errorf("option %d: reply of type %d", opt, typ)
		}
		if err := each(typ, d); err != nil {
			return err
		}
	}
}

// StructuredReply negotiates structured replies.
func (c *Client) StructuredReply() error {
	err := c.Ask(OptStructuredReply, nil, nil)
	c.Structured = err == nil
	return err
}

// InfoData is the data of OptInfo and OptGo.
func InfoData(export string, requests ...uint16) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(export)))
	b = append(b, export...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(requests)))
	for _, r := range requests {
		b = binary.BigEndian.AppendUint16(b, r)
	}
	return b
}

// Query asks for an export's information by opt, OptInfo or OptGo.
func (c *Client) Query(opt uint32, export string, requests ...uint16) (Info, error) {
	var in Info
	hasExport := false
	err := c.Ask(opt, InfoData(export, requests...), func(typ uint32, d []byte) error {
		if typ != RepInfo || len(d) < 2 {
			return fmt.Errorf("reply of type %d with %d bytes", typ, len(d))
		}
		switch binary.BigEndian.Uint16(d) {
		case InfoExport:
			if len(d) != 12 || hasExport {
				return fmt.Errorf("INFO_EXPORT of %d bytes", len(d))
			}
			hasExport = true
			in.Size, in.Flags = binary.BigEndian.Uint64(d[2:]), binary.BigEndian.Uint16(d[10:])
		case InfoName:
			in.Name, in.HasName = string(d[2:]), true
		case InfoDescription:
			in.Description, in.HasDescription = string(d[2:]), true
		case InfoBlockSize:
			if len(d) != 14 {
				return fmt.Errorf("INFO_BLOCK_SIZE of %d bytes", len(d))
			}
			in.HasBlockSize = true
			in.Minimum, in.Preferred, in.Maximum = binary.BigEndian.Uint32(d[2:]), binary.BigEndian.Uint32(d[6:]), binary.BigEndian.Uint32(d[10:])
		}
		return nil
	})
	if err == nil && !hasExport {
		err = errors.New("ACK without INFO_EXPORT")
	}
	return in, err
}

// Go enters transmission.
func (c *Client) Go(export string) error {
	in, err := c.Query(OptGo, export, InfoBlockSize)
	c.Info = in
	return err
}

// ExportName enters transmission the old way; zeroes tells whether 124 zeros follow.
func (c *Client) ExportName(export string, zeroes bool) error {
	if err := c.SendOption(OptExportName, []byte(export)); err != nil {
		return err
	}
	b := make([]byte, 10)
	if zeroes {
		b = make([]byte, 134)
	}
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if !bytes.Equal(b[10:], make([]byte, len(b)-10)) {
		return errors.New("reserved bytes are not zero")
	}
	c.Info = Info{Size: binary.BigEndian.Uint64(b), Flags: binary.BigEndian.Uint16(b[8:])}
	return nil
}

// Header is a request header.
func Header(flags, cmd uint16, cookie, off uint64, length uint32) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 28), magicRequest)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, cmd)
	b = binary.BigEndian.AppendUint64(b, cookie)
	b = binary.BigEndian.AppendUint64(b, off)
	return binary.BigEndian.AppendUint32(b, length)
}

// Expect notes a request that is sent by hand, so that ReadReply knows its answer.
func (c *Client) Expect(cmd uint16, cookie, off uint64, length uint32) {
	c.mu.Lock()
	c.pending[cookie] = pendingRequest{cmd, off, length}
	c.mu.Unlock()
}

// Send sends a request with its payload, if it has one.
func (c *Client) Send(flags, cmd uint16, cookie, off uint64, length uint32, payload []byte) error {
	c.Expect(cmd, cookie, off, length)
	_, err := c.Write(append(Header(flags, cmd, cookie, off, length), payload...))
	return err
}

// Pending is the number of requests without an answer.
func (c *Client) Pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending)
}

// ReadReply reads the whole reply to any pending request. The error is for what
// breaks the protocol or the connection; a request's failure is in the Reply.
func (c *Client) ReadReply() (Reply, error) {
	var r Reply
	var data []byte
	covered := uint64(0)
	for first := true; ; first = false {
		var b [20]byte
		if _, err := io.ReadFull(c, b[:4]); err != nil {
			return r, err
		}
		magic := binary.BigEndian.Uint32(b[:])
		n := 16
		if magic == magicStructured {
			n = 20
		} else if magic != magicSimple {
			return r, fmt.Errorf("reply with magic number %#x", magic)
		}
		if _, err := io.ReadFull(c, b[4:n]); err != nil {
			return r, fmt.Errorf("inside a reply: %w", err)
		}
		cookie := binary.BigEndian.Uint64(b[8:])
		c.mu.Lock()
		p, ok := c.pending[cookie]
		c.mu.Unlock()
		if !ok || !first && cookie != r.Cookie {
			return r, fmt.Errorf("reply with cookie %#x that is not pending (or chunks are interleaved)", cookie)
		}
		r.Cookie = cookie
		done := true
		if magic == magicSimple {
			if c.Structured && p.cmd == CmdRead {
				return r, errors.New("simple reply to READ although structured replies were negotiated")
			}
			if r.Errno = binary.BigEndian.Uint32(b[4:]); r.Errno == 0 && p.cmd == CmdRead {
				data = make([]byte, p.length)
				if _, err := io.ReadFull(c, data); err != nil {
					return r, fmt.Errorf("inside the data of a reply: %w", err)
				}
				covered = uint64(p.length)
			}
		} else {
			if !c.Structured {
				return r, errors.New("structured reply that was not negotiated")
			}
			flags, typ, size := binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:]), binary.BigEndian.Uint32(b[16:])
			if flags&^1 != 0 {
				return r, fmt.Errorf("reply flags %#x", flags)
			}
			done = flags&1 != 0
			if size > 64<<20 {
				return r, fmt.Errorf("chunk of %d bytes", size)
			}
			body := make([]byte, size)
			if _, err := io.ReadFull(c, body); err != nil {
				return r, fmt.Errorf("inside a chunk: %w", err)
			}
			switch {
			case typ == 0 && size == 0 && done:
			case typ == 1 && size >= 9 && p.cmd == CmdRead:
				off := binary.BigEndian.Uint64(body)
				n := uint64(size - 8)
				if off < p.off || off-p.off > uint64(p.length) || n > uint64(p.length)-(off-p.off) {
					return r, fmt.Errorf("data chunk of %d bytes at %d for a request of %d at %d", n, off, p.length, p.off)
				}
				if data == nil {
					data = make([]byte, p.length)
				}
				copy(data[off-p.off:], body[8:])
				covered += n
			case typ == 1<<15+1 && size >= 6:
				m := uint32(binary.BigEndian.Uint16(body[4:]))
				if m > size-6 {
					return r, fmt.Errorf("error chunk of %d bytes with a text of %d", size, m)
				}
				if r.Errno = binary.BigEndian.Uint32(body); r.Errno == 0 {
					return r, errors.New("error chunk without an error")
				}
				r.Text = string(body[6 : 6+m])
			default:
				return r, fmt.Errorf("chunk of type %d with %d bytes for command %d", typ, size, p.cmd)
			}
		}
		if !done {
			continue
		}
		if p.cmd == CmdRead && r.Errno == 0 && covered != uint64(p.length) {
			return r, fmt.Errorf("success for %d of %d bytes", covered, p.length)
		}
		if r.Errno == 0 {
			r.Data = data
		}
		c.mu.Lock()
		delete(c.pending, cookie)
		c.mu.Unlock()
		return r, nil
	}
}

// Do sends one request and reads its reply. No other may be pending.
func (c *Client) Do(flags, cmd uint16, off uint64, length uint32, payload []byte) (Reply, error) {
	const cookie = 0xfeedfacecafe0001
	if err := c.Send(flags, cmd, cookie, off, length, payload); err != nil {
		return Reply{}, err
	}
	return c.ReadReply()
}

// AtEnd reads until the server has closed the connection; anything else it sends is an error.
func (c *Client) AtEnd() error {
	var b [1]byte
	n, err := c.Read(b[:])
	switch {
	case n != 0:
		return fmt.Errorf("byte %#x where the end was expected", b[0])
	case errors.Is(err, io.EOF), err != nil && !isTimeout(err):
		return nil
	}
	return err
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
