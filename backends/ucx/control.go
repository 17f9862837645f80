// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"encoding/binary"
	"fmt"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Control messages: a version, a kind, the body. A connection has two ends: that
// of the initiator, which said hello, and that of the owner of the memory. All
// messages of one end to the other arrive in the order of sending, data and
// notifications among them.
const (
	controlVersion = 4
	controlHead    = 2
)

const (
	kindHello    = 1 + iota // initiator: its identity, and which end of it this is
	kindWelcome             // owner: which end of mine it leads to
	kindBye                 // initiator: nothing comes after this
	kindFarewell            // owner: nothing that came before this can land any more
	kindQuit                // owner: I close
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

type (
	farewell struct{}
	quit     struct{}
)

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

func (farewell) encode() []byte { return begin(kindFarewell) }
func (quit) encode() []byte     { return begin(kindQuit) }

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
	case kindFarewell:
		return farewell{}
	case kindQuit:
		return quit{}
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
