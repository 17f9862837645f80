// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"

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
	kindLaned                   // owner: it is gone here too, what I saw, my new end
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

// pairAnswer is the owner's end; not there: it could not make one.
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
	pair    uint8
	attempt uint32
	there   bool // there is a new end
	end     verbs.End
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

func begin(kind byte) []byte { return append(make([]byte, 0, 64), controlVersion, kind) }

func (m *hello) encode() []byte {
	b := append(begin(kindHello), m.to[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.from)))
	b = append(b, m.from...)
	b = append(b, byte(len(m.pairs)))
	for i := range m.pairs {
		b = appendEnd(append(b, m.pairs[i].rail), &m.pairs[i].end)
	}
	return b
}

func (m *welcome) encode() []byte {
	b := append(begin(kindWelcome), byte(m.status), byte(len(m.pairs)))
	for i := range m.pairs {
		b = m.pairs[i].append(b)
	}
	return b
}

func (m *importRequest) encode() []byte {
	b := binary.LittleEndian.AppendUint32(begin(kindImport), m.id)
	b = binary.LittleEndian.AppendUint32(b, m.key)
	b = binary.LittleEndian.AppendUint64(b, m.epoch)
	return append(b, m.secret[:]...)
}

func (m *importAnswer) encode() []byte {
	b := binary.LittleEndian.AppendUint32(begin(kindImported), m.id)
	b = append(b, byte(m.status), session.FlagByte(m.readOnly))
	b = binary.LittleEndian.AppendUint64(b, m.base)
	b = binary.LittleEndian.AppendUint64(b, m.size)
	b = append(b, byte(len(m.keys)))
	for _, k := range m.keys {
		b = binary.LittleEndian.AppendUint32(b, k)
	}
	return b
}

func (m *expired) encode() []byte {
	b := binary.LittleEndian.AppendUint32(begin(kindExpired), m.key)
	return binary.LittleEndian.AppendUint64(b, m.epoch)
}

func (m *pairRequest) encode() []byte {
	b := append(begin(kindPair), m.pair)
	b = binary.LittleEndian.AppendUint32(b, m.attempt)
	return (&pairAnswer{m.there, m.end}).append(b)
}

func (m *pairReply) encode() []byte {
	b := append(begin(kindLaned), m.pair)
	b = binary.LittleEndian.AppendUint32(b, m.attempt)
	b = binary.LittleEndian.AppendUint64(b, m.seen)
	return m.append(b)
}

func (m *broken) encode() []byte { return append(begin(kindBroken), m.pair) }
func (m *bye) encode() []byte    { return append(begin(kindBye), session.FlagByte(m.abandoned)) }

func (m *answer) encode() []byte {
	b := append(make([]byte, 0, answerHead+len(m.data)), controlVersion, kindAnswer)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.data)))
	return append(b, m.data...)
}

func (m *answersTaken) encode() []byte {
	return binary.LittleEndian.AppendUint64(begin(kindAnswersTaken), m.count)
}

func (farewell) encode() []byte { return begin(kindFarewell) }
func (quit) encode() []byte     { return begin(kindQuit) }
func (ping) encode() []byte     { return begin(kindPing) }
func (pong) encode() []byte     { return begin(kindPong) }

func (m *pairAnswer) append(b []byte) []byte {
	b = append(b, session.FlagByte(m.there))
	if m.there {
		b = appendEnd(b, &m.end)
	}
	return b
}

func appendEnd(b []byte, e *verbs.End) []byte {
	b = binary.LittleEndian.AppendUint32(b, e.QueuePair)
	b = binary.LittleEndian.AppendUint32(b, e.Packet)
	b = binary.LittleEndian.AppendUint16(b, e.LID)
	b = append(b, e.MTU, e.Reads, e.LinkLayer)
	return append(b, e.GID[:]...)
}

