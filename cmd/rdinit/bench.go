package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/blockdev"
	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/histogram"
	"rdblk/internal/timeout"
	"rdblk/internal/version"
	"rdblk/internal/worker"
)

const benchHelp = `Attaches the namespace for the time of the measurement and drives its queues directly, so that
the wire and the target are measured without the NBD hop. Prints operations and MiB per second and
latency percentiles. Each queue keeps --iodepth requests of --bs bytes in flight.

Writing destroys what is on the namespace; it needs --destroy-data.`

// Bounds of --runtime.
const (
	minRuntime = 10 * time.Millisecond
	maxRuntime = 24 * time.Hour
)

// A benchJob is what to measure.
type benchJob struct {
	RW      string
	Write   bool
	Random  bool
	BS      int64
	Depth   int
	Runtime time.Duration
}

func newBenchCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("bench")
	keys := map[string]string{}
	connectFlags(fs, keys)
	rw := fs.String("rw", "randread", "what to do: read, write, randread or randwrite")
	bs := config.Size(4096)
	fs.Var(&bs, "bs", "bytes of one request")
	depth := fs.Int("iodepth", 32, "requests in flight on each queue")
	runtime := fs.Duration("runtime", 10*time.Second, "how long to measure")
	destroy := fs.Bool("destroy-data", false, "allow writing over what is on the namespace")
	output := cli.OutputFlag(fs)
	more, cfgFile := commonFlags(fs, env, briefSettings())
	for k, v := range more {
		keys[k] = v
	}
	return &cli.Command{
		Name: "bench", Args: "ADDR[:PORT] [flags]", Short: "measure reads or writes over the wire", Long: benchHelp, Flags: fs,
		Run: func(ctx context.Context, args []string) error {
			j := benchJob{RW: *rw, BS: int64(bs), Depth: *depth, Runtime: *runtime}
			var bad []error
			switch *rw {
			case "read":
			case "write":
				j.Write = true
			case "randread":
				j.Random = true
			case "randwrite":
				j.Write, j.Random = true, true
			default:
				bad = append(bad, fmt.Errorf("--rw: %q is none of read, write, randread, randwrite", *rw))
			}
			if j.Write && !*destroy {
				bad = append(bad, fmt.Errorf("--rw %s destroys what is on the namespace: say --destroy-data if that is wanted", *rw))
			}
			if j.BS <= 0 || j.BS > 64<<20 {
				bad = append(bad, fmt.Errorf("--bs: %v is not between 1 and 64M", bs))
			}
			if j.Depth < 1 || j.Depth > 4096 {
				bad = append(bad, fmt.Errorf("--iodepth: %d is not between 1 and 4096", j.Depth))
			}
			if j.Runtime < minRuntime || j.Runtime > maxRuntime {
				bad = append(bad, fmt.Errorf("--runtime: %s is outside %s to %s (for example 10s)", timeout.Text(j.Runtime), timeout.Text(minRuntime), timeout.Text(maxRuntime)))
			}
			if len(args) > 1 {
				bad = append(bad, fmt.Errorf("unexpected argument %q", args[1]))
			}
			bad = append(bad, cli.CheckOutput(*output))
			s := briefSettings()
			bad = append(bad, config.Load(s, source(env, fs, keys, *cfgFile, args)))
			if err := errors.Join(bad...); err != nil {
				return cli.Usage(err)
			}
			log, err := cli.NewLogger(env.Stderr, s.Log.Level, s.Log.Format)
			if err != nil {
				return cli.Usage(err)
			}
			c, _, err := s.resolved(ctx, log, initiator.Config.LockedMemory)
			if err != nil {
				return err
			}
			closeTrace, err := s.openTrace(env, &c)
			if err != nil {
				return err
			}
			defer closeTrace()
			defer needProcs(c.Queues + 2)()
			if err := worker.CalmMonitor(); err != nil {
				log.Debug("the Go scheduler's monitor stays as it is", "err", err)
			}
			ss, err := initiator.Connect(ctx, c)
			if err != nil {
				return offers(ctx, c, err)
			}
			defer func() {
				ctx, cancel := timeout.With(context.Background(), s.DetachTimeout, "detach_timeout")
				defer cancel()
				ss.Close(ctx)
			}()
			dev, err := device(ss, s.NSID)
			if err != nil {
				return err
			}
			if most := ss.Status().Depth - 1; j.Depth > most {
				fmt.Fprintf(env.Stderr, "rdinit: bench: a queue holds %d requests, so %d are in flight and not the %d of --iodepth (more: --depth here, queue_depth at the target)\n", most, most, j.Depth)
				j.Depth = most
			}
			r, err := runBench(ctx, dev, j)
			if err != nil {
				return err
			}
			r.Name = dev.Info().Name
			return r.print(env, *output)
		},
	}
}

