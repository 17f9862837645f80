// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Control messages: a version, a kind, the body. A connection has two ends: that
// of the initiator, which said hello, and that of the owner of the memory. All
// messages of one end to the other arrive in the order of sending, data and
// notifications among them.
const (
	controlVersion = 5
	controlHead    = 2
)

const (
	kindHello    = 1 + iota // initiator: its identity, and which end of it this is
	kindWelcome             // owner: which end of mine it leads to
	kindBye                 // initiator: nothing comes after this; the owner ends its end
	kindImport              // initiator: what is behind this token?
	kindImported            // owner: this
)

type hello struct {
	conn   uint64        // the initiator's end
	worker uint8         // where that lives
	to     session.Owner // the backend that it means to reach
	grace  uint64        // its Config.Grace, in ns
	from   []byte        // its Addr
}

type welcome struct {
	conn   uint64 // the owner's end
	status session.Status
	grace  uint64
}

// bye repeats what the hello said: the initiator may not know the owner's end yet.
type bye struct {
	conn      uint64
	from      session.Owner
	abandoned bool // the program never had this connection
}

type importRequest struct {
	id     uint32
	key    uint32
	epoch  uint64
	secret [16]byte
}

type importAnswer struct {
	id       uint32
	status   session.Status
	readOnly bool
	size     uint64
	ticket   uint64
}

func begin(kind byte) []byte { return append(make([]byte, 0, 64), controlVersion, kind) }

func (m *hello) encode() []byte {
	b := binary.LittleEndian.AppendUint64(begin(kindHello), m.conn)
	b = append(append(b, m.worker), m.to[:]...)
	b = binary.LittleEndian.AppendUint64(b, m.grace)
	return append(b, m.from...)
}

func (m *welcome) encode() []byte {
	b := binary.LittleEndian.AppendUint64(begin(kindWelcome), m.conn)
	return binary.LittleEndian.AppendUint64(append(b, byte(m.status)), m.grace)
}

func (m *bye) encode() []byte {
	b := binary.LittleEndian.AppendUint64(begin(kindBye), m.conn)
	b = append(b, m.from[:]...)
	return append(b, session.FlagByte(m.abandoned))
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
	b = binary.LittleEndian.AppendUint64(b, m.size)
	return binary.LittleEndian.AppendUint64(b, m.ticket)
}

// decodeControl reads what a peer sent, which may be anything. Nothing of b is
// kept.
func decodeControl(b []byte) (any, error) {
	if len(b) < controlHead || len(b) > ucp.ControlMax {
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
		m := &hello{conn: r.Uint64(), worker: r.Uint8()}
		copy(m.to[:], r.Bytes(8))
		m.grace = min(r.Uint64(), uint64(graceMax))
		m.from = append([]byte(nil), r.Bytes(r.Rest())...)
		return m
	case kindWelcome:
		return &welcome{conn: r.Uint64(), status: session.Status(r.Uint8()),
			grace: min(r.Uint64(), uint64(graceMax))}
	case kindBye:
		m := &bye{conn: r.Uint64()}
		copy(m.from[:], r.Bytes(8))
		m.abandoned = r.Flag()
		return m
	case kindImport:
		m := &importRequest{id: r.Uint32(), key: r.Uint32(), epoch: r.Uint64()}
		copy(m.secret[:], r.Bytes(16))
		return m
	case kindImported:
		return &importAnswer{id: r.Uint32(), status: session.Status(r.Uint8()), readOnly: r.Flag(),
			size: r.Uint64(), ticket: r.Uint64()}
	}
	return nil
}

// address is what Addr says: which backend this is, which process it lives in, and
// the addresses of its workers. UCX reads a worker's address without knowing its
// length, so one that is cut or altered must not reach it: a digest closes the
// whole. Against an address made up on purpose, digest and all, it is no
// protection; programs that exchange addresses trust each other so far.
type address struct {
	owner   session.Owner
	host    [8]byte // equal where processes can share memory and see each other's ids
	pid     uint32
	workers [][]byte     // their addresses
	hosts   []netip.Addr // that our host has in networks
}

const (
	addressMark  = "ucx7" // with the version of everything that passes between backends
	addressHead  = len(addressMark) + 8 + 8 + 4
	addressCheck = 8
)

// encode refuses what does not fit in driver.AddrMax: that happens with many
// workers, or many devices.
func (a *address) encode() ([]byte, error) {
	b := append([]byte(addressMark), a.owner[:]...)
	b = append(b, a.host[:]...)
	b = binary.LittleEndian.AppendUint32(b, a.pid)
	b = append(b, byte(len(a.workers)))
	for _, w := range a.workers {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(w)))
		b = append(b, w...)
	}
	b = append(b, byte(len(a.hosts)))
	for _, h := range a.hosts {
		b = append(append(b, byte(h.BitLen()/8)), h.AsSlice()...)
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:addressCheck]...)
	if len(b) > driver.AddrMax {
		return nil, fmt.Errorf("address of %d bytes, at most %d: lower Config.Workers, or name "+
			"fewer of Config.Devices or Transports: %w",
			len(b), driver.AddrMax, driver.ErrBounds)
	}
	return b, nil
}

func decodeAddress(b []byte) (a address, err error) {
	if !bytes.HasPrefix(b, []byte(addressMark[:3])) {
		return a, fmt.Errorf("%d bytes that are no ucx address: %w", len(b), driver.ErrCorrupt)
	}
	if !bytes.HasPrefix(b, []byte(addressMark)) {
		return a, fmt.Errorf("ucx address of another version: use the same release on "+
			"both sides: %w", driver.ErrVersion)
	}
	if len(b) < addressHead+2+addressCheck || len(b) > driver.AddrMax {
		return a, fmt.Errorf("ucx address of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	body, check := b[:len(b)-addressCheck], b[len(b)-addressCheck:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:addressCheck], check) {
		return a, fmt.Errorf("ucx address is damaged: %w", driver.ErrCorrupt)
	}
	r := session.ReadMessage(body[len(addressMark):])
	copy(a.owner[:], r.Bytes(8))
	copy(a.host[:], r.Bytes(8))
	a.pid = r.Uint32()
	a.workers = readList(&r, workersMax, func() ([]byte, bool) {
		w := bytes.Clone(r.Bytes(int(r.Uint16())))
		return w, len(w) > 0
	})
	a.hosts = readList(&r, hostsMax, func() (netip.Addr, bool) {
		return netip.AddrFromSlice(r.Bytes(int(r.Uint8())))
	})
	if !r.Done() || len(a.workers) == 0 {
		return a, fmt.Errorf("ucx address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

// readList reads a list of at most so many, each by one, which says whether it can be.
func readList[T any](r *session.MessageReader, most int, one func() (T, bool)) (list []T) {
	n := int(r.Uint8())
	if n > most {
		r.Fail()
	}
	for range n {
		x, ok := one()
		if !ok {
			r.Fail()
		}
		if r.Failed() {
			return nil
		}
		list = append(list, x)
	}
	return list
}

const hostsMax = 8

// ownHosts lists the addresses that this host has in networks, the first where it has many.
func ownHosts() (list []netip.Addr) {
	addresses, _ := net.InterfaceAddrs() // none is an answer
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() {
			list = append(list, p.Addr().Unmap())
		}
	}
	slices.SortStableFunc(list, func(x, y netip.Addr) int { return x.BitLen() - y.BitLen() })
	return list[:min(len(list), hostsMax)]
}

// String names the backend in messages.
func (a *address) String() string {
	return fmt.Sprintf("ucx backend %s of process %d", hex.EncodeToString(a.owner[:]),
		a.pid)
}
