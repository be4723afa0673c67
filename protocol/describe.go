package protocol

import (
	"strconv"
)

// Describe returns a command on one line in the words of the specification, for
// traces and error messages. admin tells the queue. Nothing of it is a text of
// the peer.
func Describe(c *Command, admin bool) string { return string(AppendDescription(nil, c, admin)) }

// AppendDescription is [Describe] into the caller's buffer.
func AppendDescription(b []byte, c *Command, admin bool) []byte {
	w := words{b}
	switch {
	case c.IsFabrics():
		w.word("Fabrics")
		w.word(c.FabricsType().String())
	case admin:
		w.word(c.AdminOpcode().String())
	default:
		w.word(c.Opcode().String())
	}
	w.hex("cid", uint64(c.ID()))
	switch {
	case c.IsFabrics():
		w.fabrics(c)
	case admin:
		w.admin(c)
	default:
		w.io(c)
	}
	w.sgl(c)
	if c.CheckFlags() != StatusSuccess {
		w.hex("flags", uint64(c.Flags()))
	}
	return w.b
}

// DescribeCompletion returns a completion on one line. c is the command it
// answers, nil if that is not known.
func DescribeCompletion(e *Completion, c *Command, admin bool) string {
	return string(AppendCompletionDescription(nil, e, c, admin))
}

// AppendCompletionDescription is [DescribeCompletion] into the caller's buffer.
func AppendCompletionDescription(b []byte, e *Completion, c *Command, admin bool) []byte {
	w := words{b}
	fabrics := c != nil && c.IsFabrics()
	w.word("Completion")
	w.hex("cid", uint64(e.ID()))
	w.num("sqhd", uint64(e.SQHD()))
	s := e.Status()
	switch {
	case s == StatusSuccess:
		w.text("status", "success")
	case fabrics:
		w.text("status", FabricsError{s}.Error())
	case c != nil:
		w.text("status", s.format(s.Name(false)))
	default:
		w.text("status", s.Error())
	}
	if s.More() {
		w.word("more")
	}
	r := e.Result()
	switch {
	case c == nil || !fabrics && !admin:
		if r != 0 {
			w.hex("result", r)
		}
	case fabrics && c.FabricsType() == FabricsConnect && s.OK():
		cr := ConnectResult(r)
		w.num("cntlid", uint64(cr.CNTLID()))
		if cr.AuthRequired() {
			w.word("auth-required")
		}
	case fabrics && c.FabricsType() == FabricsConnect && s.Code() == StatusConnectInvalidParameters:
		w.text("invalid", ConnectInvalid(r).String())
	case fabrics && c.FabricsType() == FabricsPropertyGet && s.OK():
		w.hex("value", r)
	case !fabrics && c.AdminOpcode() == AdminAsyncEventRequest && s.OK():
		w.text("event", AsyncEvent(r).String())
	case !fabrics && c.AdminOpcode() == AdminAbort && s.OK():
		if e.DW0()&AbortedNot != 0 {
			w.word("not-aborted")
		}
	case r != 0:
		w.hex("result", r)
	}
	return w.b
}

// words builds a line of words and key=value pairs.
type words struct{ b []byte }

func (w *words) word(s string) {
	if n := len(w.b); n > 0 {
		w.b = append(w.b, ' ')
	}
	w.b = append(w.b, s...)
}

func (w *words) num(k string, v uint64) {
	w.word(k)
	w.b = append(w.b, '=')
	w.b = strconv.AppendUint(w.b, v, 10)
}

func (w *words) hex(k string, v uint64) {
	w.word(k)
	w.b = append(w.b, '=', '0', 'x')
	w.b = strconv.AppendUint(w.b, v, 16)
}

func (w *words) text(k, v string) {
	w.word(k)
	w.b = append(w.b, '=')
	w.b = strconv.AppendQuote(w.b, v)
}

func (w *words) flag(on bool, s string) {
	if on {
		w.word(s)
	}
}

func (w *words) nsid(c *Command) {
	switch n := c.NSID(); n {
	case 0:
	case NSIDAll:
		w.word("nsid=all")
	default:
		w.num("nsid", uint64(n))
	}
}

