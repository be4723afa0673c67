package target

import (
	"cmp"
	"slices"
	"time"

	"rdblk/internal/worker"
	"rdblk/protocol"
)

// statusTimeout is how long Status waits for a worker to tell about its queues. One
// that does not is reported as such: a hang must be explainable from the dump.
const statusTimeout = time.Second

// Status is a dump of everything a target is doing. It marshals to JSON.
type Status struct {
	NQN         string             `json:"nqn"`
	Uptime      string             `json:"uptime"`
	Closing     bool               `json:"closing,omitempty"`
	Hosts       []string           `json:"hosts"`
	AnyHost     bool               `json:"any_host"`
	Listeners   []string           `json:"listeners"`
	Listening   []ListenerStatus   `json:"listening"`
	Generation  uint64             `json:"discovery_generation"`
	Namespaces  []NamespaceStatus  `json:"namespaces"`
	Controllers []ControllerStatus `json:"controllers"`
	Queues      []QueueStatus      `json:"queues"`
	Workers     []WorkerStatus     `json:"workers"`
}

// ListenerStatus describes a listener: an address may have one for each provider.
type ListenerStatus struct {
	Address  string `json:"address"`
	Provider string `json:"provider"`
}

// NamespaceStatus describes a namespace.
type NamespaceStatus struct {
	NSID      uint32 `json:"nsid"`
	Device    string `json:"device"`
	UUID      string `json:"uuid"`
	Bytes     int64  `json:"bytes"`
	BlockSize int    `json:"block_size"`
	ReadOnly  bool   `json:"read_only"`
}

// ControllerStatus describes an association.
type ControllerStatus struct {
	CNTLID    uint16 `json:"cntlid"`
	Discovery bool   `json:"discovery,omitempty"`
	Host      string `json:"host"`
	HostID    string `json:"hostid"`
	Remote    string `json:"remote"`
	Provider  string `json:"provider"` // of the admin queue's connection
	Device    string `json:"device"`   // RDMA device
	State     string `json:"state"`
	Age       string `json:"age"`
	CC        uint32 `json:"cc"`
	CSTS      uint32 `json:"csts"`
	KATO      string `json:"kato"`
	Timer     string `json:"timer"`
	IOQueues  int    `json:"io_queues"`
	Events    int    `json:"event_requests"`
	Errors    uint64 `json:"errors"`
}

// QueueStatus describes a connection. States counts its requests by state.
type QueueStatus struct {
	QID       uint16         `json:"qid"`
	CNTLID    uint16         `json:"cntlid,omitempty"` // 0: none yet
	Remote    string         `json:"remote"`
	Local     string         `json:"local"`
	Provider  string         `json:"provider"`
	Device    string         `json:"device"` // RDMA device
	State     string         `json:"state"`
	Reason    string         `json:"reason,omitempty"` // of its end
	Worker    string         `json:"worker"`
	Depth     int            `json:"depth"`
	Age       string         `json:"age"`
	Commands  uint64         `json:"commands"`
	Executing int            `json:"executing"`
	States    map[string]int `json:"states,omitempty"`
	Unstarted int            `json:"unstarted,omitempty"` // capsules that wait for a context
	Reads     int            `json:"reads"`               // RDMA Reads outstanding
	ReadDepth int            `json:"read_depth"`
	SendQueue int            `json:"send_queue"` // work requests outstanding
	SendDepth int            `json:"send_depth"`
	// The oldest request in flight, event requests apart.
	Oldest *RequestStatus `json:"oldest,omitempty"`
}

// RequestStatus describes a request.
type RequestStatus struct {
	Command string `json:"command"`
	CID     uint16 `json:"cid"`
	State   string `json:"state"`
	Age     string `json:"age"`
	Detail  string `json:"detail"`
}

// WorkerStatus describes a worker.
type WorkerStatus struct {
	Name          string `json:"name"`
	Responding    bool   `json:"responding"` // false: it did not answer in time, its queues are missing
	Queues        int    `json:"queues"`
	BufferBytes   int64  `json:"buffer_bytes"`
	BufferInUse   int64  `json:"buffer_in_use"`
	WaitingBuffer int64  `json:"waiting_buffer"`
}

