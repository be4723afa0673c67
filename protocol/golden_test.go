package protocol

import (
	"bytes"
	"encoding"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// readGolden reads a file of testdata: records by name, "" for a file without
// names. See the head of testdata/worked-examples.hex for the format.
func readGolden(t testing.TB, file string) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	records := map[string][]byte{}
	name := ""
	for n, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), "= "); ok {
			name = s
			if _, dup := records[name]; dup {
				t.Fatalf("%s:%d: record %q twice", file, n+1, name)
			}
			records[name] = nil
			continue
		}
		for _, tok := range strings.Fields(line) {
			b := records[name]
			switch {
			case tok[0] == '@':
				off, err := strconv.Atoi(tok[1:])
				if err != nil || off < len(b) {
					t.Fatalf("%s:%d: %q behind byte %d", file, n+1, tok, len(b))
				}
				b = append(b, make([]byte, off-len(b))...)
			case strings.HasSuffix(tok, ":"):
				off, err := strconv.ParseUint(tok[:len(tok)-1], 16, 16)
				if err != nil || int(off) != len(b) {
					t.Fatalf("%s:%d: %q at byte %d", file, n+1, tok, len(b))
				}
			default:
				v, err := hex.DecodeString(tok)
				if err != nil || len(v) != 1 {
					t.Fatalf("%s:%d: %q is no byte", file, n+1, tok)
				}
				b = append(b, v...)
			}
			records[name] = b
		}
	}
	return records
}

func golden(t testing.TB, file string) []byte {
	t.Helper()
	b := readGolden(t, file)[""]
	if len(b) == 0 {
		t.Fatalf("%s is empty", file)
	}
	return b
}

// same compares bytes and shows the first difference.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d bytes, want %d", what, len(got), len(want))
		return
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("%s: byte %d is %#02x, want %#02x\n got % x\nwant % x", what, i, got[i], want[i],
				got[i:min(i+16, len(got))], want[i:min(i+16, len(want))])
			return
		}
	}
}

// structure is what the parsers and builders of rare structures have.
type structure interface {
	encoding.BinaryAppender
	encoding.BinaryUnmarshaler
}

// checkStructure compares a structure with its bytes in both directions, for
// every shorter length, and with a prefix and a tail around it.
func checkStructure(t *testing.T, want structure, b []byte, least int) {
	t.Helper()
	got, err := want.AppendBinary([]byte("head"))
	if err != nil {
		t.Fatalf("%T: append: %v", want, err)
	}
	if !bytes.HasPrefix(got, []byte("head")) {
		t.Errorf("%T: append does not append", want)
	}
	same(t, fmt.Sprintf("%T", want), got[4:], b)

	// A buffer with old content behind its length must not shine through.
	dirty := bytes.Repeat([]byte{0xFF}, len(b)+8)
	got, err = want.AppendBinary(dirty[:0])
	if err != nil {
		t.Fatalf("%T: append: %v", want, err)
	}
	same(t, fmt.Sprintf("%T into a used buffer", want), got, b)

	fresh := func() structure { return reflect.New(reflect.TypeOf(want).Elem()).Interface().(structure) }
	v := fresh()
	if err := v.UnmarshalBinary(b); err != nil {
		t.Fatalf("%T: unmarshal: %v", want, err)
	}
	if !reflect.DeepEqual(v, want) {
		t.Errorf("%T: unmarshal:\n got %+v\nwant %+v", want, v, want)
	}
	v = fresh()
	if err := v.UnmarshalBinary(append(bytes.Clone(b), 1, 2, 3)); err != nil {
		t.Errorf("%T: unmarshal with a tail: %v", want, err)
	} else if !reflect.DeepEqual(v, want) {
		t.Errorf("%T: a tail changes the result", want)
	}
	for n := range least {
		if err := fresh().UnmarshalBinary(b[:n]); err == nil {
			t.Fatalf("%T: unmarshal of %d bytes of %d works", want, n, least)
		}
	}
	if err := fresh().UnmarshalBinary(b[:least]); err != nil {
		t.Errorf("%T: unmarshal of %d bytes: %v", want, least, err)
	}
}

// fill sets fields in order as libnvme.c does: field k is the bytes 16k+1, 16k+2,
// ... A text is not touched.
func fill(t *testing.T, v any, fields ...any) {
	t.Helper()
	k := 0
	for _, f := range fields {
		ptr := reflect.ValueOf(f)
		if ptr.Kind() != reflect.Pointer {
			t.Fatalf("%T: field %d is no pointer", v, k)
		}
		e := ptr.Elem()
		if e.Kind() != reflect.String {
			raw := make([]byte, e.Type().Size())
			for i := range raw {
				raw[i] = byte(16*k + i + 1)
			}
			setLE(t, e, raw)
		}
		k++
	}
}

