package nbd

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
)

const (
	// maxOptionData is the longest option that is looked at: a name and many
	// information requests. Longer ones are read and refused with TOO_BIG.
	maxOptionData = 16 << 10
	// maxHandshakeBytes bounds all that a client may send before it chooses an export.
	maxHandshakeBytes = 1 << 20
	// maxOptions bounds the options of a client; a tool that asks for each of many
	// exports on one connection needs two per export.
	maxOptions = 4096
)

// handshake is a connection until its client has chosen an export ("Fixed
// newstyle negotiation"). It runs on its own goroutine and reads no byte more than the
// handshake has: what follows belongs to the worker.
type handshake struct {
	srv   *Server
	nc    net.Conn
	id    uint64
	peer  string
	since time.Time
	elem  *list.Element // in Server.handshakes; guarded by Server.mu
	// kernel is set for a connection of the kernel's, which has no handshake.
	kernel *KernelDevice

	fixed      bool // the client knows fixed newstyle
	noZeroes   bool
	structured bool
	budget     int // bytes the client may still send
	out        []byte
}

// A choice ends the handshake: the export, and its place.
type choice struct {
	exp   *export
	dom   *domain
	queue int
	lim   limits
}

var (
	errAborted = errors.New("client aborted the handshake")
	errRefused = errors.New("refused")
)

// interrupt makes the goroutine give up soon; from any goroutine.
func (h *handshake) interrupt() { h.nc.SetDeadline(time.Unix(1, 0)) }

func (h *handshake) serve() {
	ch, err := h.negotiate()
	if err == nil {
		err = h.finish(ch)
	}
	h.nc.Close()
	s := h.srv
	s.mu.Lock()
	evicted := h.elem == nil
	s.unlist(h)
	stopping := s.state != serving
	s.mu.Unlock()
	switch {
	case err == nil:
		s.lines.Log(slog.LevelInfo, "nbd: connection opened", slog.Uint64("conn", h.id), slog.String("peer", h.peer),
			slog.String("export", ch.exp.Name), slog.Int("queue", ch.queue), slog.Bool("structured", ch.lim.structured))
	case errors.Is(err, errAborted), stopping:
	case evicted:
		s.lines.Log(slog.LevelWarn, "nbd: handshake ended to make room for newer ones", slog.Uint64("conn", h.id), slog.String("peer", h.peer),
			slog.Int("max_handshakes", s.cfg.MaxHandshakes))
	default:
		s.handshakesFailed.Add(1)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("not finished within %v", s.cfg.HandshakeTimeout)
		}
		s.lines.Log(slog.LevelWarn, "nbd: handshake failed", slog.Uint64("conn", h.id), slog.String("peer", h.peer), slog.String("error", err.Error()))
	}
}

// finish moves the descriptor to the worker.
func (h *handshake) finish(ch *choice) error {
	fd, err := takeDescriptor(h.nc)
	if err == nil {
		if _, ok := h.nc.(*net.UnixConn); ok { // TCP finds its own size
			widen(fd, h.srv.cfg.sendBuffer)
		}
		err = h.srv.start(h, ch.dom, fd, ch.lim)
	}
	if err != nil {
		h.srv.unreserve(ch.exp, ch.queue)
	}
	return err
}

// takeDescriptor gives a descriptor of its own for the connection's socket.
func takeDescriptor(nc net.Conn) (int, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("a connection of type %T has no descriptor", nc)
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var derr error
	if err := rc.Control(func(old uintptr) {
		if fd, derr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0); derr == nil {
			derr = unix.SetNonblock(fd, true)
		}
	}); err != nil {
		return -1, err
	}
	if derr != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return -1, fmt.Errorf("duplicate the descriptor: %w", derr)
	}
	return fd, nil
}

// peerName describes who is at the other end, for logs and status.
func peerName(nc net.Conn) string {
	if _, ok := nc.(*net.UnixConn); !ok {
		if a := nc.RemoteAddr(); a != nil {
			return a.String()
		}
		return "unknown"
	}
	name := "unix"
	if rc, err := nc.(*net.UnixConn).SyscallConn(); err == nil {
		// A peer that is gone already has no name; that is no reason to fail.
		_ = rc.Control(func(fd uintptr) {
			if cr, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				name = "unix:pid=" + strconv.Itoa(int(cr.Pid)) + ",uid=" + strconv.Itoa(int(cr.Uid))
			}
		})
	}
	return name
}

