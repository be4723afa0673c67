package verbs

import (
	"log/slog"
	"time"
)

const providerName = "verbs"

// Config configures a Provider. The zero value has working defaults.
type Config struct {
	// ResolveTimeout bounds the resolution of an address and of the route to it, each. Default 5 s.
	ResolveTimeout time.Duration
	// Logger gets asynchronous events of devices. Default: none.
	Logger *slog.Logger
}

// installHint says what a machine needs.
const installHint = "install rdma-core's user libraries (Debian, Ubuntu: apt install libibverbs1 librdmacm1 ibverbs-providers; Fedora, RHEL: dnf install libibverbs librdmacm)"
