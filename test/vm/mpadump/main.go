// Command mpadump takes a TCP capture of iWARP connections apart: TCP, MPA, DDP and RDMAP down to the
// messages. It checks framing, sequence and CRC on the way, shares no code with the packages it
// is a witness for, and makes golden files of NVMe over RDMA connections.
//
//	mpadump FILE.pcap                       one line per message
//	mpadump -x FILE.pcap                    with all bytes
//	mpadump -golden DIR -from TEXT FILE.pcap   DIR/*.hex; TEXT says where the capture comes from
//
// A golden file is lines of hexadecimal digits; lines that begin with # are comments.
// Only the classic pcap format, TCP over IPv4, and connections captured from their SYN on.
package main

import (
	"bufio"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	all := flag.Bool("x", false, "print all bytes of each message")
	golden := flag.String("golden", "", "write golden files of NVMe over RDMA connections to this `directory`")
	from := flag.String("from", "", "where the capture comes from, for the comment in golden files")
	flag.Parse()
	if flag.NArg() != 1 || (*golden != "") != (*from != "") {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(os.Stdout, flag.Arg(0), *all, *golden, *from); err != nil {
		fmt.Fprintf(os.Stderr, "mpadump: %s: %v\n", flag.Arg(0), err)
		os.Exit(1)
	}
}

func run(w io.Writer, file string, all bool, golden, from string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	segs, err := readPcap(bufio.NewReader(f))
	if err != nil {
		return err
	}
	conns, err := connections(segs)
	if err != nil {
		return err
	}
	written := map[string]bool{}
	for n, c := range conns {
		ms, err := messages(c)
		if err != nil {
			return fmt.Errorf("connection %d, %s to %s: %w", n, c.initiator, c.responder, err)
		}
		if golden == "" {
			list(w, n, c, ms, all)
			continue
		}
		rs, err := records(ms)
		if err != nil {
			return fmt.Errorf("connection %d, %s to %s: %w", n, c.initiator, c.responder, err)
		}
		for _, r := range rs {
			if written[r.name] {
				continue
			}
			written[r.name] = true
			if err := writeGolden(filepath.Join(golden, r.name+".hex"), r, from); err != nil {
				return err
			}
			fmt.Fprintf(w, "%s %d\n", r.name, len(r.bytes))
		}
	}
	return nil
}

var arrows = [2]string{"->", "<-"}

func list(w io.Writer, n int, c *conn, ms []message, all bool) {
	fmt.Fprintf(w, "connection %d: %s to %s, %d messages\n", n, c.initiator, c.responder, len(ms))
	for i := range ms {
		m := &ms[i]
		b, more := m.payload, ""
		if !all && len(b) > 64 {
			b, more = b[:64], "..."
		}
		fmt.Fprintf(w, "%6d %s %-12s %d bytes in %d FPDU, header %x: %x%s\n", m.pkt, arrows[m.dir], m.name(), len(m.payload), m.fpdus, m.header, b, more)
	}
}

func writeGolden(file string, r record, from string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	fmt.Fprintf(w, "# %s: %s, %d bytes, %s\n# %s\n# from: %s\n", r.name, r.what, len(r.bytes), [2]string{"host to controller", "controller to host"}[r.dir], r.wire, from)
	for b := r.bytes; len(b) > 0; {
		n := min(32, len(b))
		fmt.Fprintln(w, hex.EncodeToString(b[:n]))
		b = b[n:]
	}
	if err := w.Flush(); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
