// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// A control message is a version, a kind and a body. The initiator is the side that sends hello;
// the owner is the other one, which owns the memory.
const (
	controlVersion = 3
	controlHead    = 2
	answerHead     = controlHead + 2
	controlMax     = answerHead + messageMax
)

const (
	kindHello        = 1 + iota // initiator: its address, and its ends of the queue pairs
	kindWelcome                 // owner: its ends of the queue pairs, or why it refuses
	kindImport                  // initiator: asks to import the memory of a token
	kindImported                // owner: the memory's addresses and remote keys, or an error
	kindExpired                 // owner: the epoch of a memory has ended
	kindPair                    // initiator: its end of a queue pair is gone; a new end
	kindPairReply               // owner: its end is gone, too; messages it has seen; a new end
	kindBroken                  // owner: its end of a queue pair is gone
	kindBye                     // initiator: its ends of all queue pairs are gone
	kindFarewell                // owner: its ends are gone, too
	kindQuit                    // owner: its backend closes
	kindPing                    // both: asks for a pong
	kindPong                    // both
	kindAnswer                  // owner: an answer of its program
	kindAnswersTaken            // initiator: the number of answers that its program has received
)

type hello struct {
	to    session.Owner // the backend that the initiator wants to connect to
	from  []byte        // the initiator's Addr
	pairs []pairOffer
}

// pairOffer is the initiator's end of a queue pair.
type pairOffer struct {
	rail uint8 // the owner's rail that it is for
	end  verbs.End
}

type welcome struct {
	status session.Status
	pairs  []pairAnswer
}

// pairAnswer is one side's end of a queue pair.
type pairAnswer struct {
	there bool // false: this side could not make an end
	end   verbs.End
}

type importRequest struct {
	id     uint32
	key    uint32
	epoch  uint64
	secret [16]byte
}

type importAnswer struct {
	id         uint32
	status     session.Status
	readOnly   bool
	base, size uint64
	keys       []uint32 // remote key for each queue pair; 0: not accessible over that one
}

type expired struct {
	key   uint32
	epoch uint64 // the last epoch that has ended
}

type pairRequest struct {
	pair       uint8
	attempt    uint32
	pairAnswer // the new end, if there is one
}

type pairReply struct {
	pair    uint8
	attempt uint32
	seen    uint64
	pairAnswer
}

type broken struct{ pair uint8 }

// answer is an answer of the owner's program.
type answer struct{ data []byte }

// answersTaken tells how many answers the initiator's program has taken since it opened the
// connection.
type answersTaken struct{ count uint64 }

// bye ends a connection. abandoned: Connect failed, so the initiator's program never used it.
type bye struct{ abandoned bool }

type (
	farewell struct{}
	quit     struct{}
	ping     struct{}
	pong     struct{}
)

func (*hello) kind() byte         { return kindHello }
func (*welcome) kind() byte       { return kindWelcome }
func (*importRequest) kind() byte { return kindImport }
func (*importAnswer) kind() byte  { return kindImported }
func (*expired) kind() byte       { return kindExpired }
func (*pairRequest) kind() byte   { return kindPair }
func (*pairReply) kind() byte     { return kindPairReply }
func (*broken) kind() byte        { return kindBroken }
func (*answer) kind() byte        { return kindAnswer }
func (*answersTaken) kind() byte  { return kindAnswersTaken }
func (*bye) kind() byte           { return kindBye }
func (farewell) kind() byte       { return kindFarewell }
func (quit) kind() byte           { return kindQuit }
func (ping) kind() byte           { return kindPing }
func (pong) kind() byte           { return kindPong }

func (m *hello) fields(c *codec) {
	c.raw(m.to[:])
	c.data(&m.from)
	list(c, &m.pairs, verbs.PairsMax, func(o *pairOffer) {
		c.uint8(&o.rail)
		c.end(&o.end)
	})
}

func (m *welcome) fields(c *codec) {
	c.uint8((*uint8)(&m.status))
	list(c, &m.pairs, verbs.PairsMax, c.answer)
}

func (m *importRequest) fields(c *codec) {
	c.uint32(&m.id)
	c.uint32(&m.key)
	c.uint64(&m.epoch)
	c.raw(m.secret[:])
}

func (m *importAnswer) fields(c *codec) {
	c.uint32(&m.id)
	c.uint8((*uint8)(&m.status))
	c.flag(&m.readOnly)
	c.uint64(&m.base)
	c.uint64(&m.size)
	list(c, &m.keys, verbs.PairsMax, c.uint32)
}

func (m *expired) fields(c *codec) {
	c.uint32(&m.key)
	c.uint64(&m.epoch)
}

func (m *pairRequest) fields(c *codec) {
	c.uint8(&m.pair)
	c.uint32(&m.attempt)
	c.answer(&m.pairAnswer)
}

