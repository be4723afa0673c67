package initiator

import (
	"context"
	"fmt"
	"slices"
	"time"

	"rdblk/internal/arena"
	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
)

// Bounds of the admin side.
const (
	adminMemory  = 256 << 10 // data of admin commands: 4 KiB for every slot
	readyPoll    = 2 * time.Millisecond
	shutdownTime = 5 * time.Second  // for CC.SHN, as Linux; RTD3E may ask for more
	shutdownMax  = 60 * time.Second //
)

// controller is the admin side of an association: the admin queue and what the
// controller tells of itself.
type controller struct {
	lane   *lane
	mem    *arena.Arena
	cntlid uint16
	cap    protocol.CAP
	vs     protocol.Version
	ident  protocol.IdentifyController
}

// exec makes a command on the admin queue; a failure status is a *CommandError.
func (c *controller) exec(ctx context.Context, k *call) error {
	k.mem = c.mem
	if err := c.lane.do(ctx, k); err != nil {
		return err
	}
	return k.failure()
}

// failure is the error of a call that the target answered with a failure.
func (k *call) failure() error {
	if k.status.OK() {
		return nil
	}
	return &CommandError{Op: k.op, Status: k.status, Fabrics: k.sqe.IsFabrics()}
}

// connectQueue makes the Connect command on a queue (NVMe over Fabrics, "Connect"). The
// data goes by key also where the capsule would take it: every target has that.
func connectQueue(ctx context.Context, l *lane, data *protocol.ConnectData, kato time.Duration) (protocol.ConnectResult, error) {
	out, err := data.AppendBinary(nil)
	if err != nil {
		return 0, err
	}
	k := &call{op: "Connect", out: out}
	k.sqe.InitConnect(0, l.cfg.qid, l.sqsize(), uint32(kato/time.Millisecond), 0)
	if l.info.Transport == rdma.TransportIWARP {
		answered := make(chan struct{})
		defer close(answered)
		go l.nudge(answered)
	}
	if err := l.do(ctx, k); err != nil {
		return 0, fmt.Errorf("queue %d: %w", l.cfg.qid, err)
	}
	if !k.status.OK() {
		return 0, connectError(k, data, l.cfg.qid)
	}
	r := protocol.ConnectResult(uint32(k.result))
	if r.AuthRequired() {
		return 0, fmt.Errorf("queue %d: %w: the target demands in-band authentication (DH-HMAC-CHAP), which this initiator does not have", l.cfg.qid, ErrUnsupported)
	}
	return r, nil
}

// connectError says what the target has against a Connect, and what helps.
func connectError(k *call, data *protocol.ConnectData, qid uint16) error {
	e := &CommandError{Op: k.op, What: fmt.Sprintf("queue %d of %q", qid, data.SUBNQN), Status: k.status, Fabrics: true}
	switch k.status.Code() {
	case protocol.StatusConnectInvalidHost:
		e.Hint = fmt.Sprintf("the target does not allow host %q: add it to the subsystem's list of hosts", data.HOSTNQN)
	case protocol.StatusConnectControllerBusy:
		e.Hint = "the target has no free controller now, or still ends an earlier association"
	case protocol.StatusConnectInvalidParameters:
		field := protocol.ConnectInvalid(uint32(k.result))
		switch field {
		case protocol.ConnectInvalidSUBNQN:
			e.Hint, e.is = "the target has no subsystem of that name at this address: ask discovery", ErrUnknownSubsystem
		case protocol.ConnectInvalidHOSTNQN:
			e.Hint = fmt.Sprintf("the target does not take host %q", data.HOSTNQN)
		default:
			e.Hint = "invalid: " + field.String()
		}
	}
	return e
}

func (c *controller) property(ctx context.Context, p protocol.Property) (uint64, error) {
	k := &call{op: "Property Get " + p.String()}
	k.sqe.InitPropertyGet(0, p)
	if err := c.exec(ctx, k); err != nil {
		return 0, err
	}
	if p.Size() == 4 {
		return uint64(uint32(k.result)), nil
	}
	return k.result, nil
}

func (c *controller) setProperty(ctx context.Context, p protocol.Property, v uint64) error {
	k := &call{op: "Property Set " + p.String()}
	k.sqe.InitPropertySet(0, p, v)
	return c.exec(ctx, k)
}

