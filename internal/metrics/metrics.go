// Package metrics has what both programs need to show themselves: constant
// Prometheus metrics made at scrape time of counters that live elsewhere, and
// the HTTP endpoint with /metrics, /status and /healthz.
//
// Nothing is counted here. A collector asks the packages for a snapshot when it
// is scraped, so that a metric cannot disagree with the status output.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"runtime"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/control"
	"rdblk/internal/histogram"
	"rdblk/internal/timeout"
	"rdblk/internal/version"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// A Desc describes one metric of constant name and variable labels.
type Desc struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// Counter describes a counter; its name ends in _total.
func Counter(name, help string, labels ...string) *Desc {
	return &Desc{prometheus.NewDesc(name, help, labels, nil), prometheus.CounterValue}
}

// Gauge describes a gauge, or a histogram (Histogram sends it as one).
func Gauge(name, help string, labels ...string) *Desc {
	return &Desc{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue}
}

// A Sink takes the metrics of one scrape.
type Sink chan<- prometheus.Metric

// Put sends one value.
func (s Sink) Put(d *Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d.desc, d.kind, v, labels...)
}

// PutHistogram sends a latency histogram, in seconds.
func (s Sink) PutHistogram(d *Desc, h histogram.Snapshot, labels ...string) {
	bounds := histogram.Bounds()
	buckets := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, b := range bounds {
		n += h.Counts[i]
		buckets[b.Seconds()] = n
	}
	n += h.Counts[len(bounds)]
	s <- prometheus.MustNewConstHistogram(d.desc, n, h.Sum.Seconds(), buckets, labels...)
}

// collector makes a prometheus.Collector of a function. It describes nothing, so
// that labels may come and go; the registry still refuses inconsistent metrics at the scrape.
type collector func(Sink)

func (c collector) Describe(chan<- *prometheus.Desc)    {}
func (c collector) Collect(ch chan<- prometheus.Metric) { c(ch) }

// Registry makes a registry of the program's own (nothing of the process-wide
// default one) that calls collect at every scrape. prefix is "rdtarget_" or "rdinit_".
func Registry(prefix string, collect func(Sink)) *prometheus.Registry {
	info := Gauge(prefix+"build_info", "Version of the program; always 1.", "version", "goversion")
	r := prometheus.NewRegistry()
	r.MustRegister(collector(func(s Sink) {
		s.Put(info, 1, version.String(), runtime.Version())
		collect(s)
	}))
	return r
}

// Bool is 1 or 0.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Config says what an HTTP endpoint shows.
type Config struct {
	Registry prometheus.Gatherer
	// Status is shown as JSON at /status.
	Status func() any
	// Healthy is nil when the program can do its work; else why it cannot.
	Healthy func() error
	// Pprof adds Go's profiler at /debug/pprof/. Who reaches it can slow the program down.
	Pprof bool
	Log   *slog.Logger
}

// Handler serves the endpoint's pages.
func Handler(cfg Config) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelError), MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) { control.WriteJSON(w, cfg.Status()) })
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := cfg.Healthy(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	if cfg.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// A Server is a running HTTP endpoint.
type Server struct {
	Addr net.Addr
	srv  *http.Server
	done chan struct{}
}

// Listen starts the endpoint on addr (ADDR:PORT). It has no access control: bind it where only
// those reach it who may read it.
func Listen(addr string, cfg Config) (*Server, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		var op *net.OpError
		var at netip.AddrPort
		if errors.As(err, &op) {
			if a, ok := op.Addr.(*net.TCPAddr); ok {
				at = a.AddrPort()
			}
		}
		return nil, cli.WithAdvice(fmt.Errorf("http endpoint %s: %w", addr, cli.Plain(err)), cli.ListenAdvice(err, at, "--http"))
	}
	if a, ok := ln.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		cfg.Log.Warn("the http endpoint has no access control and other machines can reach it; on 127.0.0.1 they cannot", "addr", a.String())
	}
	s := &Server{Addr: ln.Addr(), done: make(chan struct{}), srv: &http.Server{
		Handler: Handler(cfg), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 1 << 16,
		ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug), // a stranger can cause these
	}}
	if !cfg.Pprof {
		s.srv.WriteTimeout = 20 * time.Second // a profile takes longer
	}
	go func() {
		defer close(s.done)
		if err := s.srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			cfg.Log.Error("http endpoint", "err", err)
		}
	}()
	return s, nil
}

// Close ends the endpoint; running requests have a second.
func (s *Server) Close() {
	ctx, cancel := timeout.With(context.Background(), time.Second, "")
	defer cancel()
	if s.srv.Shutdown(ctx) != nil {
		s.srv.Close()
	}
	<-s.done
}
