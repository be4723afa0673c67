package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/provider"
	"rdblk/internal/timeout"
	"rdblk/nbd"
	"rdblk/protocol"
	"rdblk/rdma/iwarp"
)

// envPrefix is what the program's environment variables begin with.
const envPrefix = "RDINIT_"

// settings is everything that can be set; docs/operating.md and
// configs/rdinit.yaml describe each, and tests hold them to this struct.
type settings struct {
	Address    string `mapstructure:"address"`
	Provider   string `mapstructure:"provider"`
	CRC        string `mapstructure:"crc"`
	Congestion string `mapstructure:"congestion_control"`
	Local      string `mapstructure:"local_address"`
	NQN        string `mapstructure:"nqn"`
	NSID       uint32 `mapstructure:"nsid"`
	HostNQN    string `mapstructure:"host_nqn"`

	Socket string `mapstructure:"socket"`
	Device string `mapstructure:"device"`

	Name          string        `mapstructure:"name"`
	RunDir        string        `mapstructure:"run_dir"`
	HTTP          string        `mapstructure:"http"`
	Pprof         bool          `mapstructure:"pprof"`
	DetachTimeout time.Duration `mapstructure:"detach_timeout"`
	ProtectMemory bool          `mapstructure:"protect_memory"`
	Log           struct {
		Level  string `mapstructure:"level"`
		Format string `mapstructure:"format"`
	} `mapstructure:"log"`

	Trace     string      `mapstructure:"trace"`
	TraceSize config.Size `mapstructure:"trace_size"`

	Queues       int           `mapstructure:"queues"`
	Depth        int           `mapstructure:"depth"`
	PinCPUs      []int         `mapstructure:"pin_cpus"`
	Polling      string        `mapstructure:"polling"`
	MaxPoll      time.Duration `mapstructure:"max_poll"`
	BufferMemory config.Size   `mapstructure:"buffer_memory"`
	MaxTransfer  config.Size   `mapstructure:"max_transfer"`
	Windows      bool          `mapstructure:"memory_windows"`

	MaxClients   int         `mapstructure:"max_clients"`
	ClientMemory config.Size `mapstructure:"client_memory"`
	SpillMemory  config.Size `mapstructure:"spill_memory"`

	KeepAlive         time.Duration `mapstructure:"keep_alive"`
	ConnectTimeout    time.Duration `mapstructure:"connect_timeout"`
	RequestTimeout    time.Duration `mapstructure:"request_timeout"`
	ReconnectDelay    time.Duration `mapstructure:"reconnect_delay"`
	ReconnectMaxDelay time.Duration `mapstructure:"reconnect_max_delay"`
	LossTimeout       time.Duration `mapstructure:"loss_timeout"`
	Wait              time.Duration `mapstructure:"wait"`
	RetryTimeout      time.Duration `mapstructure:"retry_timeout"`
}