// enable brings the controller up (NVMe over Fabrics, "Controller Initialization").
func (c *controller) enable(ctx context.Context) error {
	v, err := c.property(ctx, protocol.PropertyCAP)
	if err != nil {
		return err
	}
	c.cap = protocol.CAP(v)
	if v, err = c.property(ctx, protocol.PropertyVS); err != nil {
		return err
	}
	c.vs = protocol.Version(v)
	if c.cap.CSS()&(protocol.CSSNVM|protocol.CSSCommand) == 0 {
		return fmt.Errorf("%w: the controller has no NVM command set (CAP %#x)", ErrUnsupported, uint64(c.cap))
	}
	if c.cap.MPSMIN() != 0 {
		return fmt.Errorf("%w: the controller's smallest page is 2^%d bytes", ErrUnsupported, 12+c.cap.MPSMIN())
	}
	if err := c.setProperty(ctx, protocol.PropertyCC, uint64(protocol.CCDefault)); err != nil {
		return err
	}
	if err := c.setProperty(ctx, protocol.PropertyCC, uint64(protocol.CCDefault.WithEN(true))); err != nil {
		return err
	}
	limit := max(c.cap.TO(), 500*time.Millisecond)
	if c.cap.CRWMS() { // CRTO is there and may say more than CAP has room for
		v, err := c.property(ctx, protocol.PropertyCRTO)
		if err != nil {
			return err
		}
		limit = max(limit, protocol.CRTO(v).CRWMT())
	}
	return c.status(ctx, limit, "become ready", protocol.CSTS.RDY)
}

