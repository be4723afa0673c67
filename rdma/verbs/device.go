//go:build cgo && linux && !noverbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// Provider gives access to the RDMA devices of this machine.
type Provider struct {
	lib *library
	cfg Config

	mu   sync.Mutex
	devs map[*opened]*device
}

var _ rdma.Provider = (*Provider)(nil)

// New loads the libraries. An error that is rdma.ErrNotSupported says what is missing on this machine.
func New(cfg Config) (*Provider, error) {
	l, err := load()
	if err != nil {
		return nil, err
	}
	if cfg.ResolveTimeout <= 0 {
		cfg.ResolveTimeout = 5 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	} else {
		l.addLogger(cfg.Logger)
	}
	return &Provider{lib: l, cfg: cfg, devs: map[*opened]*device{}}, nil
}

// Name returns "verbs".
func (p *Provider) Name() string { return providerName }

// Devices lists the machine's RDMA devices.
func (p *Provider) Devices() ([]rdma.DeviceInfo, error) {
	var list []rdma.DeviceInfo
	for i := 0; ; i++ {
		var name [64]C.char
		var ctx *C.struct_vb_context
		e := syscall.Errno(C.vb_device_open(C.int(i), &name[0], &ctx))
		dev := C.GoString(&name[0])
		switch {
		case e == unix.ENODEV && dev == "":
			return list, nil
		case e == unix.ENOSYS && dev == "":
			return nil, fmt.Errorf("%w: the kernel has no RDMA user access; load it with modprobe ib_uverbs", rdma.ErrNotSupported)
		case e != 0:
			return list, &rdma.OpError{Op: "open device " + dev, Provider: providerName, Err: errnoError(e)}
		}
		k, err := p.lib.info(ctx, dev)
		C.vb_device_close(ctx)
		if err != nil {
			return list, err
		}
		list = append(list, k.info)
	}
}

// rxeVendor is the vendor number of the kernel's soft-RoCE. It passes on the kernel's value of the flag "with
// invalidate", which is another one than the library's.
const (
	rxeVendor      = 0xFFFFFF
	siwVendor      = 0x626D74
	flagWithInv    = 1 << 3
	flagWithInvRxe = 1 << 2
)

// maxDepth is the largest IRD and ORD that connection parameters can carry; 255 means "the device's most" there.
const maxDepth = 254

// info queries a device; limits once, addresses every time.
func (l *library) info(ctx *C.struct_vb_context, name string) (known, error) {
	l.mu.Lock()
	k, ok := l.known[name]
	l.mu.Unlock()
	if !ok {
		var a C.struct_vb_device_attr
		if e := C.vb_query(ctx, &a); e != 0 {
			return k, opError("query device "+name, e)
		}
		info := rdma.DeviceInfo{Name: name, Provider: providerName, Transport: rdma.TransportIB,
			MaxQPWR: int(a.max_qp_wr), MaxSGE: int(a.max_sge), MaxReadSGE: 1, MaxInline: int(C.vb_probe_inline(ctx)), MaxCQE: int(a.max_cqe),
			MaxReadDepth: min(int(a.max_qp_rd_atom), int(a.max_qp_init_rd_atom), maxDepth),
			MaxMRBytes:   int64(min(uint64(a.max_mr_size), 1<<62)), MaxPrivate: 56,
			MemWindows: a.device_cap_flags&C.VB_CAP_MEM_WINDOW_2B != 0, SendInv: a.device_cap_flags&C.VB_CAP_MGT_EXTENSIONS != 0, RNRRetry: true,
			Autonomous: true}
		if ctx.device.transport_type == 1 {
			info.Transport, info.RNRRetry, info.MaxPrivate = rdma.TransportIWARP, false, 251
			info.MaxReadDepth = min(info.MaxReadDepth, 128)
		}
		info.MaxQPWR = min(info.MaxQPWR, maxRing)
		k = known{info: info, vendor: uint32(a.vendor_id)}
		l.mu.Lock()
		l.known[name] = k
		l.mu.Unlock()
	}
	k.info.Addrs = addresses(name)
	return k, nil
}

