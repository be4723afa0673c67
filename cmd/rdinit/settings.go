package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/nbd"
	"rdblk/protocol"
	"rdblk/rdma/iwarp"
)

// envPrefix is what the program's environment variables begin with.
const envPrefix = "RDINIT_"

// settings is everything that can be set; docs/operating.md and
// configs/rdinit.yaml describe each, and tests hold them to this struct.
type settings struct {
	Address  string `mapstructure:"address"`
	Provider string `mapstructure:"provider"`
	CRC      string `mapstructure:"crc"`
	Local    string `mapstructure:"local_address"`
	NQN      string `mapstructure:"nqn"`
	NSID     uint32 `mapstructure:"nsid"`
	HostNQN  string `mapstructure:"host_nqn"`

	Socket string `mapstructure:"socket"`
	Device string `mapstructure:"device"`

	Name          string        `mapstructure:"name"`
	RunDir        string        `mapstructure:"run_dir"`
	HTTP          string        `mapstructure:"http"`
	Pprof         bool          `mapstructure:"pprof"`
	DetachTimeout time.Duration `mapstructure:"detach_timeout"`
	Log           struct {
		Level  string `mapstructure:"level"`
		Format string `mapstructure:"format"`
	} `mapstructure:"log"`

	Queues       int           `mapstructure:"queues"`
	Depth        int           `mapstructure:"depth"`
	PinCPUs      []int         `mapstructure:"pin_cpus"`
	Polling      string        `mapstructure:"polling"`
	MaxPoll      time.Duration `mapstructure:"max_poll"`
	BufferMemory config.Size   `mapstructure:"buffer_memory"`
	MaxTransfer  config.Size   `mapstructure:"max_transfer"`
	Windows      bool          `mapstructure:"memory_windows"`

	KeepAlive         time.Duration `mapstructure:"keep_alive"`
	ConnectTimeout    time.Duration `mapstructure:"connect_timeout"`
	RequestTimeout    time.Duration `mapstructure:"request_timeout"`
	ReconnectDelay    time.Duration `mapstructure:"reconnect_delay"`
	ReconnectMaxDelay time.Duration `mapstructure:"reconnect_max_delay"`
	LossTimeout       time.Duration `mapstructure:"loss_timeout"`
	RetryTimeout      time.Duration `mapstructure:"retry_timeout"`
}

func defaultSettings() *settings {
	s := &settings{
		Provider:      "auto",
		CRC:           "auto",
		DetachTimeout: 10 * time.Second,

		Depth:        initiator.DefaultDepth,
		Polling:      "adaptive",
		MaxPoll:      50 * time.Microsecond,
		BufferMemory: initiator.DefaultBufferMemory,
		MaxTransfer:  initiator.DefaultMaxTransfer,
		Windows:      true,

		KeepAlive:         initiator.DefaultKeepAlive,
		ConnectTimeout:    initiator.DefaultConnectTimeout,
		RequestTimeout:    initiator.DefaultRequestTimeout,
		ReconnectDelay:    initiator.DefaultReconnectDelay,
		ReconnectMaxDelay: initiator.DefaultReconnectMaxDelay,
		LossTimeout:       initiator.DefaultLossTimeout,
		RetryTimeout:      initiator.DefaultRetryTimeout,
	}
	s.Log.Level, s.Log.Format = "info", "text"
	return s
}

