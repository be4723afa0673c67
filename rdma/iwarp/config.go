package iwarp

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// CRCMode says when this side asks for CRC32C on the FPDUs. CRC is in use if
// either side asks.
type CRCMode uint8

// CRC modes.
const (
	CRCAuto CRCMode = iota // off between two addresses of this host, on otherwise
	CRCOn
	CRCOff
)

func (m CRCMode) String() string {
	switch m {
	case CRCAuto:
		return "auto"
	case CRCOn:
		return "on"
	case CRCOff:
		return "off"
	}
	return "unknown"
}

// Values of Config.CongestionControl besides the kernel's names. Inside of a host no network can be congested, and
// an algorithm that paces, as BBR does, lets time pass between what could be sent at once: with BBR
// reads of 128 KiB came at two thirds of the speed or less.
const (
	CongestionAuto   = "auto"
	CongestionSystem = "system"
	congestionInside = "reno" // every kernel has it and allows it to everybody
)

// Limits of the software NIC.
const (
	maxQPWR        = 16384
	maxSGE         = 16
	maxInline      = 512
	maxCQE         = 1 << 20
	maxDepth       = 128 // of inbound and outbound Reads; what siw has
	maxMRBytes     = 1 << 40
	maxPrivate     = 251 // portable: siw counts it in 8 bits and adds 4
	maxMessage     = 1 << 31
	maxLingering   = 256 // sockets that are drained in the background at a time
	defaultBacklog = 128
	defaultPending = 256
)

// Config is how the software NIC behaves. The zero value is good.
type Config struct {
	// CRC says when CRC32C is asked for. TCP's own checksum is weak, but between two
	// addresses of one host nothing needs it.
	CRC CRCMode
	// ReadDepth is the largest number of RDMA Reads that a QP has outstanding, and that
	// it serves at a time. Default 32, at most 128.
	ReadDepth int
	// MaxFPDU bounds the size of outgoing FPDUs in bytes, in addition to what the peer
	// takes. Default 65544, the protocol's limit; at least 256.
	MaxFPDU int
	// StrictMSS keeps every outgoing FPDU within a TCP segment, also towards peers that
	// say they take larger ones.
	StrictMSS bool
	// PlainFlags sends no start-up bit that RFC 5044 reserves: neither siw's "large
	// FPDUs" nor the mark by which two of these providers know each other. For peers
	// that stumble over them.
	PlainFlags bool
	// PeerToPeer asks for the peer-to-peer model of RFC 6581 when connecting: a first
	// empty message is sent by this provider itself. Some adapters insist on it; siw as
	// the other side has a bug with it. Incoming requests for it are always honoured.
	PeerToPeer bool

	// RequestTimeout is how long an accepted TCP connection may take to send its whole
	// MPA Request. Default 5 s.
	RequestTimeout time.Duration
	// ReplyTimeout bounds Connect from the TCP connect to the MPA Reply. Default 10 s.
	ReplyTimeout time.Duration
	// FirstFPDUDelay is the pause between an MPA Reply and the first FPDU towards a
	// peer that is not this software: siw misses data that comes at once. Default
	// 1 ms, negative none.
	FirstFPDUDelay time.Duration
	// UserTimeout ends a connection whose peer acknowledges nothing, or takes nothing,
	// for so long (TCP_USER_TIMEOUT, and keep-alive probes when idle). Default 15 s, negative never.
	UserTimeout time.Duration
	// CloseLinger bounds the delivery of what was sent before Disconnect or with a
	// Terminate. Default 1 s.
	CloseLinger time.Duration

	// SendBuffer and RecvBuffer are the socket buffer sizes in bytes; 0 leaves them to
	// the kernel's tuning.
	SendBuffer, RecvBuffer int

	// CongestionControl is TCP's algorithm (TCP_CONGESTION in tcp(7)). CongestionAuto, which "" stands for, is
	// reno between two addresses of this host and the system's otherwise; CongestionSystem is the system's
	// everywhere; all else is a name, which the kernel must offer.
	CongestionControl string

	// Logger gets the connection manager's events: established connections at debug
	// level, Terminates and what strangers do at warning level, at most one line a
	// second. Default: none.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.RequestTimeout, 5*time.Second)
	def(&c.ReplyTimeout, 10*time.Second)
	def(&c.FirstFPDUDelay, time.Millisecond)
	def(&c.UserTimeout, 15*time.Second)
	def(&c.CloseLinger, time.Second)
	if c.ReadDepth == 0 {
		c.ReadDepth = 32
	}
	if c.MaxFPDU == 0 {
		c.MaxFPDU = maxFPDU
	}
	if c.CongestionControl == "" {
		c.CongestionControl = CongestionAuto
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports everything that is wrong.
func (c Config) Validate() error {
	var errs []error
	bad := func(cond bool, format string, args ...any) {
		if cond {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(c.CRC > CRCOff, "CRC: unknown mode %d", c.CRC)
	bad(c.ReadDepth < 0 || c.ReadDepth > maxDepth, "ReadDepth: %d is not within 1 to %d", c.ReadDepth, maxDepth)
	bad(c.MaxFPDU != 0 && (c.MaxFPDU < 256 || c.MaxFPDU > maxFPDU), "MaxFPDU: %d is not within 256 to %d bytes", c.MaxFPDU, maxFPDU)
	bad(c.RequestTimeout < 0, "RequestTimeout: %v is negative", c.RequestTimeout)
	bad(c.ReplyTimeout < 0, "ReplyTimeout: %v is negative", c.ReplyTimeout)
	bad(c.CloseLinger < 0, "CloseLinger: %v is negative", c.CloseLinger)
	bad(c.SendBuffer < 0, "SendBuffer: %d is negative", c.SendBuffer)
	bad(c.RecvBuffer < 0, "RecvBuffer: %d is negative", c.RecvBuffer)
	if err := CheckCongestion(c.CongestionControl); err != nil {
		errs = append(errs, fmt.Errorf("CongestionControl: %w", err))
	}
	return errors.Join(errs...)
}