// addresses finds the IP addresses of a device's network interfaces.
func addresses(name string) (list []netip.Addr) {
	ports, _ := filepath.Glob(filepath.Join("/sys/class/infiniband", name, "ports/*"))
	ifs, err := net.Interfaces()
	if err != nil {
		return nil
	}
	for _, port := range ports {
		netdevs, mac := netdevsOf(port)
		for _, i := range ifs {
			if !netdevs[i.Name] && (len(mac) == 0 || !bytes.Equal(mac, i.HardwareAddr)) {
				continue
			}
			addrs, _ := i.Addrs()
			for _, a := range addrs {
				n, ok := a.(*net.IPNet)
				if !ok {
					continue
				}
				if ip, ok := netip.AddrFromSlice(n.IP); ok && !slices.Contains(list, ip.Unmap()) {
					list = append(list, ip.Unmap())
				}
			}
		}
	}
	return list
}

// netdevsOf finds the network interfaces of a port, a directory ports/N in sysfs: by name, or by hardware address.
func netdevsOf(port string) (names map[string]bool, mac []byte) {
	names = map[string]bool{}
	line := func(path string) string {
		b, _ := os.ReadFile(path)
		return strings.TrimSpace(string(b))
	}
	if line(filepath.Join(port, "link_layer")) == "InfiniBand" {
		// The GID table names none; IP runs over interfaces of the same adapter, which number their ports from 0.
		n, _ := strconv.Atoi(filepath.Base(port))
		devs, _ := filepath.Glob(filepath.Join(port, "../../device/net/*"))
		for _, d := range devs {
			const typeInfiniBand = "32" // ARPHRD_INFINIBAND
			p, err := strconv.ParseInt(line(filepath.Join(d, "dev_port")), 0, 32)
			if line(filepath.Join(d, "type")) == typeInfiniBand && err == nil && int(p) == n-1 {
				names[filepath.Base(d)] = true
			}
		}
		return names, nil
	}
	files, _ := filepath.Glob(filepath.Join(port, "gid_attrs/ndevs/*"))
	for _, f := range files {
		if s := line(f); s != "" {
			names[s] = true
		}
	}
	// iWARP has no such table; the first GID begins with the hardware address.
	if len(names) == 0 {
		if raw, err := hex.DecodeString(strings.ReplaceAll(line(filepath.Join(port, "gids/0")), ":", "")); err == nil && len(raw) == 16 {
			mac = raw[:6]
		}
	}
	return names, mac
}

// device is an open device: a context, which belongs to librdmacm and stays open.
type device struct {
	p    *Provider
	o    *opened
	ctx  *C.struct_vb_context
	info rdma.DeviceInfo
	inv  C.uint32_t // completion flag "with invalidate"
	rxe  bool
	siw  bool

	vector  atomic.Uint32
	objects atomic.Int64 // PDs and CQs
	closed  atomic.Bool
}

