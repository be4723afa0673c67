package blockdevtest

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
)

// Match selects calls. The zero value matches all.
type Match struct {
	Ops []blockdev.Op // none = all
	// Off and Len are a range in bytes that the call must touch; Len 0 = anywhere. A
	// flush touches everything.
	Off, Len int64
	// FUA matches only calls with WriteFUA.
	FUA bool
}

func (m *Match) matches(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) bool {
	found := len(m.Ops) == 0
	for _, o := range m.Ops {
		found = found || o == op
	}
	if !found || m.FUA && flags&blockdev.WriteFUA == 0 {
		return false
	}
	return m.Len == 0 || op == blockdev.OpFlush || off < m.Off+m.Len && m.Off < off+n
}

// hook is called before each call to the device below. Its error is the call's; partial bytes
// of a write are done before that. after, if not nil, is called between the call and its answer.
type hook func(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) (partial int64, err error, after func())

// wrapper passes calls on through a hook. It is a TryDevice if the device below
// is one; calls that the hook cares about always would block, so that the hook runs where waiting is allowed.
type wrapper struct {
	blockdev.Device
	try   blockdev.TryDevice
	hook  hook
	cares func(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) bool
}

func (w *wrapper) init(dev blockdev.Device) {
	w.Device = dev
	w.try, _ = dev.(blockdev.TryDevice)
}

// Refresh is that of the device below.
func (w *wrapper) Refresh() (blockdev.Info, error) {
	if r, ok := w.Device.(blockdev.Resizer); ok {
		return r.Refresh()
	}
	return w.Info(), blockdev.ErrNotSupported
}

func (w *wrapper) ReadAt(p []byte, off int64) error {
	_, err, after := w.hook(blockdev.OpRead, off, int64(len(p)), 0)
	if err != nil {
		return err
	}
	err = w.Device.ReadAt(p, off)
	if after != nil {
		after()
	}
	return err
}

func (w *wrapper) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	partial, err, after := w.hook(blockdev.OpWrite, off, int64(len(p)), flags)
	if err != nil {
		if partial > 0 {
			w.Device.WriteAt(p[:partial], off, 0)
		}
		return err
	}
	err = w.Device.WriteAt(p, off, flags)
	if after != nil {
		after()
	}
	return err
}

func (w *wrapper) TryReadAt(p []byte, off int64) error {
	if w.try == nil || w.cares(blockdev.OpRead, off, int64(len(p)), 0) {
		return blockdev.ErrWouldBlock
	}
	return w.try.TryReadAt(p, off)
}

func (w *wrapper) TryWriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	if w.try == nil || w.cares(blockdev.OpWrite, off, int64(len(p)), flags) {
		return blockdev.ErrWouldBlock
	}
	return w.try.TryWriteAt(p, off, flags)
}

func (w *wrapper) Zero(off, n int64, flags blockdev.WriteFlags) error {
	partial, err, after := w.hook(blockdev.OpZero, off, n, flags)
	if err != nil {
		if partial > 0 {
			w.Device.Zero(off, partial, 0)
		}
		return err
	}
	err = w.Device.Zero(off, n, flags)
	if after != nil {
		after()
	}
	return err
}

func (w *wrapper) Discard(off, n int64) error {
	_, err, after := w.hook(blockdev.OpDiscard, off, n, 0)
	if err != nil {
		return err
	}
	err = w.Device.Discard(off, n)
	if after != nil {
		after()
	}
	return err
}

func (w *wrapper) Flush() error {
	_, err, after := w.hook(blockdev.OpFlush, 0, 0, 0)
	if err != nil {
		return err
	}
	err = w.Device.Flush()
	if after != nil {
		after()
	}
	return err
}

// Rule is an error to inject.
type Rule struct {
	Match
	Skip  int   // let so many matching calls pass first
	Count int   // then fail so many; 0 = all
	Err   error // what the call returns, usually an errno
	// Partial lets a failing write or zero do the first half of its blocks.
	Partial bool
}

// FaultyDevice is made by Faulty.
type FaultyDevice struct {
	wrapper
	mu     sync.Mutex
	rules  []*Rule
	hits   int
	sticky error
}

// Faulty is dev with errors by rule; the first rule that matches decides. An error on a
// flush or a FUA call makes the device failed as the contract asks.
func Faulty(dev blockdev.Device, rules ...Rule) *FaultyDevice {
	d := &FaultyDevice{}
	d.init(dev)
	d.hook, d.cares = d.inject, d.matches
	d.Set(rules...)
	return d
}

// Set replaces the rules and their counts.
func (d *FaultyDevice) Set(rules ...Rule) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rules = nil
	for _, r := range rules {
		d.rules = append(d.rules, &r)
	}
}

// Hits is how many errors were injected.
func (d *FaultyDevice) Hits() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hits
}

func (d *FaultyDevice) matches(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.rules {
		if r.Count >= 0 && r.matches(op, off, n, flags) {
			return true
		}
	}
	return false
}

func (d *FaultyDevice) inject(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) (int64, error, func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	durable := op == blockdev.OpFlush || flags&blockdev.WriteFUA != 0
	if durable && d.sticky != nil {
		return 0, d.sticky, nil
	}
	for _, r := range d.rules {
		if r.Count < 0 || !r.matches(op, off, n, flags) {
			continue
		}
		if r.Skip > 0 {
			r.Skip--
			return 0, nil, nil
		}
		if r.Count > 0 {
			if r.Count--; r.Count == 0 {
				r.Count = -1 // used up
			}
		}
		d.hits++
		if durable {
			d.sticky = fmt.Errorf("%w (%w)", blockdev.ErrFlushFailed, r.Err)
		}
		var partial int64
		if bs := int64(d.Info().BlockSize); r.Partial {
			partial = n / bs / 2 * bs
		}
		return partial, fmt.Errorf("injected into %v of %d bytes at %d: %w", op, n, off, r.Err), nil
	}
	return 0, nil, nil
}

