// SPDX-License-Identifier: Apache-2.0

package rdma

import (
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

// signal is a message without a body; it is its kind.
type signal byte

const (
	farewell signal = kindFarewell
	quit     signal = kindQuit
	ping     signal = kindPing
	pong     signal = kindPong
)

func (*hello) Kind() byte         { return kindHello }
func (*welcome) Kind() byte       { return kindWelcome }
func (*importRequest) Kind() byte { return kindImport }
func (*importAnswer) Kind() byte  { return kindImported }
func (*expired) Kind() byte       { return kindExpired }
func (*pairRequest) Kind() byte   { return kindPair }
func (*pairReply) Kind() byte     { return kindPairReply }
func (*broken) Kind() byte        { return kindBroken }
func (*answer) Kind() byte        { return kindAnswer }
func (*answersTaken) Kind() byte  { return kindAnswersTaken }
func (*bye) Kind() byte           { return kindBye }

func (s signal) Kind() byte { return byte(s) }

func (signal) Fields(*session.Codec) {}

func (m *hello) Fields(c *session.Codec) {
	c.Raw(m.to[:])
	c.Data(&m.from)
	session.CodecList(c, &m.pairs, verbs.PairsMax, func(o *pairOffer) {
		c.Uint8(&o.rail)
		endFields(c, &o.end)
	})
}

func (m *welcome) Fields(c *session.Codec) {
	c.Uint8((*uint8)(&m.status))
	session.CodecList(c, &m.pairs, verbs.PairsMax, func(a *pairAnswer) { a.fields(c) })
}

func (m *importRequest) Fields(c *session.Codec) {
	c.Uint32(&m.id)
	c.Uint32(&m.key)
	c.Uint64(&m.epoch)
	c.Raw(m.secret[:])
}

func (m *importAnswer) Fields(c *session.Codec) {
	c.Uint32(&m.id)
	c.Uint8((*uint8)(&m.status))
	c.Flag(&m.readOnly)
	c.Uint64(&m.base)
	c.Uint64(&m.size)
	session.CodecList(c, &m.keys, verbs.PairsMax, c.Uint32)
}

func (m *expired) Fields(c *session.Codec) {
	c.Uint32(&m.key)
	c.Uint64(&m.epoch)
}

func (m *pairRequest) Fields(c *session.Codec) {
	c.Uint8(&m.pair)
	c.Uint32(&m.attempt)
	m.pairAnswer.fields(c)
}

func (m *pairReply) Fields(c *session.Codec) {
	c.Uint8(&m.pair)
	c.Uint32(&m.attempt)
	c.Uint64(&m.seen)
	m.pairAnswer.fields(c)
}

func (m *broken) Fields(c *session.Codec)       { c.Uint8(&m.pair) }
func (m *answer) Fields(c *session.Codec)       { c.Data(&m.data) }
func (m *answersTaken) Fields(c *session.Codec) { c.Uint64(&m.count) }
func (m *bye) Fields(c *session.Codec)          { c.Flag(&m.abandoned) }

func endFields(c *session.Codec, e *verbs.End) {
	c.Uint32(&e.QueuePair)
	c.Uint32(&e.Packet)
	c.Uint16(&e.LID)
	c.Uint8(&e.MTU)
	c.Uint8(&e.Reads)
	c.Uint8(&e.LinkLayer)
	c.Raw(e.GID[:])
}

func (a *pairAnswer) fields(c *session.Codec) {
	c.Flag(&a.there)
	if a.there {
		endFields(c, &a.end)
	}
}

// appendMessage appends an encoded message.
func appendMessage(b []byte, m session.Message) []byte {
	return session.AppendMessage(b, controlVersion, m)
}

// decodeControl decodes a message, and refuses a malformed one. It keeps no reference to b.
func decodeControl(b []byte) (session.Message, error) {
	return session.DecodeMessage(b, controlVersion, controlMax, messages[:])
}

// messages returns an empty message of each kind.
var messages = [...]func() session.Message{
	kindHello:        func() session.Message { return &hello{} },
	kindWelcome:      func() session.Message { return &welcome{} },
	kindImport:       func() session.Message { return &importRequest{} },
	kindImported:     func() session.Message { return &importAnswer{} },
	kindExpired:      func() session.Message { return &expired{} },
	kindPair:         func() session.Message { return &pairRequest{} },
	kindPairReply:    func() session.Message { return &pairReply{} },
	kindBroken:       func() session.Message { return &broken{} },
	kindBye:          func() session.Message { return &bye{} },
	kindFarewell:     func() session.Message { return farewell },
	kindQuit:         func() session.Message { return quit },
	kindPing:         func() session.Message { return ping },
	kindPong:         func() session.Message { return pong },
	kindAnswer:       func() session.Message { return &answer{} },
	kindAnswersTaken: func() session.Message { return &answersTaken{} },
}

// address is the content of Addr: the backend's identity, where its control listens, and its rails,
// which an initiator matches with its own.
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
	addressMark = "rdma3" // see session.EncodeAddress
	controlsMax = 16
	notifsLimit = 1 << 15
)

func (a *address) fields(c *session.Codec) {
	c.Raw(a.owner[:])
	c.Raw(a.host[:])
	c.Uint32(&a.process)
	c.Uint32(&a.notifs)
	session.CodecList(c, &a.control, controlsMax, func(at *netip.AddrPort) {
		ip, port := at.Addr().As16(), at.Port()
		c.Raw(ip[:])
		c.Uint16(&port)
		*at = netip.AddrPortFrom(netip.AddrFrom16(ip).Unmap(), port)
	})
	session.CodecList(c, &a.rails, railsMax, func(r *railAddress) {
		c.Raw(r.gid[:])
		c.Uint8(&r.bits)
		c.Flag(&r.ethernet)
		c.Uint32(&r.rate)
	})
}

// isValid reports whether a decoded address is valid.
func (a *address) isValid() bool {
	return len(a.control) > 0 && len(a.rails) > 0 && a.notifs > 0 && a.notifs <= notifsLimit &&
		!slices.ContainsFunc(a.control, func(at netip.AddrPort) bool { return at.Port() == 0 }) &&
		!slices.ContainsFunc(a.rails, func(r railAddress) bool { return r.bits > 128 })
}

// encode fails only if the address does not fit into driver.AddrMax; no real machine has so many
// rails.
func (a *address) encode() ([]byte, error) {
	const cure = "name fewer of Config.Devices"
	if len(a.control) > controlsMax || len(a.rails) > railsMax {
		return nil, fmt.Errorf("address of %d rails: %s: %w", len(a.rails), cure, driver.ErrBounds)
	}
	return session.EncodeAddress(addressMark, cure, a.fields)
}

func decodeAddress(b []byte) (a address, err error) {
	if err := session.DecodeAddress(b, addressMark, a.fields); err != nil {
		return address{}, err
	}
	if !a.isValid() {
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
