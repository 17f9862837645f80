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

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

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
	addressMark  = "ucx6" // with the version of everything that passes between backends
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
	a.pid, a.workers, a.hosts = r.Uint32(), readWorkers(&r), readHosts(&r)
	if !r.Done() || len(a.workers) == 0 {
		return a, fmt.Errorf("ucx address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

// readWorkers reads a list of worker addresses, none of which may be empty.
func readWorkers(r *session.MessageReader) (list [][]byte) {
	n := int(r.Uint8())
	if n > workersMax {
		r.Fail()
	}
	for range n {
		w := r.Bytes(int(r.Uint16()))
		if len(w) == 0 {
			r.Fail()
		}
		if r.Failed() {
			return nil
		}
		list = append(list, bytes.Clone(w))
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

// readHosts reads a list of addresses.
func readHosts(r *session.MessageReader) (list []netip.Addr) {
	n := int(r.Uint8())
	if n > hostsMax {
		r.Fail()
	}
	for range n {
		h, ok := netip.AddrFromSlice(r.Bytes(int(r.Uint8())))
		if !ok {
			r.Fail()
		}
		if r.Failed() {
			return nil
		}
		list = append(list, h)
	}
	return list
}

// String names the backend in messages.
func (a *address) String() string {
	return fmt.Sprintf("ucx backend %s of process %d", hex.EncodeToString(a.owner[:]),
		a.pid)
}