// Status takes a dump. It asks every worker and waits at most a second for each.
func (t *Target) Status() Status {
	s := Status{NQN: t.sub.nqn, Uptime: age(t.uptime()), Generation: t.generation.Load(),
		Listeners: []string{}, Listening: []ListenerStatus{}, Namespaces: []NamespaceStatus{}, Controllers: []ControllerStatus{}, Queues: []QueueStatus{}}
	s.Hosts, s.AnyHost = t.Hosts()
	for _, ns := range *t.sub.ns.Load() {
		if ns != nil {
			s.Namespaces = append(s.Namespaces, NamespaceStatus{NSID: ns.id, Device: ns.info.Name, UUID: ns.uuid.String(),
				Bytes: ns.size.Load(), BlockSize: ns.info.BlockSize, ReadOnly: ns.info.ReadOnly})
		}
	}
	_, ctrls := t.snapshot()
	for _, c := range ctrls {
		s.Controllers = append(s.Controllers, c.status())
	}
	t.mu.Lock()
	s.Closing = t.closing
	for _, ln := range t.listeners {
		if a := ln.addr.String(); !slices.Contains(s.Listeners, a) {
			s.Listeners = append(s.Listeners, a)
		}
		s.Listening = append(s.Listening, ListenerStatus{Address: ln.addr.String(), Provider: ln.provider})
	}
	t.mu.Unlock()
	for _, l := range append(slices.Clone(t.lanes), t.admin) {
		answer := make(chan []QueueStatus, 1)
		err := l.w.Submit(worker.TaskFunc(func() {
			var list []QueueStatus
			for q := range l.queues {
				list = append(list, q.status())
			}
			answer <- list
		}))
		ws := WorkerStatus{Name: l.w.Name(), Queues: int(l.load.Load()), BufferBytes: int64(l.size) + l.private.Load(),
			BufferInUse: l.stats.inUse.Load(), WaitingBuffer: l.stats.waitingNow.Load()}
		if err == nil {
			timeout := time.NewTimer(statusTimeout)
			select {
			case list := <-answer:
				s.Queues = append(s.Queues, list...)
				ws.Responding = true
			case <-timeout.C:
			}
			timeout.Stop()
		}
		s.Workers = append(s.Workers, ws)
	}
	slices.SortFunc(s.Queues, func(a, b QueueStatus) int {
		return cmp.Or(cmp.Compare(a.CNTLID, b.CNTLID), cmp.Compare(a.QID, b.QID), cmp.Compare(a.Remote, b.Remote))
	})
	return s
}

func (c *controller) status() ControllerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return ControllerStatus{
		CNTLID: c.id, Discovery: c.sub.discovery, Host: c.hostNQN, HostID: c.path.hostID.String(), Remote: c.admin.remote.String(),
		Provider: c.admin.dev.info.Provider, Device: c.admin.dev.info.Name,
		State: c.state.String(), Age: age(time.Since(c.born)), CC: uint32(c.cc), CSTS: uint32(c.csts()),
		KATO: c.kato.String(), Timer: c.timerFor.String(), IOQueues: len(c.queues), Events: len(c.events), Errors: c.errCount,
	}
}

// status is called on the queue's worker.
func (q *queue) status() QueueStatus {
	s := QueueStatus{
		QID: q.qid, Remote: q.remote.String(), Local: q.local.String(),
		Provider: q.dev.info.Provider, Device: q.dev.info.Name, State: q.state.String(), Worker: q.lane.w.Name(),
		Depth: q.depth, Age: age(time.Since(q.born)), Commands: q.commands.Load(), Executing: q.executing,
		Unstarted: len(q.received), Reads: q.reads, ReadDepth: q.maxReads, SendQueue: int(q.head - q.tail), SendDepth: q.maxSend,
		States: map[string]int{},
	}
	if q.ctrl != nil {
		s.CNTLID = q.ctrl.id
	}
	if q.reason != nil {
		s.Reason = q.reason.Error()
	}
	var oldest *request
	for _, r := range q.requests {
		if r.state == reqFree {
			continue
		}
		s.States[r.state.String()]++
		if r.state != reqEvent && (oldest == nil || r.start.Before(oldest.start)) {
			oldest = r
		}
	}
	if oldest != nil {
		s.Oldest = &RequestStatus{Command: oldest.opcodeName(), CID: oldest.cmd.ID(), State: oldest.state.String(),
			Age: age(time.Since(oldest.start)), Detail: protocol.Describe(&oldest.cmd, q.qid == 0)}
	}
	return s
}

func age(d time.Duration) string { return d.Round(time.Millisecond).String() }
