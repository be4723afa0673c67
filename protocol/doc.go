// Package protocol holds the wire formats of NVMe, NVMe over Fabrics and the
// RDMA binding of the latter: bytes in, bytes out.
//
// It covers, in the words of the specifications, the common command and
// completion formats, the NVM command set (Read, Write, Compare, Write Zeroes,
// Dataset Management, Flush), the admin commands that a fabrics controller has,
// the Fabrics commands (Connect, Property Get and Set, Disconnect), Scatter
// Gather List descriptors as the RDMA transport uses them, the RDMA_CM private
// data, controller properties, Identify data, features, log pages, asynchronous
// events and status codes. Authentication (DH-HMAC-CHAP) is not here.
//
// Two forms exist. What is touched once per I/O is a view: [Command],
// [Completion], [SGL] and [DSMRanges] are the bytes themselves with accessors;
// nothing is copied and nothing allocated. What is rare is a struct with
// AppendBinary and UnmarshalBinary.
//
// Byte order: every integer is little-endian, also in private data. Byte strings
// that identify something (UUID, NGUID, EUI64) are in the order of their text.
// A field that the specification calls "0's based" keeps the wire value under
// the specification's name (NLB, SQSIZE); methods that add the one have other
// names (Blocks, ...).
//
// Trust: every parser takes bytes of a hostile peer. It checks the length
// first, never indexes or allocates by a number from the wire without a bound,
// and leaves reserved fields alone. Sums of such numbers are formed by
// [RangeOK] and its relatives in range.go and nowhere else. Bytes behind the
// last field that this package knows are ignored, because later revisions add
// fields there and because an RDMA_CM pads private data.
//
// Setters take the caller's own numbers: one that a field cannot hold is a
// programming error and panics, since truncation would address other blocks.
//
// Concurrency: there is no state, only values. Two goroutines may use different
// values at will and read the same one.
//
// Ownership: parsers copy what they keep. The exceptions are the views named
// above and the iterators, which read the caller's bytes while they are used.
//
// What it does not do: no I/O, no goroutines, no logging, no policy. Which value
// a target advertises and what a host does with it is decided in those packages.
package protocol