// negotiate talks until an export is chosen. On success its place is reserved.
func (h *handshake) negotiate() (*choice, error) {
	if err := h.nc.SetDeadline(h.since.Add(h.srv.cfg.HandshakeTimeout)); err != nil {
		return nil, err
	}
	if h.srv.stopping() {
		return nil, ErrServerClosed // it may have interrupted before the line above
	}
	h.budget = maxHandshakeBytes
	h.out = binary.BigEndian.AppendUint64(h.out, magicInit)
	h.out = binary.BigEndian.AppendUint64(h.out, magicOption)
	h.out = binary.BigEndian.AppendUint16(h.out, flagFixedNewstyle|flagNoZeroes)
	if err := h.send(); err != nil {
		return nil, err
	}
	var b [16]byte
	if err := h.read(b[:4]); err != nil {
		return nil, err
	}
	cf := binary.BigEndian.Uint32(b[:])
	if cf&^(flagCFixedNewstyle|flagCNoZeroes) != 0 {
		return nil, fmt.Errorf("unknown client flags %#x", cf)
	}
	h.fixed = cf&flagCFixedNewstyle != 0
	h.noZeroes = cf&flagCNoZeroes != 0
	for range maxOptions {
		if err := h.read(b[:]); err != nil {
			return nil, err
		}
		if m := binary.BigEndian.Uint64(b[:]); m != magicOption {
			return nil, fmt.Errorf("option with wrong magic number %#x", m)
		}
		opt, n := binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
		ch, err := h.option(opt, n)
		if ch != nil || err != nil {
			return ch, err
		}
		if err := h.send(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("more than %d options", maxOptions)
}

// read fills b from the client, within the budget.
func (h *handshake) read(b []byte) error {
	if h.budget -= len(b); h.budget < 0 {
		return fmt.Errorf("more than %d bytes", maxHandshakeBytes)
	}
	_, err := io.ReadFull(h.nc, b)
	return err
}

func (h *handshake) send() error {
	_, err := h.nc.Write(h.out)
	h.out = h.out[:0]
	return err
}

// replyHeader appends the header of an option reply; n bytes of data follow.
func (h *handshake) replyHeader(opt, typ uint32, n int) {
	h.out = binary.BigEndian.AppendUint64(h.out, magicOptionReply)
	h.out = binary.BigEndian.AppendUint32(h.out, opt)
	h.out = binary.BigEndian.AppendUint32(h.out, typ)
	h.out = binary.BigEndian.AppendUint32(h.out, uint32(n))
}

func (h *handshake) ack(opt uint32) { h.replyHeader(opt, repAck, 0) }

// fail appends an error reply with a text for the client's user.
func (h *handshake) fail(opt, typ uint32, text string) {
	h.replyHeader(opt, typ, len(text))
	h.out = append(h.out, text...)
}

// option reads and answers one option with n bytes of data.
func (h *handshake) option(opt, n uint32) (*choice, error) {
	if int64(n) > int64(h.budget) {
		return nil, fmt.Errorf("option %d with %d bytes: more than %d bytes in the handshake", opt, n, maxHandshakeBytes)
	}
	if n > maxOptionData {
		if opt == optExportName {
			return nil, fmt.Errorf("export name of %d bytes", n)
		}
		h.budget -= int(n)
		if _, err := io.CopyN(io.Discard, h.nc, int64(n)); err != nil {
			return nil, err
		}
		h.fail(opt, repErrTooBig, fmt.Sprintf("an option may have %d bytes", maxOptionData))
		return nil, nil
	}
	data := make([]byte, n)
	if err := h.read(data); err != nil {
		return nil, err
	}
	switch {
	case opt == optAbort: // data is ignored, as the protocol asks
		h.ack(opt)
		// The client may be gone without waiting for it.
		_ = h.send()
		return nil, errAborted
	case h.srv.stopping() && opt != optExportName:
		h.fail(opt, repErrShutdown, whyShutdown)
		return nil, nil
	case opt != optExportName && !h.fixed:
		h.fail(opt, repErrInvalid, "fixed newstyle was not negotiated")
		return nil, nil
	}
	switch opt {
	case optExportName:
		return h.exportName(data)
	case optList, optStructuredReply, optStartTLS:
		if n != 0 {
			h.fail(opt, repErrInvalid, "the option has no data")
			return nil, nil
		}
	}
	switch opt {
	case optList:
		for _, e := range h.srv.exports {
			h.replyHeader(opt, repServer, 4+len(e.Name)+len(e.Description))
			h.out = binary.BigEndian.AppendUint32(h.out, uint32(len(e.Name)))
			h.out = append(h.out, e.Name...)
			h.out = append(h.out, e.Description...)
		}
		h.ack(opt)
	case optStructuredReply:
		h.structured = true
		h.ack(opt)
	case optInfo, optGo:
		return h.info(opt, data)
	case optStartTLS:
		h.fail(opt, repErrUnsup, "this server has no TLS")
	default:
		h.fail(opt, repErrUnsup, "unknown option")
	}
	return nil, nil
}

// exportName answers NBD_OPT_EXPORT_NAME, which has no way to report an error.
func (h *handshake) exportName(name []byte) (*choice, error) {
	ch, in, err := h.choose(name)
	if err != nil {
		return nil, err
	}
	h.out = binary.BigEndian.AppendUint64(h.out, uint64(in.Size))
	h.out = binary.BigEndian.AppendUint16(h.out, ch.lim.flags)
	if !h.noZeroes {
		h.out = append(h.out, make([]byte, 124)...)
	}
	if err := h.send(); err != nil {
		h.srv.unreserve(ch.exp, ch.queue)
		return nil, err
	}
	return ch, nil
}

// parseInfo reads the data of NBD_OPT_INFO and NBD_OPT_GO: the name and the
// information requests, two bytes each.
func parseInfo(data []byte) (name, requests []byte, ok bool) {
	if len(data) < 6 {
		return nil, nil, false
	}
	n := binary.BigEndian.Uint32(data)
	if int64(n) > int64(len(data)-6) || n > maxString {
		return nil, nil, false
	}
	name, rest := data[4:4+n], data[4+n:]
	k := int(binary.BigEndian.Uint16(rest))
	if requests = rest[2:]; len(requests) != 2*k {
		return nil, nil, false
	}
	return name, requests, true
}

func (h *handshake) info(opt uint32, data []byte) (*choice, error) {
	name, requests, ok := parseInfo(data)
	if !ok {
		h.fail(opt, repErrInvalid, "the lengths in the option do not fit together")
		return nil, nil
	}
	ch, in, err := h.choose(name)
	if err != nil {
		typ := uint32(repErrPolicy)
		switch {
		case errors.Is(err, errRefused):
			typ = repErrUnknown
		case errors.Is(err, ErrServerClosed), errors.Is(err, blockdev.ErrClosed):
			typ = repErrShutdown
		}
		h.fail(opt, typ, err.Error())
		return nil, nil
	}
	e := ch.exp
	h.replyHeader(opt, repInfo, 12)
	h.out = binary.BigEndian.AppendUint16(h.out, infoExport)
	h.out = binary.BigEndian.AppendUint64(h.out, uint64(in.Size))
	h.out = binary.BigEndian.AppendUint16(h.out, ch.lim.flags)
	if wants(requests, infoName) || e.Name != string(name) {
		h.replyHeader(opt, repInfo, 2+len(e.Name))
		h.out = binary.BigEndian.AppendUint16(h.out, infoName)
		h.out = append(h.out, e.Name...)
	}
	if wants(requests, infoDescription) && e.Description != "" {
		h.replyHeader(opt, repInfo, 2+len(e.Description))
		h.out = binary.BigEndian.AppendUint16(h.out, infoDescription)
		h.out = append(h.out, e.Description...)
	}
	// Whether asked for or not: the sizes are enforced ("Size constraints").
	lo, pref, hi := blockSizes(&in, int(ch.lim.maxPayload))
	h.replyHeader(opt, repInfo, 14)
	h.out = binary.BigEndian.AppendUint16(h.out, infoBlockSize)
	h.out = binary.BigEndian.AppendUint32(h.out, lo)
	h.out = binary.BigEndian.AppendUint32(h.out, pref)
	h.out = binary.BigEndian.AppendUint32(h.out, hi)
	h.ack(opt)
	if opt == optGo {
		if err = h.send(); err == nil {
			return ch, nil
		}
	}
	h.srv.unreserve(e, ch.queue)
	return nil, err
}

func wants(requests []byte, info uint16) bool {
	for r := range slices.Chunk(requests, 2) {
		if binary.BigEndian.Uint16(r) == info {
			return true
		}
	}
	return false
}

// choose looks an export up and reserves a place on it.
func (h *handshake) choose(name []byte) (*choice, blockdev.Info, error) {
	e := h.srv.find(name)
	if e == nil {
		return nil, blockdev.Info{}, fmt.Errorf("%w: there is no export %s", errRefused, quote(name))
	}
	q, err := h.srv.reserve(e)
	if err != nil {
		return nil, blockdev.Info{}, err
	}
	d, err := e.domain(q)
	if err != nil {
		h.srv.unreserve(e, q)
		return nil, blockdev.Info{}, err
	}
	in := e.dev.Info()
	// Clients want a multiple of the block.
	most := min(h.srv.cfg.MaxPayload, d.maxAlloc) &^ (in.BlockSize - 1)
	return &choice{exp: e, dom: d, queue: q, lim: limits{
		flags:      transmissionFlags(&in, h.structured),
		structured: h.structured,
		maxPayload: uint32(most),
	}}, in, nil
}

// quote prints a name from the network, shortened.
func quote(b []byte) string {
	const most = 64
	if len(b) > most {
		return strconv.Quote(string(b[:most])) + "…"
	}
	return strconv.Quote(string(b))
}
