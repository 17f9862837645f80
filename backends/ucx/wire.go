// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// A control message is a version, a kind and a body. A connection has two ends: the initiator,
// which sends hello, and the owner, which owns the memory. All messages of one end arrive at the
// other in the order of sending, data and notifications included.
const controlVersion = 5

const (
	kindHello    = 1 + iota // initiator: its identity, and its end of the connection
	kindWelcome             // owner: its end, or why it refuses
	kindBye                 // initiator: it sends nothing more; the owner ends its end
	kindImport              // initiator: asks to import the memory of a token
	kindImported            // owner: the memory, or an error
)

type hello struct {
	conn   uint64        // number of the initiator's end
	worker uint8         // the initiator's worker that serves it
	to     session.Owner // the backend that the initiator wants to connect to
	grace  uint64        // its Config.Grace, in ns
	from   []byte        // its Addr
}

type welcome struct {
	conn   uint64 // number of the owner's end
	status session.Status
	grace  uint64
}

// bye ends a connection. It names it as hello did: the initiator may not know the owner's end yet.
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

func (*hello) Kind() byte         { return kindHello }
func (*welcome) Kind() byte       { return kindWelcome }
func (*bye) Kind() byte           { return kindBye }
func (*importRequest) Kind() byte { return kindImport }
func (*importAnswer) Kind() byte  { return kindImported }

// messages returns an empty message of each kind.
var messages = []func() session.Message{
	kindHello:    func() session.Message { return &hello{} },
	kindWelcome:  func() session.Message { return &welcome{} },
	kindBye:      func() session.Message { return &bye{} },
	kindImport:   func() session.Message { return &importRequest{} },
	kindImported: func() session.Message { return &importAnswer{} },
}

func (m *hello) Fields(c *session.Codec) {
	c.Uint64(&m.conn)
	c.Uint8(&m.worker)
	c.Raw(m.to[:])
	graceField(c, &m.grace)
	c.Rest(&m.from)
}

func (m *welcome) Fields(c *session.Codec) {
	c.Uint64(&m.conn)
	c.Uint8((*uint8)(&m.status))
	graceField(c, &m.grace)
}

// graceField bounds the Grace of a peer.
func graceField(c *session.Codec, grace *uint64) {
	c.Uint64(grace)
	if c.Decodes() {
		*grace = min(*grace, uint64(graceMax))
	}
}

func (m *bye) Fields(c *session.Codec) {
	c.Uint64(&m.conn)
	c.Raw(m.from[:])
	c.Flag(&m.abandoned)
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
	c.Uint64(&m.size)
	c.Uint64(&m.ticket)
}

func encodeControl(m session.Message) []byte {
	return session.AppendMessage(nil, controlVersion, m)
}

// decodeControl decodes a message, and refuses a malformed one. It keeps no reference to b.
func decodeControl(b []byte) (session.Message, error) {
	return session.DecodeMessage(b, controlVersion, ucp.ControlMax, messages)
}

// address is the content of Addr: the backend's identity, its process, and the addresses of its
// workers. UCX reads a worker's address without knowing its length, so one that is cut or altered
// must not reach it: the digest of session.EncodeAddress detects that. It does not detect forgery;
// programs that exchange addresses trust each other so far.
type address struct {
	owner   session.Owner
	host    [8]byte // equal where processes can share memory and see each other's ids
	pid     uint32
	workers [][]byte     // their addresses
	hosts   []netip.Addr // that our host has in networks
}

// addressMark: see session.EncodeAddress.
const addressMark = "ucx7"

func (a *address) fields(c *session.Codec) {
	c.Raw(a.owner[:])
	c.Raw(a.host[:])
	c.Uint32(&a.pid)
	session.CodecList(c, &a.workers, workersMax, func(w *[]byte) {
		c.Data(w)
		if len(*w) == 0 {
			c.Fail()
		}
	})
	session.CodecList(c, &a.hosts, hostsMax, func(h *netip.Addr) {
		ip := h.AsSlice()
		n := uint8(len(ip))
		c.Uint8(&n)
		if c.Decodes() {
			ip = make([]byte, n)
		}
		c.Raw(ip)
		known, ok := netip.AddrFromSlice(ip)
		if *h = known; !ok {
			c.Fail()
		}
	})
}

// encode fails if the address does not fit into driver.AddrMax: that happens with many workers, or
// many devices.
func (a *address) encode() ([]byte, error) {
	return session.EncodeAddress(addressMark, "lower Config.Workers, or name fewer of "+
		"Config.Devices or Transports", a.fields)
}

func decodeAddress(b []byte) (a address, err error) {
	if err := session.DecodeAddress(b, addressMark, a.fields); err != nil {
		return address{}, err
	}
	if len(a.workers) == 0 {
		return address{}, fmt.Errorf("ucx address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

const hostsMax = 8

// ownHosts lists the addresses that this host has in networks, the first where it has many.
func ownHosts() []netip.Addr {
	list := session.HostAddresses()
	slices.SortStableFunc(list, func(x, y netip.Addr) int { return x.BitLen() - y.BitLen() })
	return list[:min(len(list), hostsMax)]
}

// String names the backend in messages.
func (a *address) String() string {
	return fmt.Sprintf("ucx backend %s of process %d", hex.EncodeToString(a.owner[:]),
		a.pid)
}
