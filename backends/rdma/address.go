// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

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