// setLE sets an integer, an array of bytes or a Uint128 from its bytes.
func setLE(t *testing.T, e reflect.Value, raw []byte) {
	t.Helper()
	switch {
	case e.CanUint():
		var n uint64
		for i := len(raw) - 1; i >= 0; i-- {
			n = n<<8 | uint64(raw[i])
		}
		e.SetUint(n)
	case e.Kind() == reflect.Array:
		for i := range e.Len() {
			e.Index(i).SetUint(uint64(raw[i]))
		}
	case e.Type() == reflect.TypeFor[Uint128]():
		setLE(t, e.Field(0), raw[:8])
		setLE(t, e.Field(1), raw[8:])
	default:
		t.Fatalf("cannot fill a %s", e.Type())
	}
}

// TestLibnvmeLayout compares every structure with the bytes that a C compiler
// made of libnvme's declarations.
func TestLibnvmeLayout(t *testing.T) {
	const nqn = "nqn.2026-11.io.rdblk:golden"
	t.Run("controller", func(t *testing.T) {
		v := IdentifyController{SN: "SERIAL0123", MN: "rdblk model", FR: "1.2.3", SUBNQN: nqn}
		fill(t, v, &v.VID, &v.SSVID, &v.SN, &v.MN, &v.FR, &v.RAB, &v.IEEE, &v.CMIC, &v.MDTS, &v.CNTLID,
			&v.VER, &v.RTD3R, &v.RTD3E, &v.OAES, &v.CTRATT, &v.RRLS, &v.CNTRLTYPE, &v.FGUID,
			&v.CRDT[0], &v.CRDT[1], &v.CRDT[2], &v.OACS, &v.ACL, &v.AERL, &v.FRMW, &v.LPA, &v.ELPE,
			&v.NPSS, &v.AVSCC, &v.APSTA, &v.WCTEMP, &v.CCTEMP, &v.MTFA, &v.TNVMCAP, &v.UNVMCAP,
			&v.RPMBS, &v.EDSTT, &v.DSTO, &v.FWUG, &v.KAS, &v.HCTMA, &v.SANICAP, &v.ANATT, &v.ANACAP,
			&v.ANAGRPMAX, &v.NANAGRPID, &v.SQES, &v.CQES, &v.MAXCMD, &v.NN, &v.ONCS, &v.FUSES, &v.FNA,
			&v.VWC, &v.AWUN, &v.AWUPF, &v.NVSCC, &v.NWPC, &v.ACWU, &v.SGLS, &v.MNAN, &v.SUBNQN,
			&v.IOCCSZ, &v.IORCSZ, &v.ICDOFF, &v.FCATT, &v.MSDBD, &v.OFCS, &v.DCTYPE,
			&v.PSD[0].MP, &v.PSD[31].MP)
		checkStructure(t, &v, golden(t, "libnvme-id-ctrl.hex"), IdentifySize)
	})
	t.Run("namespace", func(t *testing.T) {
		var v IdentifyNamespace
		fill(t, v, &v.NSZE, &v.NCAP, &v.NUSE, &v.NSFEAT, &v.NLBAF, &v.FLBAS, &v.MC, &v.DPC, &v.DPS,
			&v.NMIC, &v.RESCAP, &v.FPI, &v.DLFEAT, &v.NAWUN, &v.NAWUPF, &v.NACWU, &v.NABSN,
			&v.NABO, &v.NABSPF, &v.NOIOB, &v.NVMCAP, &v.NPWG, &v.NPWA, &v.NPDG, &v.NPDA,
			&v.NOWS, &v.MSSRL, &v.MCL, &v.MSRC, &v.ANAGRPID, &v.NSATTR, &v.NVMSETID,
			&v.ENDGID, &v.NGUID, &v.EUI64, &v.LBAF[0].MS, &v.LBAF[0].LBADS, &v.LBAF[0].RP,
			&v.LBAF[63].MS, &v.LBAF[63].LBADS, &v.LBAF[63].RP)
		checkStructure(t, &v, golden(t, "libnvme-id-ns.hex"), IdentifySize)
	})
	t.Run("NVM controller", func(t *testing.T) {
		var v IdentifyNVMController
		fill(t, v, &v.VSL, &v.WZSL, &v.WUSL, &v.DMRL, &v.DMRSL, &v.DMSL)
		checkStructure(t, &v, golden(t, "libnvme-id-ctrl-nvm.hex"), IdentifySize)
	})
	t.Run("independent namespace", func(t *testing.T) {
		var v IdentifyIndependentNamespace
		fill(t, v, &v.NSFEAT, &v.NMIC, &v.RESCAP, &v.FPI, &v.ANAGRPID, &v.NSATTR, &v.NVMSETID, &v.ENDGID, &v.NSTAT)
		checkStructure(t, &v, golden(t, "libnvme-id-independent-ns.hex"), IdentifySize)
	})
	t.Run("SMART log", func(t *testing.T) {
		var v SmartLog
		fields := []any{&v.CriticalWarning, &v.Temperature, &v.AvailableSpare, &v.SpareThreshold,
			&v.PercentageUsed, &v.DataUnitsRead, &v.DataUnitsWritten, &v.HostReads, &v.HostWrites,
			&v.BusyTime, &v.PowerCycles, &v.PowerOnHours, &v.UnsafeShutdowns, &v.MediaErrors,
			&v.ErrorLogEntries, &v.WarningTempTime, &v.CriticalTempTime}
		for i := range v.TemperatureSensors {
			fields = append(fields, &v.TemperatureSensors[i])
		}
		fill(t, v, fields...)
		checkStructure(t, &v, golden(t, "libnvme-smart-log.hex"), SmartLogSize)
	})
	t.Run("error log", func(t *testing.T) {
		var v ErrorLogEntry
		var wire uint16
		fill(t, v, &v.Count, &v.SQID, &v.CID, &wire, &v.Location, &v.LBA, &v.NSID, &v.Vendor, &v.TRTYPE,
			&v.Command, &v.Transport)
		v.Status = StatusFromWire(wire &^ 1) // no phase bit
		checkStructure(t, &v, golden(t, "libnvme-error-log.hex"), ErrorLogEntrySize)
	})
	t.Run("firmware slot log", func(t *testing.T) {
		v := FirmwareSlotLog{Revisions: [7]string{0: "1.2.3", 6: "FWREV007"}}
		fill(t, v, &v.AFI)
		checkStructure(t, &v, golden(t, "libnvme-fw-slot.hex"), FirmwareSlotLogSize)
	})
	t.Run("effects log", func(t *testing.T) {
		var v EffectsLog
		fill(t, v, &v.Admin[0], &v.Admin[6], &v.Admin[255], &v.IO[0], &v.IO[2], &v.IO[255])
		checkStructure(t, &v, golden(t, "libnvme-effects.hex"), EffectsLogSize)
	})
	t.Run("connect data", func(t *testing.T) {
		v := ConnectData{SUBNQN: nqn, HOSTNQN: "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff"}
		fill(t, v, &v.HOSTID, &v.CNTLID)
		checkStructure(t, &v, golden(t, "libnvme-connect-data.hex"), ConnectDataSize)
	})
	t.Run("discovery log header", func(t *testing.T) {
		var v DiscoveryLogHeader
		fill(t, v, &v.GENCTR, &v.NUMREC)
		checkStructure(t, &v, golden(t, "libnvme-discovery-header.hex"), 18)
	})
	t.Run("discovery log entry", func(t *testing.T) {
		v := DiscoveryLogEntry{TRSVCID: "4420", SUBNQN: nqn, TRADDR: "192.0.2.1"}
		fill(t, v, &v.TRTYPE, &v.ADRFAM, &v.SUBTYPE, &v.TREQ, &v.PORTID, &v.CNTLID, &v.ASQSZ, &v.EFLAGS,
			&v.TRSVCID, &v.SUBNQN, &v.TRADDR, &v.RDMA_QPTYPE, &v.RDMA_PRTYPE, &v.RDMA_CMS, &v.RDMA_PKEY)
		checkStructure(t, &v, golden(t, "libnvme-discovery-entry.hex"), DiscoveryLogEntrySize)
	})
	t.Run("range", func(t *testing.T) {
		var v DSMRange
		fill(t, v, &v.CATTR, &v.NLB, &v.SLBA)
		want := golden(t, "libnvme-dsm-range.hex")
		same(t, "append", AppendDSMRange(nil, v), want)
		put := make([]byte, DSMRangeSize)
		PutDSMRange(put, v)
		same(t, "put", put, want)
		r, ok := DSMRangesView(want, 1)
		if !ok || r.Len() != 1 || r.At(0) != v {
			t.Errorf("view: %v %v, want %v", ok, r, v)
		}
	})
	t.Run("namespace list", func(t *testing.T) {
		want := []uint32{0x04030201, 0x14131211, 0x24232221}
		b := golden(t, "libnvme-ns-list.hex")
		same(t, "append", AppendNamespaceList(nil, want), b)
		same(t, "append changed", AppendChangedNamespaces(nil, want), b)
		if got := collect(NamespaceList(b)); !reflect.DeepEqual(got, want) {
			t.Errorf("list: %#x, want %#x", got, want)
		}
		if got := collect(ChangedNamespaces(b)); !reflect.DeepEqual(got, want) {
			t.Errorf("changed list: %#x, want %#x", got, want)
		}
	})
}
