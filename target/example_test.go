package target_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"rdblk/blockdev"
	"rdblk/rdma/iwarp"
	"rdblk/target"
)

// Serve a device in memory to every host.
func Example() {
	dev, err := blockdev.NewMem("mem", 1<<20, blockdev.Options{})
	if err != nil {
		panic(err)
	}
	defer dev.Close()
	nic, err := iwarp.New(iwarp.Config{})
	if err != nil {
		panic(err)
	}
	t, err := target.New(target.Config{NQN: "nqn.2026-11.io.rdblk:example", AllowAnyHost: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	nsid, err := t.AddNamespace(0, dev)
	if err != nil {
		panic(err)
	}
	addr, err := t.Listen(nic, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		panic(err)
	}
	fmt.Println("namespace", nsid, "at", addr.Addr())
	if err := t.Shutdown(context.Background()); err != nil {
		panic(err)
	}
	// Output: namespace 1 at 127.0.0.1
}