func (m *pairReply) fields(c *codec) {
	c.uint8(&m.pair)
	c.uint32(&m.attempt)
	c.uint64(&m.seen)
	c.answer(&m.pairAnswer)
}

func (m *broken) fields(c *codec)       { c.uint8(&m.pair) }
func (m *answer) fields(c *codec)       { c.data(&m.data) }
func (m *answersTaken) fields(c *codec) { c.uint64(&m.count) }
func (m *bye) fields(c *codec)          { c.flag(&m.abandoned) }
func (farewell) fields(*codec)          {}
func (quit) fields(*codec)              {}
func (ping) fields(*codec)              {}
func (pong) fields(*codec)              {}

// message is a control message. fields encodes or decodes its fields in their order on the wire.
type message interface {
	kind() byte
	fields(c *codec)
}

// codec encodes or decodes the fields of control messages and addresses. Numbers are little-endian;
// data of variable length follows its length.
type codec struct {
	in  *session.MessageReader // nil: the codec encodes to out
	out []byte
}

func (c *codec) raw(b []byte) {
	if c.in == nil {
		c.out = append(c.out, b...)
	} else {
		copy(b, c.in.Bytes(len(b)))
	}
}

func (c *codec) uint8(v *uint8) {
	if c.in == nil {
		c.out = append(c.out, *v)
	} else {
		*v = c.in.Uint8()
	}
}

func (c *codec) uint16(v *uint16) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint16(c.out, *v)
	} else {
		*v = c.in.Uint16()
	}
}

func (c *codec) uint32(v *uint32) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint32(c.out, *v)
	} else {
		*v = c.in.Uint32()
	}
}

func (c *codec) uint64(v *uint64) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint64(c.out, *v)
	} else {
		*v = c.in.Uint64()
	}
}

func (c *codec) flag(v *bool) {
	if c.in == nil {
		c.out = append(c.out, session.FlagByte(*v))
	} else {
		*v = c.in.Flag()
	}
}

func (c *codec) data(v *[]byte) {
	n := uint16(len(*v))
	c.uint16(&n)
	if c.in != nil {
		*v = make([]byte, min(int(n), c.in.Rest()))
		if len(*v) < int(n) {
			c.in.Fail()
		}
	}
	c.raw(*v)
}

// list encodes or decodes a list of at most most elements.
func list[T any](c *codec, v *[]T, most int, each func(*T)) {
	n := uint8(len(*v))
	c.uint8(&n)
	if c.in != nil && int(n) > most {
		c.in.Fail()
		return
	}
	if c.in != nil && n > 0 {
		*v = make([]T, n)
	}
	for i := range *v {
		each(&(*v)[i])
	}
}

func (c *codec) end(e *verbs.End) {
	c.uint32(&e.QueuePair)
	c.uint32(&e.Packet)
	c.uint16(&e.LID)
	c.uint8(&e.MTU)
	c.uint8(&e.Reads)
	c.uint8(&e.LinkLayer)
	c.raw(e.GID[:])
}

func (c *codec) answer(a *pairAnswer) {
	c.flag(&a.there)
	if a.there {
		c.end(&a.end)
	}
}

// appendMessage appends an encoded message.
func appendMessage(b []byte, m message) []byte {
	c := codec{out: append(b, controlVersion, m.kind())}
	m.fields(&c)
	return c.out
}