// device returns the provider's device of an id's context.
func (p *Provider) device(ctx *C.struct_vb_context) (*device, error) {
	o, err := p.lib.open(ctx)
	if err != nil {
		return nil, &rdma.OpError{Op: "open device", Provider: providerName, Err: err}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.devs[o]; d != nil {
		return d, nil
	}
	k, err := p.lib.info(ctx, o.name)
	if err != nil {
		return nil, err
	}
	d := &device{p: p, o: o, ctx: ctx, info: k.info, inv: flagWithInv, rxe: k.vendor == rxeVendor, siw: k.vendor == siwVendor}
	if d.rxe {
		d.inv |= flagWithInvRxe
	}
	if d.siw {
		o.reading.Lock()
		if !o.guarded {
			o.guarded, o.guard = true, C.vb_guard(ctx)
		}
		o.reading.Unlock()
	}
	for old := range p.devs {
		if old.removed.Load() {
			delete(p.devs, old)
		}
	}
	p.devs[o] = d
	return d, nil
}

// hold counts an object that is going to be made on the device.
func (d *device) hold() error {
	if d.closed.Load() {
		return rdma.ErrClosed
	}
	if err := d.o.hold(); err != nil {
		return &rdma.OpError{Op: "use device " + d.info.Name, Provider: providerName, Err: err}
	}
	d.objects.Add(1)
	return nil
}

func (d *device) drop() {
	d.objects.Add(-1)
	d.o.drop()
}

func (d *device) iwarp() bool { return d.info.Transport == rdma.TransportIWARP }

func (d *device) Info() rdma.DeviceInfo { return d.info }

func (d *device) Removed() <-chan struct{} { return d.o.gone }

func (d *device) Close() error {
	if n := d.objects.Load(); n > 0 {
		return &rdma.OpError{Op: "close device", Provider: providerName, Err: fmt.Errorf("%w: %d objects of %s are in use", rdma.ErrInvalid, n, d.info.Name)}
	}
	if d.closed.Swap(true) {
		return nil
	}
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if d.p.devs[d.o] == d {
		delete(d.p.devs, d.o)
	}
	return nil
}

func (d *device) AllocPD() (rdma.PD, error) {
	if err := d.hold(); err != nil {
		return nil, err
	}
	p := &pd{dev: d}
	if e := C.vb_alloc_pd(d.ctx, &p.p); e != 0 {
		d.drop()
		return nil, opError("allocate protection domain", e)
	}
	p.mrs.Store(&map[uint32]*mr{})
	return p, nil
}

// pd is a protection domain with a table of its keys, in which posts look up what they name.
type pd struct {
	dev *device
	p   unsafe.Pointer
	mrs atomic.Pointer[map[uint32]*mr] // by lkey; copied on write

	lingering

	mu     sync.Mutex
	users  int // MRs, MWs, QPs
	closed bool
}

// lingering is what an object keeps of closed queue pairs that the kernel has still to destroy.
type lingering struct {
	lmu  sync.Mutex
	list []<-chan struct{}
}

// lingerLimit bounds the wait for the destruction of a queue pair whose connection request has not been answered. siw
// lets go of it 10 s after the request; a TCP connection that it is still trying to open may take longer.
const lingerLimit = 15 * time.Second

func (l *lingering) linger(done <-chan struct{}) {
	l.lmu.Lock()
	defer l.lmu.Unlock()
	l.list = append(slices.DeleteFunc(l.list, func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}), done)
}

// settle waits until they are gone. The caller holds no lock that their end needs.
func (l *lingering) settle() error {
	l.lmu.Lock()
	list := l.list
	l.list = nil
	l.lmu.Unlock()
	if len(list) == 0 {
		return nil
	}
	t := time.NewTimer(lingerLimit)
	defer t.Stop()
	for i, c := range list {
		select {
		case <-c:
		case <-t.C:
			l.lmu.Lock()
			l.list = append(l.list, list[i:]...)
			l.lmu.Unlock()
			return fmt.Errorf("%w: the kernel still has a queue pair of a connection request that nobody has answered", rdma.ErrTimeout)
		}
	}
	return nil
}

func (p *pd) use(n int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed && n > 0 {
		return rdma.ErrClosed
	}
	p.users += n
	return nil
}

func (p *pd) Close() error {
	err := p.settle() // without the lock: what it waits for may hold memory of this domain
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	if p.users > 0 {
		return &rdma.OpError{Op: "close protection domain", Provider: providerName, Err: fmt.Errorf("%w: %d objects are in use", rdma.ErrInvalid, p.users)}
	}
	if err != nil {
		return &rdma.OpError{Op: "close protection domain", Provider: providerName, Err: err}
	}
	if e := C.vb_dealloc_pd(p.p); e != 0 {
		return opError("close protection domain", e)
	}
	p.closed = true
	p.dev.drop()
	return nil
}

// change replaces the key table; p.mu is held.
func (p *pd) change(f func(m map[uint32]*mr)) {
	old := *p.mrs.Load()
	m := make(map[uint32]*mr, len(old)+1)
	for k, v := range old {
		m[k] = v
	}
	f(m)
	p.mrs.Store(&m)
}

const allAccess = rdma.AccessLocalWrite | rdma.AccessRemoteWrite | rdma.AccessRemoteRead | rdma.AccessMWBind

// accessBits translates rights to enum ibv_access_flags.
func accessBits(a rdma.Access) (bits int) {
	for _, x := range [...]struct {
		a rdma.Access
		b int
	}{{rdma.AccessLocalWrite, 1}, {rdma.AccessRemoteWrite, 2}, {rdma.AccessRemoteRead, 4}, {rdma.AccessMWBind, 16}} {
		if a&x.a != 0 {
			bits |= x.b
		}
	}
	return bits
}