// DelayedDevice is made by Delayed.
type DelayedDevice struct {
	wrapper
	mu    sync.Mutex
	gates []*Gate
}

// Delayed is dev whose calls can be stopped at gates.
func Delayed(dev blockdev.Device) *DelayedDevice {
	d := &DelayedDevice{}
	d.init(dev)
	d.hook, d.cares = d.stop, d.stops
	return d
}

// Gate stops calls until the test lets them go.
type Gate struct {
	d      *DelayedDevice
	match  Match
	answer bool

	mu      sync.Mutex
	changed chan struct{} // closed and replaced when something below changes
	waiting int
	passes  int
	open    bool
}

// Hold stops matching calls before they reach the device.
func (d *DelayedDevice) Hold(m Match) *Gate { return d.add(m, false) }

// HoldAnswer lets matching calls take effect and stops their answers.
func (d *DelayedDevice) HoldAnswer(m Match) *Gate { return d.add(m, true) }

func (d *DelayedDevice) add(m Match, answer bool) *Gate {
	g := &Gate{d: d, match: m, answer: answer, changed: make(chan struct{})}
	d.mu.Lock()
	d.gates = append(d.gates, g)
	d.mu.Unlock()
	return g
}

func (d *DelayedDevice) find(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) *Gate {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.gates {
		if g.match.matches(op, off, n, flags) {
			return g
		}
	}
	return nil
}

func (d *DelayedDevice) stops(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) bool {
	return d.find(op, off, n, flags) != nil
}

func (d *DelayedDevice) stop(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) (int64, error, func()) {
	g := d.find(op, off, n, flags)
	switch {
	case g == nil:
		return 0, nil, nil
	case g.answer:
		return 0, nil, g.wait
	}
	g.wait()
	return 0, nil, nil
}

func (g *Gate) wait() {
	g.mu.Lock()
	g.waiting++
	g.signal()
	for !g.open && g.passes == 0 {
		ch := g.changed
		g.mu.Unlock()
		<-ch
		g.mu.Lock()
	}
	if !g.open {
		g.passes--
	}
	g.waiting--
	g.signal()
	g.mu.Unlock()
}

func (g *Gate) signal() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// Waiting is how many calls are stopped now.
func (g *Gate) Waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting
}

// Await returns when at least n calls are stopped; the test fails if that does not happen in a minute.
func (g *Gate) Await(t testing.TB, n int) {
	t.Helper()
	limit := time.After(60 * time.Second)
	g.mu.Lock()
	for g.waiting < n {
		ch, have := g.changed, g.waiting
		g.mu.Unlock()
		select {
		case <-ch:
		case <-limit:
			t.Fatalf("%d calls are stopped at the gate, want %d", have, n)
		}
		g.mu.Lock()
	}
	g.mu.Unlock()
}

// Pass lets n calls go: some that wait or the next that come.
func (g *Gate) Pass(n int) {
	g.mu.Lock()
	g.passes += n
	g.signal()
	g.mu.Unlock()
}

// Open lets all go and takes the gate away.
func (g *Gate) Open() {
	g.mu.Lock()
	g.open = true
	g.signal()
	g.mu.Unlock()
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	for i, o := range g.d.gates {
		if o == g {
			g.d.gates = append(g.d.gates[:i:i], g.d.gates[i+1:]...)
			return
		}
	}
}

// FullDevice is made by Full.
type FullDevice struct {
	wrapper
	mu   sync.Mutex
	free int64 // blocks
	used map[int64]struct{}
}

// Full is dev on a store that has room for n bytes: writing a block for the first
// time takes room, Discard and a Zero that may unmap give it back. A write that
// finds none is done up to there and fails with ENOSPC.
func Full(dev blockdev.Device, n int64) *FullDevice {
	d := &FullDevice{free: n / int64(dev.Info().BlockSize), used: map[int64]struct{}{}}
	d.init(dev)
	d.hook = d.account
	d.cares = func(op blockdev.Op, _, _ int64, _ blockdev.WriteFlags) bool { return op != blockdev.OpRead }
	return d
}

// Room is what is left in bytes; Grow adds to it.
func (d *FullDevice) Room() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.free * int64(d.Info().BlockSize)
}

// Grow adds n bytes of room.
func (d *FullDevice) Grow(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free += n / int64(d.Info().BlockSize)
}

func (d *FullDevice) account(op blockdev.Op, off, n int64, flags blockdev.WriteFlags) (int64, error, func()) {
	if op == blockdev.OpRead || op == blockdev.OpFlush {
		return 0, nil, nil
	}
	in := d.Info()
	if in.CheckRange(off, n) != nil {
		return 0, nil, nil // the device's to refuse
	}
	bs := int64(in.BlockSize)
	d.mu.Lock()
	defer d.mu.Unlock()
	take := op == blockdev.OpWrite || op == blockdev.OpZero && flags&blockdev.ZeroNoUnmap != 0
	for b := off / bs; b < (off+n)/bs; b++ {
		_, have := d.used[b]
		switch {
		case take && have, !take && !have:
		case take && d.free == 0:
			return b*bs - off, fmt.Errorf("%s: %v %d bytes at %d: %w", in.Name, op, n, off, unix.ENOSPC), nil
		case take:
			d.used[b] = struct{}{}
			d.free--
		default:
			delete(d.used, b)
			d.free++
		}
	}
	return 0, nil, nil
}