// status polls CSTS until it is as wanted, for at most limit.
func (c *controller) status(ctx context.Context, limit time.Duration, what string, want func(protocol.CSTS) bool) error {
	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		v, err := c.property(ctx, protocol.PropertyCSTS)
		if err != nil {
			return err
		}
		csts := protocol.CSTS(v)
		if want(csts) {
			return nil
		}
		if csts.CFS() {
			return fmt.Errorf("controller reports a fatal status (CSTS %#x) instead of having %s", uint32(csts), what)
		}
		select {
		case <-tick.C:
		case <-end.C:
			return fmt.Errorf("controller did not %s within %v (CSTS %#x): %w", what, limit, uint32(csts), ErrTimeout)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// identify gives the 4096 bytes of an Identify structure.
func (c *controller) identify(ctx context.Context, cns protocol.CNS, nsid uint32) ([]byte, error) {
	k := &call{op: "Identify " + cns.String(), in: protocol.IdentifySize}
	k.sqe.InitIdentify(0, cns, nsid)
	if err := c.exec(ctx, k); err != nil {
		return nil, err
	}
	return k.got, nil
}

// identifyController reads and judges Identify Controller. The checks are those of
// Linux.
func (c *controller) identifyController(ctx context.Context, discovery bool) error {
	b, err := c.identify(ctx, protocol.CNSController, 0)
	if err != nil {
		return err
	}
	if err := c.ident.UnmarshalBinary(b); err != nil {
		return err
	}
	d := &c.ident
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: Identify Controller: %s", ErrUnsupported, fmt.Sprintf(format, args...))
	}
	if d.CNTLID != c.cntlid {
		return fmt.Errorf("%w: Connect gave controller %d, Identify says %d", ErrProtocol, c.cntlid, d.CNTLID)
	}
	if d.SGLS&protocol.SGLSKeyed == 0 {
		return bad("no keyed SGLs (SGLS %#x)", d.SGLS)
	}
	if discovery {
		if d.CNTRLTYPE != 0 && d.CNTRLTYPE != protocol.ControllerTypeDiscovery {
			return bad("controller type %d is no discovery controller", d.CNTRLTYPE)
		}
		return nil
	}
	switch {
	case d.CNTRLTYPE > protocol.ControllerTypeIO:
		return bad("controller type %d is no I/O controller", d.CNTRLTYPE)
	case d.KAS == 0:
		return bad("no keep-alive")
	case d.IOCCSZ < protocol.CommandSize/16:
		return bad("command capsules of %d bytes", uint64(d.IOCCSZ)*16)
	case d.IORCSZ < protocol.CompletionSize/16:
		return bad("response capsules of %d bytes", uint64(d.IORCSZ)*16)
	case d.ICDOFF != 0:
		return bad("in-capsule data at an offset (ICDOFF %d)", d.ICDOFF)
	case d.MAXCMD == 1 || c.cap.MQES() == 0:
		return bad("queues without room for a command (MAXCMD %d, MQES %d)", d.MAXCMD, c.cap.MQES())
	}
	return nil
}

// ioDepth is the depth of I/O queues: what is wished, the controller's limits.
func (c *controller) ioDepth(wish int) int {
	n := min(wish, int(c.cap.MQES())+1)
	if m := int(c.ident.MAXCMD); m > 0 {
		n = min(n, m)
	}
	return max(n, MinDepth)
}

// log gives a part of a log page.
func (c *controller) log(ctx context.Context, lid protocol.LogID, nsid uint32, off uint64, n int, retain bool) ([]byte, error) {
	k := &call{op: "Get Log Page " + lid.String(), in: n}
	k.sqe.InitGetLogPage(0, lid, nsid, off, uint32(n), retain)
	if err := c.exec(ctx, k); err != nil {
		return nil, err
	}
	return k.got, nil
}

func (c *controller) setFeature(ctx context.Context, f protocol.FeatureID, v uint32) (uint32, error) {
	k := &call{op: "Set Features " + f.String()}
	k.sqe.InitSetFeatures(0, f, 0, v)
	if err := c.exec(ctx, k); err != nil {
		return 0, err // k may be the lane's still
	}
	return uint32(k.result), nil
}

// activeNamespaces lists the namespaces that there are, at most limit.
func (c *controller) activeNamespaces(ctx context.Context, limit int) ([]uint32, error) {
	var all []uint32
	for len(all) < limit {
		start := uint32(0)
		if len(all) > 0 {
			start = all[len(all)-1]
		}
		b, err := c.identify(ctx, protocol.CNSActiveNamespaces, start)
		if err != nil {
			return nil, err
		}
		n := 0
		for id := range protocol.NamespaceList(b) {
			if id <= start || id >= protocol.NSIDAll-1 {
				return nil, fmt.Errorf("%w: namespace list after %d has %d", ErrProtocol, start, id)
			}
			all = append(all, id)
			n++
		}
		if n < protocol.MaxNamespaceList {
			break
		}
	}
	return all[:min(len(all), limit)], nil
}

// describe asks for everything about a namespace. ErrNoNamespace says it is not there
// (or inactive).
func (c *controller) describe(ctx context.Context, nsid uint32) (*description, error) {
	d := &description{nsid: nsid}
	missing := func(err error) error { return fmt.Errorf("namespace %d: %w: %w", nsid, ErrNoNamespace, err) }
	b, err := c.identify(ctx, protocol.CNSNamespace, nsid)
	if err != nil {
		if isStatus(err, protocol.StatusInvalidNamespace) {
			return nil, missing(err)
		}
		return nil, err
	}
	if err := d.ns.UnmarshalBinary(b); err != nil {
		return nil, err
	}
	if d.ns.NCAP == 0 {
		return nil, fmt.Errorf("namespace %d: %w", nsid, ErrNoNamespace)
	}
	d.id.Serial = c.ident.SN
	if c.vs >= protocol.Version1_3 {
		b, err := c.identify(ctx, protocol.CNSNamespaceDescriptors, nsid)
		switch {
		case err == nil:
			if err := d.id.IDs.UnmarshalBinary(b); err != nil {
				return nil, fmt.Errorf("%w: namespace %d: %w", ErrProtocol, nsid, err)
			}
			if d.id.IDs.CSI != protocol.CSINVM {
				return nil, fmt.Errorf("namespace %d: %w: command set %s", nsid, ErrUnsupported, d.id.IDs.CSI)
			}
		case isStatus(err, protocol.StatusInvalidNamespace):
			return nil, missing(err)
		case !isRefusal(err):
			return nil, err
		}
	}
	if d.id.IDs.NGUID.IsZero() {
		d.id.IDs.NGUID = d.ns.NGUID
	}
	if d.id.IDs.EUI64.IsZero() {
		d.id.IDs.EUI64 = d.ns.EUI64
	}
	return d, nil
}

// cacheEpoch is what changes when the target loses the content of its volatile write
// cache: see the package comment, "Durability". A target that counts neither, or has no
// SMART log, says zero.
type cacheEpoch struct {
	powerCycles, unsafeShutdowns protocol.Uint128
}

func (e cacheEpoch) known() bool { return e != cacheEpoch{} }

// epoch asks for the log page of the namespace, or (NSIDAll) of the controller.
func (c *controller) epoch(ctx context.Context, nsid uint32) (cacheEpoch, error) {
	b, err := c.log(ctx, protocol.LogSmart, nsid, 0, protocol.SmartLogSize, true)
	if err != nil {
		if isRefusal(err) && (nsid == protocol.NSIDAll || !isStatus(err, protocol.StatusInvalidNamespace)) {
			return cacheEpoch{}, nil
		}
		return cacheEpoch{}, err
	}
	var s protocol.SmartLog
	if err := s.UnmarshalBinary(b); err != nil {
		return cacheEpoch{}, err
	}
	return cacheEpoch{powerCycles: s.PowerCycles, unsafeShutdowns: s.UnsafeShutdowns}, nil
}

// nvmLimits reads the limits of commands without transfer; zeros if the controller has
// none to tell.
func (c *controller) nvmLimits(ctx context.Context) (l protocol.IdentifyNVMController, err error) {
	b, err := c.identify(ctx, protocol.CNSCommandSetController, 0)
	if err != nil {
		if isRefusal(err) {
			err = nil
		}
		return l, err
	}
	err = l.UnmarshalBinary(b)
	return l, err
}

// shutdown is the orderly end: CC.SHN, then wait for the controller to say that it is
// done.
func (c *controller) shutdown(ctx context.Context) error {
	cc := protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal)
	if err := c.setProperty(ctx, protocol.PropertyCC, uint64(cc)); err != nil {
		return err
	}
	limit := min(max(shutdownTime, time.Duration(c.ident.RTD3E)*time.Microsecond), shutdownMax)
	return c.status(ctx, limit, "shut down", func(s protocol.CSTS) bool { return s.SHST() == protocol.SHSTComplete })
}