func (p *pd) Register(mem []byte, access rdma.Access) (rdma.MR, error) {
	bad := func(s string) (rdma.MR, error) {
		return nil, &rdma.OpError{Op: "register memory", Provider: providerName, Err: fmt.Errorf("%w: %s", rdma.ErrInvalid, s)}
	}
	switch {
	case access&^allAccess != 0:
		return bad("unknown access right")
	case access&rdma.AccessRemoteWrite != 0 && access&rdma.AccessLocalWrite == 0:
		return bad("remote write needs local write")
	}
	if err := p.use(1); err != nil {
		return nil, err
	}
	if len(mem) == 0 {
		p.use(-1)
		return bad("no memory")
	}
	hw := access
	if !p.dev.info.MemWindows {
		hw &^= rdma.AccessMWBind
	}
	m := &mr{pd: p, access: access, addr: uint64(uintptr(unsafe.Pointer(&mem[0]))), n: uint64(len(mem))}
	if e := C.vb_reg_mr(p.p, C.uintptr_t(m.addr), C.size_t(len(mem)), C.int(accessBits(hw)), &m.m); e != 0 {
		p.use(-1)
		return nil, &rdma.OpError{Op: fmt.Sprintf("register %d KiB of memory", (len(mem)+1023)/1024), Provider: providerName, Err: memoryError(syscall.Errno(e), len(mem))}
	}
	m.lkey, m.rkey = uint32(m.m.lkey), uint32(m.m.rkey)
	p.mu.Lock()
	p.change(func(t map[uint32]*mr) { t[m.lkey] = m })
	p.mu.Unlock()
	return m, nil
}

// mr is a memory region.
type mr struct {
	pd         *pd
	m          *C.struct_vb_mr
	addr, n    uint64
	lkey, rkey uint32
	access     rdma.Access
	dead       atomic.Bool
}

func (m *mr) LKey() uint32 { return m.lkey }
func (m *mr) RKey() uint32 { return m.rkey }
func (m *mr) Addr() uint64 { return m.addr }
func (m *mr) Len() int     { return int(m.n) }

func (m *mr) Deregister() error {
	if m.dead.Swap(true) {
		return nil
	}
	m.pd.mu.Lock()
	m.pd.change(func(t map[uint32]*mr) { delete(t, m.lkey) })
	m.pd.mu.Unlock()
	if e := C.vb_dereg_mr(m.m); e != 0 {
		m.dead.Store(false) // the keys stay gone from the table: only another Deregister is possible
		return opError("deregister memory", e)
	}
	m.pd.use(-1)
	return nil
}

// holds tells whether a piece lies inside, and the region has the right.
func (m *mr) holds(addr uint64, n uint32, need rdma.Access) bool {
	off := addr - m.addr
	return addr >= m.addr && off <= m.n && uint64(n) <= m.n-off && m.access&need == need && !m.dead.Load()
}

func (p *pd) AllocMW() (rdma.MW, error) {
	if !p.dev.info.MemWindows {
		return nil, &rdma.OpError{Op: "allocate memory window", Provider: providerName, Err: fmt.Errorf("%w: %s has no windows of type 2B", rdma.ErrNotSupported, p.dev.info.Name)}
	}
	if err := p.use(1); err != nil {
		return nil, err
	}
	w := &mw{pd: p}
	if err := w.alloc(); err != nil {
		p.use(-1)
		return nil, err
	}
	return w, nil
}

// mw is a memory window of type 2B. What is bound where is the business of the owner of the queue pair.
type mw struct {
	pd *pd

	mu     sync.Mutex // Close against the end of the queue pair
	w      *C.struct_vb_mw
	key    atomic.Uint32
	qp     atomic.Pointer[qp] // the queue pair it was last bound on
	bound  bool               // the owner of that queue pair has bound it, and not seen it invalidated
	closed atomic.Bool

	waiting bool // a bind of it waits for the doorbell; the owner's of the queue pair
}

func (w *mw) alloc() error {
	if e := C.vb_alloc_mw(w.pd.dev.ctx, w.pd.p, &w.w); e != 0 {
		return opError("allocate memory window", e)
	}
	w.key.Store(uint32(w.w.rkey))
	return nil
}

