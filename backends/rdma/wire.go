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

// Control messages: a version, a kind, the body. A connection has two ends: that of the
// initiator, which said hello, and that of the owner of the memory.
const (
	controlVersion = 3
	controlHead    = 2
	answerHead     = controlHead + 2
	controlMax     = answerHead + messageMax
)

const (
	kindHello        = 1 + iota // initiator: its identity, and its ends of the queue pairs
	kindWelcome                 // owner: my ends of them
	kindImport                  // initiator: what is behind this token?
	kindImported                // owner: this
	kindExpired                 // owner: that memory's epoch has ended
	kindPair                    // initiator: a queue pair is gone here; my new end
	kindPairReply               // owner: it is gone here too, what I saw, my new end
	kindBroken                  // owner: a queue pair is gone here
	kindBye                     // initiator: my ends of all queue pairs are gone
	kindFarewell                // owner: mine too
	kindQuit                    // owner: I close
	kindPing                    // both
	kindPong                    // both
	kindAnswer                  // owner: what its program answers
	kindAnswersTaken            // initiator: so many answers its program has taken
)

type hello struct {
	to    session.Owner // the backend that it means to reach
	from  []byte        // its Addr
	pairs []pairOffer
}

// pairOffer is a queue pair that the initiator has made its end of.
type pairOffer struct {
	rail uint8 // the owner's
	end  verbs.End
}

type welcome struct {
	status session.Status
	pairs  []pairAnswer
}

// pairAnswer is one side's end of a queue pair; not there: it could not make one.
type pairAnswer struct {
	there bool
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
	keys       []uint32 // of the NIC, for each queue pair; 0: not over that one
}

type expired struct {
	key   uint32
	epoch uint64 // and those before
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

// answer is what the owner's program answers.
type answer struct{ data []byte }

// answersTaken tells how many answers the initiator's program has taken since it opened the
// connection.
type answersTaken struct{ count uint64 }

// bye may tell that the program never had the connection.
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

// message is one that goes over the control connection. fields names its fields in their order, for
// both directions.
type message interface {
	kind() byte
	fields(c *codec)
}

// codec writes the fields of what goes between backends, or reads them: numbers with the low byte
// first, what is of no fixed length behind its length.
type codec struct {
	in  *session.MessageReader // nil: it writes
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

// list is a list of at most so many.
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

// appendMessage appends a message as decodeControl reads it.
func appendMessage(b []byte, m message) []byte {
	c := codec{out: append(b, controlVersion, m.kind())}
	m.fields(&c)
	return c.out
}

// decodeControl reads what a peer sent, which may be anything. Nothing of b is kept.
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

// messages makes an empty message of each kind.
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

// address is what Addr says: which backend this is, where its control listens, and what its
// rails are, so that an initiator can match them with its own. The digest tells one that
// was cut or altered; it is no protection against forged ones.
type address struct {
	owner   session.Owner
	host    [8]byte // equal on the same host
	process uint32
	notifs  uint32 // messages that a connection to it may have on their way
	control []netip.AddrPort
	rails   []railAddress
}

// railAddress is what a peer must know of a rail to choose it.
type railAddress struct {
	gid      [16]byte
	bits     uint8 // of the subnet that the GID is in; 0: not known
	ethernet bool
	rate     uint32 // Mb/s
}

const (
	addressMark  = "rdma3" // with the version of everything that passes between backends
	addressCheck = 8
	controlsMax  = 16
	notifsLimit  = 1 << 15
)

// fields are those between the mark and the digest.
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

// sound reports whether an address can be used.
func (a *address) sound() bool {
	return len(a.control) > 0 && len(a.rails) > 0 && a.notifs > 0 && a.notifs <= notifsLimit &&
		!slices.ContainsFunc(a.control, func(at netip.AddrPort) bool { return at.Port() == 0 }) &&
		!slices.ContainsFunc(a.rails, func(r railAddress) bool { return r.bits > 128 })
}

// encode refuses what does not fit in driver.AddrMax, which no machine comes near to.
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

// ip is the address of RoCE that a GID is.
func (r *railAddress) ip() netip.Addr { return netip.AddrFrom16(r.gid).Unmap() }

// subnet is not valid where it is not known.
func (r *railAddress) subnet() netip.Prefix {
	ip := r.ip()
	if r.bits == 0 || int(r.bits) > ip.BitLen() {
		return netip.Prefix{}
	}
	p, _ := ip.Prefix(int(r.bits)) // the bits fit
	return p
}

// prefix is that of an InfiniBand subnet.
func (r *railAddress) prefix() [8]byte { return [8]byte(r.gid[:8]) }