// isStatus reports whether err is the answer with one of these codes.
func isStatus(err error, codes ...protocol.Status) bool {
	ce := commandError(err)
	return ce != nil && slices.Contains(codes, ce.Status.Code())
}

// isRefusal reports whether err is a failure status from the target, rather than
// trouble with the connection.
func isRefusal(err error) bool { return commandError(err) != nil }

// controllerConfig tells connectController whom to connect to and as whom.
type controllerConfig struct {
	lane laneConfig
	mem  *arena.Arena
	data protocol.ConnectData
	kato time.Duration
}

// connectController connects an admin queue and initialises the controller behind it,
// up to and including Identify Controller. With an error it returns what there is of
// the controller, for teardown, or nil.
func connectController(ctx context.Context, cfg controllerConfig) (*controller, error) {
	l, err := dialLane(ctx, cfg.lane)
	if err != nil {
		return nil, err
	}
	if err := l.attach(); err != nil {
		l.abandon()
		return nil, err
	}
	c := &controller{lane: l, mem: cfg.mem}
	r, err := connectQueue(ctx, l, &cfg.data, cfg.kato)
	if err != nil {
		return c, err
	}
	c.cntlid = r.CNTLID()
	if err := c.enable(ctx); err != nil {
		return c, err
	}
	return c, c.identifyController(ctx, cfg.data.SUBNQN == protocol.DiscoveryNQN)
}

// adminSide is the worker and memory of an admin queue. It outlives associations.
type adminSide struct {
	w      *worker.Worker
	mem    *arena.Arena
	region region
}

func newAdminSide() (*adminSide, error) {
	// It never polls: an admin queue is quiet, and a core is worth more than
	// microseconds here.
	w, err := worker.New(worker.Config{Name: "admin", MaxPoll: -1, Quiet: true})
	if err != nil {
		return nil, err
	}
	mem, err := arena.New(adminMemory)
	if err != nil {
		w.Close()
		return nil, err
	}
	return &adminSide{w: w, mem: mem, region: region{mem: mem.Bytes()}}, nil
}

func (a *adminSide) close() {
	a.w.Close()
	a.mem.Close()
}