// decodeControl reads what a peer sent, which may be anything. Nothing of b is kept.
func decodeControl(b []byte) (any, error) {
	if len(b) < controlHead || len(b) > controlMax {
		return nil, fmt.Errorf("control message of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	if b[0] != controlVersion {
		return nil, fmt.Errorf("control message of version %d, ours is %d: use the same release "+
			"on both sides: %w",
			b[0], controlVersion, driver.ErrVersion)
	}
	r := session.ReadMessage(b[controlHead:])
	m := decodeBody(b[1], &r)
	if m == nil || !r.Done() {
		return nil, fmt.Errorf("control message of kind %d, %d bytes: %w", b[1], len(b),
			driver.ErrCorrupt)
	}
	return m, nil
}

// decodeBody reads the body of a kind; nil: there is no such kind.
func decodeBody(kind byte, r *session.MessageReader) any {
	switch kind {
	case kindHello:
		return readHello(r)
	case kindWelcome:
		return readWelcome(r)
	case kindImport:
		m := &importRequest{id: r.Uint32(), key: r.Uint32(), epoch: r.Uint64()}
		copy(m.secret[:], r.Bytes(16))
		return m
	case kindImported:
		return readImported(r)
	case kindExpired:
		return &expired{key: r.Uint32(), epoch: r.Uint64()}
	case kindPair:
		m := &pairRequest{pair: r.Uint8(), attempt: r.Uint32()}
		m.there, m.end = readAnswer(r)
		return m
	case kindLaned:
		m := &pairReply{pair: r.Uint8(), attempt: r.Uint32(), seen: r.Uint64()}
		m.there, m.end = readAnswer(r)
		return m
	case kindBroken:
		return &broken{pair: r.Uint8()}
	case kindBye:
		return &bye{abandoned: r.Flag()}
	case kindAnswer:
		return &answer{data: append([]byte{}, r.Bytes(int(r.Uint16()))...)}
	case kindAnswersTaken:
		return &answersTaken{count: r.Uint64()}
	}
	return decodeWord(kind)
}

// decodeWord reads the kinds without a body.
func decodeWord(kind byte) any {
	switch kind {
	case kindFarewell:
		return farewell{}
	case kindQuit:
		return quit{}
	case kindPing:
		return ping{}
	case kindPong:
		return pong{}
	}
	return nil
}

func readHello(r *session.MessageReader) *hello {
	m := &hello{}
	copy(m.to[:], r.Bytes(8))
	m.from = append([]byte(nil), r.Bytes(int(r.Uint16()))...)
	for range readCount(r) {
		o := pairOffer{rail: r.Uint8()}
		o.end = readEnd(r)
		m.pairs = append(m.pairs, o)
	}
	return m
}

func readWelcome(r *session.MessageReader) *welcome {
	m := &welcome{status: session.Status(r.Uint8())}
	for range readCount(r) {
		var a pairAnswer
		a.there, a.end = readAnswer(r)
		m.pairs = append(m.pairs, a)
	}
	return m
}

func readImported(r *session.MessageReader) *importAnswer {
	m := &importAnswer{id: r.Uint32(), status: session.Status(r.Uint8()), readOnly: r.Flag(),
		base: r.Uint64(), size: r.Uint64()}
	for range readCount(r) {
		m.keys = append(m.keys, r.Uint32())
	}
	return m
}

// readCount reads how many queue pairs follow.
func readCount(r *session.MessageReader) int {
	n := int(r.Uint8())
	if n > verbs.PairsMax {
		r.Fail()
		return 0
	}
	return n
}

func readAnswer(r *session.MessageReader) (there bool, e verbs.End) {
	if there = r.Flag(); there {
		e = readEnd(r)
	}
	return there, e
}

func readEnd(r *session.MessageReader) (e verbs.End) {
	e.QueuePair, e.Packet, e.LID = r.Uint32(), r.Uint32(), r.Uint16()
	e.MTU, e.Reads, e.LinkLayer = r.Uint8(), r.Uint8(), r.Uint8()
	copy(e.GID[:], r.Bytes(16))
	return e
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

// encode refuses what does not fit in driver.AddrMax, which no machine comes near to.
func (a *address) encode() ([]byte, error) {
	b := append([]byte(addressMark), a.owner[:]...)
	b = append(b, a.host[:]...)
	b = binary.LittleEndian.AppendUint32(b, a.process)
	b = binary.LittleEndian.AppendUint32(b, a.notifs)
	b = append(b, byte(len(a.control)))
	for _, c := range a.control {
		ip := c.Addr().As16()
		b = append(b, ip[:]...)
		b = binary.LittleEndian.AppendUint16(b, c.Port())
	}
	b = append(b, byte(len(a.rails)))
	for i := range a.rails {
		r := &a.rails[i]
		b = append(b, r.gid[:]...)
		b = append(b, r.bits, session.FlagByte(r.ethernet))
		b = binary.LittleEndian.AppendUint32(b, r.rate)
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:addressCheck]...)
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
	copy(a.owner[:], r.Bytes(8))
	copy(a.host[:], r.Bytes(8))
	a.process, a.notifs = r.Uint32(), r.Uint32()
	a.readControl(&r)
	a.readRails(&r)
	if !r.Done() || len(a.control) == 0 || len(a.rails) == 0 || a.notifs == 0 ||
		a.notifs > notifsLimit {
		return address{}, fmt.Errorf("rdma address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

func (a *address) readControl(r *session.MessageReader) {
	n := int(r.Uint8())
	if n > controlsMax {
		r.Fail()
	}
	for range n {
		var ip [16]byte
		copy(ip[:], r.Bytes(16))
		at := netip.AddrPortFrom(netip.AddrFrom16(ip).Unmap(), r.Uint16())
		if r.Failed() || at.Port() == 0 {
			r.Fail()
			return
		}
		a.control = append(a.control, at)
	}
}

func (a *address) readRails(r *session.MessageReader) {
	n := int(r.Uint8())
	if n > railsMax {
		r.Fail()
	}
	for range n {
		var rail railAddress
		copy(rail.gid[:], r.Bytes(16))
		rail.bits, rail.ethernet = r.Uint8(), r.Flag()
		rail.rate = r.Uint32()
		if r.Failed() || rail.bits > 128 {
			r.Fail()
			return
		}
		a.rails = append(a.rails, rail)
	}
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