// benchResult is also the JSON output.
type benchResult struct {
	Name       string  `json:"device"`
	RW         string  `json:"rw"`
	BS         int64   `json:"block_size"`
	Depth      int     `json:"iodepth"`
	Queues     int     `json:"queues"`
	Seconds    float64 `json:"seconds"`
	Operations uint64  `json:"operations"`
	Bytes      uint64  `json:"bytes"`
	IOPS       float64 `json:"iops"`
	MiB        float64 `json:"mib_per_second"`
	Latency    struct {
		Mean float64 `json:"mean_us"`
		P50  float64 `json:"p50_us"`
		P99  float64 `json:"p99_us"`
		P999 float64 `json:"p999_us"`
		Max  float64 `json:"max_us"`
	} `json:"latency"`
	Version string `json:"version"`
}

func (r *benchResult) print(env *cli.Env, output string) error {
	if output == "json" {
		return env.PrintJSON(r)
	}
	l := r.Latency
	env.Printf("%s: %s %s, %s, depth %d each, %.1f s\n", r.Name, r.RW, config.FormatSize(r.BS), counted(r.Queues, "queue"), r.Depth, r.Seconds)
	env.Printf("  %.0f IOPS, %.1f MiB/s\n", r.IOPS, r.MiB)
	env.Printf("  latency in µs: mean %.1f, p50 %.1f, p99 %.1f, p99.9 %.1f, max %.1f\n", l.Mean, l.P50, l.P99, l.P999, l.Max)
	return nil
}

// A benchQueue keeps depth requests in flight on one queue. After start it is its worker's alone.
type benchQueue struct {
	q     blockdev.Queue
	job   benchJob
	first int64 // the part of the device that a sequential job of this queue covers, in units of BS
	count int64
	next  int64
	rnd   *rand.PCG

	reqs    []benchRequest
	ready   []*benchRequest // may be submitted
	running bool            // submit is on the stack
	flying  int

	stop  *atomic.Bool
	until time.Time

	lat  histogram.Fine
	ops  uint64
	last time.Time // of the last completion
	err  error
	done chan struct{}
}

type benchRequest struct {
	blockdev.Request
	sent time.Time
}