func defaultSettings() *settings {
	s := &settings{
		Provider:      provider.Auto,
		CRC:           "auto",
		Congestion:    iwarp.CongestionAuto,
		DetachTimeout: 10 * time.Second,
		ProtectMemory: true,

		TraceSize: cli.DefaultTraceSize,

		Depth:        initiator.DefaultDepth,
		Polling:      "adaptive",
		MaxPoll:      50 * time.Microsecond,
		BufferMemory: initiator.DefaultBufferMemory,
		MaxTransfer:  initiator.DefaultMaxTransfer,
		Windows:      true,

		MaxClients:   nbd.DefaultMaxConnections,
		ClientMemory: nbd.DefaultMaxConnBytes,
		SpillMemory:  nbd.DefaultSpillMemory,

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

// Bounds of loss_timeout: somebody with a mirror may want errors at once, and who wants to wait for longer than
// a month says for ever.
const (
	minLossTimeout = time.Millisecond
	maxLossTimeout = 720 * time.Hour
)

// Validate returns all problems that show without touching the machine, each
// with the setting's name in front.
func (s *settings) Validate() error {
	c := config.NewCheck(defaultSettings())
	bad := c.Bad
	if s.Address != "" {
		if host, _, err := cli.SplitAddr(s.Address, cli.DefaultPort); err != nil {
			bad("address", "%v", err)
		} else if host == "" {
			bad("address", "%q names no machine; write ADDR:PORT", s.Address)
		}
	}
	if s.Local != "" {
		if _, err := parseLocal(s.Local); err != nil {
			bad("local_address", "%v", err)
		}
	}
	if err := provider.CheckMode(s.Provider); err != nil {
		bad("provider", "%v", err)
	}
	nqn := func(key, v, advice string) {
		if v == "" {
			return
		}
		if err := protocol.CheckNQN(v); err != nil || !strings.HasPrefix(v, "nqn.") || strings.Contains(v, ",") {
			bad(key, "%q is no NQN, as nqn.2014-08.org.nvmexpress:uuid:… is one (%s)", v, advice)
		} else if protocol.UUIDFormBroken(v) {
			bad(key, "%q: what follows uuid: is no UUID (%s)", v, advice)
		}
	}
	nqn("nqn", s.NQN, "'rdinit discover' prints what a target has")
	if s.NQN == protocol.DiscoveryNQN {
		bad("nqn", "that is the discovery service, which has no disks ('rdinit discover' prints what a target has)")
	}
	nqn("host_nqn", s.HostNQN, "left out it is what 'rdinit version' prints")
	if s.Device != "" {
		if _, err := nbd.ParseDevice(s.Device); err != nil {
			bad("device", "%v", err)
		}
	}
	c.OneOf("crc", s.CRC, "auto", "on", "off")
	if err := iwarp.CheckCongestion(s.Congestion); err != nil {
		bad("congestion_control", "%v", err)
	}
	if s.Name != "" {
		if err := control.CheckName(s.Name); err != nil {
			bad("name", "%v", err)
		}
	}
	if s.RunDir != "" && !filepath.IsAbs(s.RunDir) {
		bad("run_dir", "%q is not an absolute path (for example /run/rdblk)", s.RunDir)
	}
	if len(s.Socket) > 107 {
		bad("socket", "%q is longer than the 107 bytes that a Unix socket's path may have (for example /run/disk.sock)", s.Socket)
	}
	if s.HTTP != "" {
		if err := cli.ListenAddr(s.HTTP, 9421); err != nil {
			bad("http", "%v", err)
		}
	}
	if s.Pprof && s.HTTP == "" {
		bad("pprof", "there is no HTTP endpoint that it could be on: set http too (for example 127.0.0.1:9421)")
	}
	if err := cli.CheckLog(s.Log.Level, s.Log.Format); err != nil {
		word, rest, _ := strings.Cut(err.Error(), ": ")
		bad("log."+word, "%s", rest)
	}
	config.Between(c, "trace_size", s.TraceSize, cli.MinTraceSize, cli.MaxTraceSize, "")
	c.Polling(s.Polling, s.MaxPoll)
	if s.NSID == protocol.NSIDAll {
		bad("nsid", "%d means all namespaces: name one (for example 1)", s.NSID)
	}
	for _, cpu := range s.PinCPUs {
		if cpu < 0 || cpu > 1023 {
			bad("pin_cpus", "%d is outside 0 to 1023 (for example 0,1)", cpu)
		}
	}
	config.Between(c, "queues", s.Queues, 0, initiator.MaxQueues, "one per processor")
	config.Between(c, "depth", s.Depth, initiator.MinDepth, initiator.MaxDepth, "")
	config.Between(c, "buffer_memory", s.BufferMemory, initiator.MinBufferMemory, initiator.MaxBufferMemory, "")
	config.Between(c, "max_transfer", s.MaxTransfer, 4096, protocol.MaxKeyedLength, "")
	config.Between(c, "max_clients", s.MaxClients, 1, nbd.MaxMaxConnections, "")
	config.Between(c, "client_memory", s.ClientMemory, nbd.MinMaxConnBytes, nbd.MaxMemory, "")
	config.Between(c, "spill_memory", s.SpillMemory, 0, nbd.MaxMemory, "who stands still and is in others' way is ended")
	config.Between(c, "keep_alive", s.KeepAlive, initiator.MinKeepAlive, time.Hour, "")
	config.Between(c, "reconnect_delay", s.ReconnectDelay, time.Millisecond, time.Hour, "")
	config.Between(c, "reconnect_max_delay", s.ReconnectMaxDelay, max(time.Millisecond, s.ReconnectDelay), time.Hour, "")
	config.Between(c, "request_timeout", s.RequestTimeout, 10*time.Millisecond, 24*time.Hour, "")
	config.Between(c, "connect_timeout", s.ConnectTimeout, 10*time.Millisecond, time.Hour, "")
	config.Between(c, "retry_timeout", s.RetryTimeout, time.Millisecond, 24*time.Hour, "")
	config.Between(c, "detach_timeout", s.DetachTimeout, 100*time.Millisecond, time.Hour, "")
	config.Between(c, "wait", s.Wait, 100*time.Millisecond, 24*time.Hour, "one attempt")
	if s.LossTimeout >= 0 && (s.LossTimeout < minLossTimeout || s.LossTimeout > maxLossTimeout) {
		bad("loss_timeout", "%s is outside %s to %s (for example %s; negative: requests wait for ever)",
			timeout.Text(s.LossTimeout), timeout.Text(minLossTimeout), timeout.Text(maxLossTimeout), timeout.Text(initiator.DefaultLossTimeout))
	}
	// The library's own rules, in case it has one more. Provider and address come later.
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
			if !c.Has(key) {
				bad(key, "%s", rest)
			}
		}
	}
	return c.Err()
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
	if s.Device != "" && s.ProtectMemory {
		c.ResidentMemory = residentMemory
	}
	return c
}

// nbdConfig is the NBD server's form, without what it serves.
func (s *settings) nbdConfig() nbd.Config {
	c := nbd.Config{MaxConnections: s.MaxClients, MaxConnBytes: int(s.ClientMemory), SpillMemory: int(s.SpillMemory)}
	if c.SpillMemory == 0 {
		c.SpillMemory = -1
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