func (w *words) io(c *Command) {
	w.nsid(c)
	switch c.Opcode() {
	case OpRead, OpWrite, OpCompare, OpWriteZeroes, OpVerify, OpWriteUncorrectable:
		w.num("slba", c.SLBA())
		w.num("blocks", uint64(c.Blocks()))
		w.flag(c.FUA(), "fua")
		w.flag(c.LR(), "lr")
		w.flag(c.DEAC() && c.Opcode() == OpWriteZeroes, "deac")
		if p := c.PRINFO(); p != 0 {
			w.hex("prinfo", uint64(p>>10))
		}
		if d := c.DTYPE(); d != 0 {
			w.num("dtype", uint64(d))
		}
	case OpDatasetManagement:
		w.num("ranges", uint64(c.DSMRangeCount()))
		a := c.DSMAttributes()
		w.flag(a&DSMDeallocate != 0, "ad")
		w.flag(a&DSMIntegralWrite != 0, "idw")
		w.flag(a&DSMIntegralRead != 0, "idr")
	case OpFlush:
	default:
		w.dwords(c)
	}
}

func (w *words) admin(c *Command) {
	w.nsid(c)
	switch c.AdminOpcode() {
	case AdminIdentify:
		w.text("cns", c.CNS().String())
		if n := c.CNTID(); n != 0 {
			w.num("cntid", uint64(n))
		}
		if n := c.IdentifyCSI(); n != CSINVM {
			w.num("csi", uint64(n))
		}
	case AdminGetLogPage:
		w.text("lid", c.LID().String())
		w.num("lpo", c.LPO())
		w.num("bytes", c.LogLength())
		if n := c.LSP(); n != 0 {
			w.num("lsp", uint64(n))
		}
		if n := c.LSI(); n != 0 {
			w.num("lsi", uint64(n))
		}
		if n := c.LogCSI(); n != CSINVM {
			w.num("csi", uint64(n))
		}
		w.flag(c.OT(), "ot")
		w.flag(c.RAE(), "rae")
	case AdminSetFeatures:
		w.text("fid", c.FID().String())
		w.hex("value", uint64(c.FeatureValue()))
		w.flag(c.SV(), "sv")
	case AdminGetFeatures:
		w.text("fid", c.FID().String())
		if s := c.SEL(); s != SelectCurrent {
			w.text("sel", s.String())
		}
		if v := c.FeatureValue(); v != 0 {
			w.hex("value", uint64(v))
		}
	case AdminAbort:
		w.num("sqid", uint64(c.AbortSQID()))
		w.hex("abort-cid", uint64(c.AbortCID()))
	case AdminAsyncEventRequest, AdminKeepAlive:
	default:
		w.dwords(c)
	}
}

func (w *words) fabrics(c *Command) {
	switch c.FabricsType() {
	case FabricsConnect:
		w.num("qid", uint64(c.QID()))
		w.num("sqsize", uint64(c.SQSIZE()))
		w.num("kato", uint64(c.KATO()))
		if a := c.CATTR(); a != 0 {
			w.hex("cattr", uint64(a))
		}
		if v := c.RECFMT(); v != 0 {
			w.num("recfmt", uint64(v))
		}
	case FabricsPropertyGet, FabricsPropertySet:
		w.text("property", c.Property().String())
		w.num("size", uint64(c.PropertySize()))
		if c.FabricsType() == FabricsPropertySet {
			w.hex("value", c.PropertyValue())
		}
	case FabricsAuthSend, FabricsAuthReceive:
		w.num("length", uint64(c.AuthTransferLength()))
	case FabricsDisconnect:
		if v := c.RECFMT(); v != 0 {
			w.num("recfmt", uint64(v))
		}
	default:
		w.dwords(c)
	}
}

// dwords prints CDW10 to CDW15 of a command that is not known.
func (w *words) dwords(c *Command) {
	for i := 10; i < 16; i++ {
		if v := c.DW(i); v != 0 {
			w.hex("cdw"+strconv.Itoa(i), uint64(v))
		}
	}
}

func (w *words) sgl(c *Command) {
	s := c.SGL()
	switch s.Type() {
	case SGLKeyedDataBlock:
		if s.Length() == 0 && s.Address() == 0 && s.Key() == 0 && s.Subtype() == SGLSubtypeAddress {
			return // no data
		}
		w.word("sgl=keyed")
		w.hex("addr", s.Address())
		w.num("len", uint64(s.Length()))
		w.hex("key", uint64(s.Key()))
		switch s.Subtype() {
		case SGLSubtypeAddress:
		case SGLSubtypeInvalidate:
			w.word("invalidate")
		default:
			w.num("subtype", uint64(s.Subtype()))
		}
	case SGLDataBlock:
		w.word("sgl=in-capsule")
		w.num("offset", s.Address())
		w.num("len", uint64(s.Length()))
		if s.Subtype() != SGLSubtypeOffset {
			w.num("subtype", uint64(s.Subtype()))
		}
	default:
		w.text("sgl", s.Type().String())
		w.num("len", uint64(s.Length()))
	}
}