// Validate returns all problems that show without touching the machine, each
// with the setting's name in front.
func (s *settings) Validate() error {
	var errs []error
	bad := func(key, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, a...)))
	}
	if s.Address != "" {
		if host, _, err := cli.SplitAddr(s.Address, cli.DefaultPort); err != nil {
			bad("address", "%v", err)
		} else if host == "" {
			bad("address", "%q names no machine", s.Address)
		}
	}
	if s.Local != "" {
		if _, err := parseLocal(s.Local); err != nil {
			bad("local_address", "%v", err)
		}
	}
	switch s.Provider {
	case "auto", "iwarp":
	case "verbs":
		bad("provider", "verbs (RDMA hardware) is not in this release; use auto or iwarp, the software NIC")
	default:
		bad("provider", "%q is none of auto, iwarp, verbs", s.Provider)
	}
	if s.Device != "" {
		if _, err := nbd.ParseDevice(s.Device); err != nil {
			bad("device", "%v", err)
		}
	}
	switch s.CRC {
	case "auto", "on", "off":
	default:
		bad("crc", "%q is none of auto, on, off", s.CRC)
	}
	if s.Name != "" {
		if err := control.CheckName(s.Name); err != nil {
			bad("name", "%v", err)
		}
	}
	if s.RunDir != "" && !filepath.IsAbs(s.RunDir) {
		bad("run_dir", "%q is not an absolute path", s.RunDir)
	}
	if len(s.Socket) > 107 {
		bad("socket", "%q is longer than the 107 bytes that a Unix socket may have", s.Socket)
	}
	if s.HTTP != "" {
		if _, port, err := cli.SplitAddr(s.HTTP, 0); err != nil {
			bad("http", "%v", err)
		} else if port == 0 && !strings.HasSuffix(s.HTTP, ":0") {
			bad("http", "%q has no port; write ADDR:PORT", s.HTTP)
		}
	}
	if err := cli.CheckLog(s.Log.Level, s.Log.Format); err != nil {
		errs = append(errs, fmt.Errorf("log.%w", err))
	}
	switch s.Polling {
	case "adaptive", "busy", "never":
	default:
		bad("polling", "%q is none of adaptive, busy, never", s.Polling)
	}
	positive := map[string]int64{ // zero would mean "default" to the library
		"depth": int64(s.Depth), "buffer_memory": int64(s.BufferMemory), "max_transfer": int64(s.MaxTransfer),
		"detach_timeout": int64(s.DetachTimeout), "keep_alive": int64(s.KeepAlive), "connect_timeout": int64(s.ConnectTimeout),
		"request_timeout": int64(s.RequestTimeout), "reconnect_delay": int64(s.ReconnectDelay), "reconnect_max_delay": int64(s.ReconnectMaxDelay),
		"retry_timeout": int64(s.RetryTimeout), "max_poll": int64(s.MaxPoll),
	}
	for _, key := range slices.Sorted(maps.Keys(positive)) {
		if positive[key] <= 0 {
			bad(key, "it must be positive")
		}
	}
	if s.LossTimeout == 0 {
		bad("loss_timeout", "it must be positive, or negative for waiting for ever")
	}
	// The library's own rules, in our words for the fields. Provider and address come later.
	if err := s.initiatorConfig().Validate(); err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			field, rest, _ := strings.Cut(line, ": ")
			if field == "Provider" || field == "Addr" {
				continue
			}
			key := keyOfField[field]
			if key == "" {
				key = field
			}
			if !mentions(errs, key) {
				errs = append(errs, fmt.Errorf("%s: %s", key, rest))
			}
		}
	}
	return errors.Join(errs...)
}

func mentions(errs []error, key string) bool {
	for _, e := range errs {
		if strings.HasPrefix(e.Error(), key+": ") {
			return true
		}
	}
	return false
}

// keyOfField translates the field names in initiator.Config.Validate.
var keyOfField = map[string]string{
	"HostNQN": "host_nqn", "SubNQN": "nqn", "NSID": "nsid", "Queues": "queues", "Depth": "depth", "BufferMemory": "buffer_memory",
	"MaxTransfer": "max_transfer", "KeepAlive": "keep_alive", "ReconnectDelay": "reconnect_delay",
	"ReconnectMaxDelay": "reconnect_max_delay", "RequestTimeout": "request_timeout", "ConnectTimeout": "connect_timeout",
	"RetryTimeout": "retry_timeout", "PinCPUs": "pin_cpus",
}

// initiatorConfig is the library's form, without provider, address, host and logger.
func (s *settings) initiatorConfig() initiator.Config {
	c := initiator.Config{
		SubNQN: s.NQN, NSID: s.NSID, HostNQN: s.HostNQN, Queues: s.Queues, Depth: s.Depth,
		KeepAlive: s.KeepAlive, ReconnectDelay: s.ReconnectDelay, ReconnectMaxDelay: s.ReconnectMaxDelay,
		LossTimeout: s.LossTimeout, RequestTimeout: s.RequestTimeout, ConnectTimeout: s.ConnectTimeout, RetryTimeout: s.RetryTimeout,
		BufferMemory: int(s.BufferMemory), MaxTransfer: int(s.MaxTransfer), PinCPUs: s.PinCPUs,
		MaxPoll: s.MaxPoll, Busy: s.Polling == "busy", NoWindows: !s.Windows,
	}
	if s.Polling == "never" {
		c.MaxPoll = -1
	}
	return c
}

// hostNQNFile is where nvme-cli keeps this machine's name; both tools then have the same.
const hostNQNFile = "/etc/nvme/hostnqn"

// localHostNQN is the name that this machine has towards targets, the same at
// every start: what nvme-cli uses if it is installed, else the UUID form made of
// the machine's identity, else of its host name.
func localHostNQN(readFile func(string) ([]byte, error), hostname func() (string, error)) string {
	if b, err := readFile(hostNQNFile); err == nil {
		if nqn := strings.TrimSpace(string(b)); protocol.ValidateNQN(nqn) == nil {
			return nqn
		}
	}
	seed := ""
	if b, err := readFile("/etc/machine-id"); err == nil {
		seed = strings.TrimSpace(string(b))
	}
	if seed == "" {
		seed, _ = hostname()
	}
	// The machine's identity itself is confidential (machine-id(5)): only a hash leaves.
	sum := sha256.Sum256([]byte("rdblk host NQN " + seed))
	sum[6] = sum[6]&0x0f | 0x80 // UUID version 8: of our own making
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

func thisHostNQN() string { return localHostNQN(os.ReadFile, os.Hostname) }

// crcMode is what the software NIC asks of its peers.
func (s *settings) crcMode() iwarp.CRCMode {
	switch s.CRC {
	case "on":
		return iwarp.CRCOn
	case "off":
		return iwarp.CRCOff
	}
	return iwarp.CRCAuto
}