func (w *mw) RKey() uint32 { return w.key.Load() }

// renew frees a window from a queue pair that is going to be destroyed, which not every device does by itself.
func (w *mw) renew(q *qp) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Load() || !w.qp.CompareAndSwap(q, nil) {
		return
	}
	if C.vb_dealloc_mw(w.w) != 0 {
		return // stays bound; the next bind fails
	}
	w.w = nil
	if w.alloc() != nil {
		w.closed.Store(true)
		w.pd.use(-1)
	}
}

func (w *mw) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Swap(true) {
		return nil
	}
	if e := C.vb_dealloc_mw(w.w); e != 0 {
		w.closed.Store(false)
		return opError("close memory window", e)
	}
	w.w = nil
	w.pd.use(-1)
	return nil
}

// Dial resolves remote to a device and a route.
func (p *Provider) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	fail := func(err error) (rdma.Conn, error) {
		return nil, &rdma.OpError{Op: "dial", Provider: providerName, Addr: remote, Err: err}
	}
	if !remote.IsValid() || remote.Port() == 0 {
		return fail(fmt.Errorf("%w: no address or no port", rdma.ErrInvalid))
	}
	p.lib.sync()
	c := p.newConn(p.lib.token())
	c.active, c.remote = true, remote
	if e := C.vb_cm_create(p.lib.channel, C.uint64_t(c.token), &c.id); e != 0 {
		return fail(errnoError(syscall.Errno(e)))
	}
	C.vb_cm_ack_timeout(c.id, ackTimeout)
	p.lib.addConn(c)
	ms := C.int(p.cfg.ResolveTimeout / time.Millisecond)
	var src unsafe.Pointer
	if local.IsValid() {
		src = unsafe.Pointer(sockaddr(netip.AddrPortFrom(local, 0)))
	}
	dst := sockaddr(remote)
	e := C.vb_cm_resolve(c.id, src, unsafe.Pointer(dst), ms)
	var err error
	if e == 0 {
		if err = c.step(ctx, evAddrResolved); err == nil {
			if e = C.vb_cm_route(c.id, ms); e == 0 {
				err = c.step(ctx, evRouteResolved)
			}
		}
	}
	if e != 0 {
		err = resolveError(syscall.Errno(e))
	}
	if err == nil && c.id.verbs == nil {
		err = fmt.Errorf("%w: no RDMA device for this address", rdma.ErrNotSupported)
	}
	if err == nil {
		c.dev, err = p.device(c.id.verbs)
	}
	if err == nil {
		err = c.bind()
	}
	if err != nil {
		c.Close()
		return fail(err)
	}
	c.local = addrOf(unsafe.Pointer(&c.id.src_addr[0]))
	return c, nil
}

// resolveError explains why an address does not lead to a device.
func resolveError(e syscall.Errno) error {
	switch e {
	case unix.ENODEV, unix.EADDRNOTAVAIL, unix.ENOENT:
		return fmt.Errorf("%w: %w: no RDMA device has the route to this address", rdma.ErrNotSupported, e)
	}
	return errnoError(e)
}

// sockaddr makes a sockaddr_in or sockaddr_in6.
func sockaddr(a netip.AddrPort) *[28]byte {
	var s [28]byte
	port := a.Port()
	ip := a.Addr()
	if ip.Is4() || ip.Is4In6() {
		*(*uint16)(unsafe.Pointer(&s[0])) = unix.AF_INET
		v4 := ip.Unmap().As4()
		copy(s[4:], v4[:])
	} else {
		*(*uint16)(unsafe.Pointer(&s[0])) = unix.AF_INET6
		v6 := ip.As16()
		copy(s[8:], v6[:])
		if z := ip.Zone(); z != "" {
			if i, err := net.InterfaceByName(z); err == nil {
				*(*uint32)(unsafe.Pointer(&s[24])) = uint32(i.Index)
			}
		}
	}
	s[2], s[3] = byte(port>>8), byte(port)
	return &s
}

// addrOf reads one.
func addrOf(p unsafe.Pointer) netip.AddrPort {
	b := unsafe.Slice((*byte)(p), 28)
	port := uint16(b[2])<<8 | uint16(b[3])
	switch *(*uint16)(p) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), port)
	}
	return netip.AddrPort{}
}