// decodeControl decodes a message, and refuses a malformed one. It keeps no reference to b.
func decodeControl(b []byte) (message, error) {
	if len(b) < controlHead || len(b) > controlMax {
		return nil, fmt.Errorf("control message of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	if b[0] != controlVersion {
		return nil, fmt.Errorf("control message of version %d, ours is %d: use the same release "+
			"on both sides: %w",
			b[0], controlVersion, driver.ErrVersion)
	}
	var m message
	r := session.ReadMessage(b[controlHead:])
	if int(b[1]) < len(messages) && messages[b[1]] != nil {
		m = messages[b[1]]()
		m.fields(&codec{in: &r})
	}
	if m == nil || !r.Done() {
		return nil, fmt.Errorf("control message of kind %d, %d bytes: %w", b[1], len(b),
			driver.ErrCorrupt)
	}
	return m, nil
}

// messages returns an empty message of each kind.
var messages = [...]func() message{
	kindHello:        func() message { return &hello{} },
	kindWelcome:      func() message { return &welcome{} },
	kindImport:       func() message { return &importRequest{} },
	kindImported:     func() message { return &importAnswer{} },
	kindExpired:      func() message { return &expired{} },
	kindPair:         func() message { return &pairRequest{} },
	kindPairReply:    func() message { return &pairReply{} },
	kindBroken:       func() message { return &broken{} },
	kindBye:          func() message { return &bye{} },
	kindFarewell:     func() message { return farewell{} },
	kindQuit:         func() message { return quit{} },
	kindPing:         func() message { return ping{} },
	kindPong:         func() message { return pong{} },
	kindAnswer:       func() message { return &answer{} },
	kindAnswersTaken: func() message { return &answersTaken{} },
}

// address is the content of Addr: the backend's identity, where its control listens, and its rails,
// which an initiator matches with its own. An encoded address ends with a digest, which detects
// truncation and damage, but not forgery.
type address struct {
	owner   session.Owner
	host    [8]byte // equal on the same host
	process uint32
	notifs  uint32 // bounds the messages of a connection that the owner has not received
	control []netip.AddrPort
	rails   []railAddress
}

// railAddress describes a rail to peers.
type railAddress struct {
	gid      [16]byte
	bits     uint8 // prefix length of the GID's subnet; 0: unknown
	ethernet bool
	rate     uint32 // Mb/s
}

const (
	addressMark  = "rdma3" // with the version of everything that passes between backends
	addressCheck = 8
	controlsMax  = 16
	notifsLimit  = 1 << 15
)

// fields encodes or decodes the part between the mark and the digest.
func (a *address) fields(c *codec) {
	c.raw(a.owner[:])
	c.raw(a.host[:])
	c.uint32(&a.process)
	c.uint32(&a.notifs)
	list(c, &a.control, controlsMax, func(at *netip.AddrPort) {
		ip, port := at.Addr().As16(), at.Port()
		c.raw(ip[:])
		c.uint16(&port)
		*at = netip.AddrPortFrom(netip.AddrFrom16(ip).Unmap(), port)
	})
	list(c, &a.rails, railsMax, func(r *railAddress) {
		c.raw(r.gid[:])
		c.uint8(&r.bits)
		c.flag(&r.ethernet)
		c.uint32(&r.rate)
	})
}

// sound reports whether a decoded address is valid.
func (a *address) sound() bool {
	return len(a.control) > 0 && len(a.rails) > 0 && a.notifs > 0 && a.notifs <= notifsLimit &&
		!slices.ContainsFunc(a.control, func(at netip.AddrPort) bool { return at.Port() == 0 }) &&
		!slices.ContainsFunc(a.rails, func(r railAddress) bool { return r.bits > 128 })
}

// encode fails only if the address does not fit into driver.AddrMax; no real machine has so many
// rails.
func (a *address) encode() ([]byte, error) {
	c := codec{out: []byte(addressMark)}
	a.fields(&c)
	sum := sha256.Sum256(c.out)
	b := append(c.out, sum[:addressCheck]...)
	if len(b) > driver.AddrMax || len(a.control) > controlsMax || len(a.rails) > railsMax {
		return nil, fmt.Errorf("address of %d bytes, at most %d: name fewer of Config.Devices: %w",
			len(b), driver.AddrMax, driver.ErrBounds)
	}
	return b, nil
}

func decodeAddress(b []byte) (a address, err error) {
	if !bytes.HasPrefix(b, []byte(addressMark[:4])) {
		return a, fmt.Errorf("%d bytes that are no rdma address: %w", len(b), driver.ErrCorrupt)
	}
	if !bytes.HasPrefix(b, []byte(addressMark)) {
		return a, fmt.Errorf("rdma address of another version: use the same release on "+
			"both sides: %w", driver.ErrVersion)
	}
	if len(b) < len(addressMark)+addressCheck || len(b) > driver.AddrMax {
		return a, fmt.Errorf("rdma address of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	body, check := b[:len(b)-addressCheck], b[len(b)-addressCheck:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:addressCheck], check) {
		return a, fmt.Errorf("rdma address is damaged: %w", driver.ErrCorrupt)
	}
	r := session.ReadMessage(body[len(addressMark):])
	a.fields(&codec{in: &r})
	if !r.Done() || !a.sound() {
		return address{}, fmt.Errorf("rdma address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

// String names the backend in messages.
func (a *address) String() string {
	return fmt.Sprintf("rdma backend %s of process %d", hex.EncodeToString(a.owner[:]), a.process)
}

// ip returns the GID of a RoCE rail as an IP address.
func (r *railAddress) ip() netip.Addr { return netip.AddrFrom16(r.gid).Unmap() }

// subnet returns the subnet of a RoCE rail, or an invalid prefix if it is unknown.
func (r *railAddress) subnet() netip.Prefix {
	ip := r.ip()
	if r.bits == 0 || int(r.bits) > ip.BitLen() {
		return netip.Prefix{}
	}
	p, _ := ip.Prefix(int(r.bits)) // the bits fit
	return p
}

// prefix returns the subnet prefix of an InfiniBand GID.
func (r *railAddress) prefix() [8]byte { return [8]byte(r.gid[:8]) }