// runBench drives all queues of dev.
func runBench(ctx context.Context, dev blockdev.QueueDevice, j benchJob) (*benchResult, error) {
	info := dev.Info()
	blocks := info.Size / j.BS
	n := dev.NumQueues()
	switch {
	case j.BS%int64(info.BlockSize) != 0:
		return nil, cli.Usagef("--bs: %d is not a multiple of the device's block size of %d", j.BS, info.BlockSize)
	case blocks < int64(n):
		return nil, cli.Usagef("--bs: the device of %s has no room for %d requests of %s", config.FormatSize(info.Size), n, config.FormatSize(j.BS))
	case j.Write && info.ReadOnly:
		return nil, cli.Usagef("--rw: the device is read-only")
	}
	var stop atomic.Bool
	qs := make([]*benchQueue, n)
	defer func() {
		for _, b := range qs {
			if b != nil {
				b.q.Worker().Call(b.close)
			}
		}
	}()
	for i := range qs {
		q, err := dev.OpenQueue(i)
		if err != nil {
			return nil, fmt.Errorf("open queue %d: %w", i, err)
		}
		b := &benchQueue{q: q, job: j, stop: &stop, rnd: rand.NewPCG(uint64(time.Now().UnixNano()), uint64(i)), done: make(chan struct{})}
		qs[i] = b
		b.first, b.count = 0, blocks
		if !j.Random {
			b.count = blocks / int64(n)
			b.first = b.count * int64(i)
		}
		var prepErr error
		if err := q.Worker().Call(func() { prepErr = b.prepare() }); err != nil {
			return nil, err
		}
		if prepErr != nil {
			return nil, prepErr
		}
	}
	start := time.Now()
	var wg sync.WaitGroup
	for _, b := range qs {
		b.until = start.Add(j.Runtime)
		if err := b.q.Worker().Call(b.submit); err != nil {
			return nil, err
		}
		wg.Go(func() { <-b.done })
	}
	finished := make(chan struct{})
	go func() { wg.Wait(); close(finished) }()
	// The workers look at the clock themselves; the timer is for requests that are not answered for long.
	select {
	case <-finished:
	case <-ctx.Done():
	case <-time.After(j.Runtime):
	}
	stop.Store(true)
	select {
	case <-finished:
	case <-time.After(10 * time.Second):
		return nil, errors.New("requests have no answer 10s after the end of --runtime: is the target there?")
	}
	r := &benchResult{RW: j.RW, BS: j.BS, Depth: j.Depth, Queues: n, Version: version.String()}
	var lat histogram.Fine
	end := start
	for i, b := range qs {
		if b.err != nil {
			return nil, fmt.Errorf("queue %d: %s: %w", i, j.RW, b.err)
		}
		lat.Merge(&b.lat)
		r.Operations += b.ops
		if b.last.After(end) {
			end = b.last
		}
	}
	if r.Operations == 0 {
		return nil, errors.New("no request was answered")
	}
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	r.Seconds = end.Sub(start).Seconds()
	r.Bytes = r.Operations * uint64(j.BS)
	r.IOPS = float64(r.Operations) / r.Seconds
	r.MiB = float64(r.Bytes) / r.Seconds / (1 << 20)
	r.Latency.Mean, r.Latency.P50, r.Latency.P99 = us(lat.Mean()), us(lat.Quantile(0.5)), us(lat.Quantile(0.99))
	r.Latency.P999, r.Latency.Max = us(lat.Quantile(0.999)), us(lat.Max())
	return r, nil
}

// prepare allocates all buffers.
func (b *benchQueue) prepare() error {
	if int64(b.q.MaxAlloc()) < b.job.BS {
		return cli.Usagef("--bs: %d is more than a buffer can have (%d)", b.job.BS, b.q.MaxAlloc())
	}
	b.reqs = make([]benchRequest, b.job.Depth)
	for i := range b.reqs {
		r := &b.reqs[i]
		r.Buf = b.q.Alloc(int(b.job.BS))
		if r.Buf == nil {
			return cli.Usagef("--iodepth: the buffer memory of a queue has room for %d requests of %s; raise buffer_memory", i, config.FormatSize(b.job.BS))
		}
		r.Op = blockdev.OpRead
		if b.job.Write {
			r.Op = blockdev.OpWrite
			for k := range r.Buf { // not zeros: a store may treat those specially
				r.Buf[k] = byte(k*7 + i)
			}
		}
		r.Len = b.job.BS
		r.Done = b.completed
		r.User = r
		b.ready = append(b.ready, r)
	}
	return nil
}

func (b *benchQueue) close() {
	if b.flying > 0 {
		return // the session is closed next and answers them
	}
	for i := range b.reqs {
		if buf := b.reqs[i].Buf; buf != nil {
			b.q.Free(buf)
		}
	}
	b.q.Close()
}

// submit sends what is ready. A request that completes inside Submit becomes ready
// again; the loop, not the stack, takes it up.
func (b *benchQueue) submit() {
	if b.running {
		return
	}
	b.running = true
	for len(b.ready) > 0 && b.err == nil && !b.stop.Load() {
		r := b.ready[len(b.ready)-1]
		b.ready = b.ready[:len(b.ready)-1]
		if b.job.Random {
			r.Off = int64(b.rnd.Uint64()%uint64(b.count)) * b.job.BS
		} else {
			r.Off = (b.first + b.next%b.count) * b.job.BS
			b.next++
		}
		b.flying++
		r.sent = time.Now()
		b.q.Submit(&r.Request)
	}
	b.running = false
	if b.flying == 0 {
		close(b.done)
	}
}

func (b *benchQueue) completed(req *blockdev.Request) {
	r := req.User.(*benchRequest)
	now := time.Now()
	b.flying--
	b.ready = append(b.ready, r)
	if req.Err != nil {
		if b.err == nil {
			b.err = req.Err
		}
		b.stop.Store(true)
	} else {
		b.lat.Observe(now.Sub(r.sent))
		b.ops++
		b.last = now
	}
	if now.After(b.until) {
		b.stop.Store(true)
	}
	b.submit()
}
