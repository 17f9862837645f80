// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net"
	"strconv"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// address is the content of an Addr: an identifier of the backend, how it is secured, and
// the places where it listens. A digest detects an Addr that was cut or altered by accident.
type address struct {
	owner session.Owner
	security
	pin    pin      // for security pinned
	places []string // host:port, a name or a number
}

const (
	addressName  = "tcp" // a byte with the version of all that passes between backends follows
	addressMark  = len(addressName) + 1
	addressCheck = 8
	placesMax    = 16
	placeMax     = 253 + 6 // a name and a port
)

func (a *address) encode() ([]byte, error) {
	b := append([]byte(addressName), '0'+wireVersion)
	b = append(b, a.owner[:]...)
	b = append(b, byte(a.security))
	if a.security == pinned {
		b = append(append(b, a.pin.key[:]...), a.pin.secret[:]...)
	}
	b = append(b, byte(len(a.places)))
	for _, p := range a.places {
		if len(p) > placeMax {
			return nil, fmt.Errorf("address %q is longer than %d bytes: %w",
				p, placeMax, driver.ErrBounds)
		}
		b = append(b, byte(len(p)>>8), byte(len(p)))
		b = append(b, p...)
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:addressCheck]...)
	if len(b) > driver.AddrMax || len(a.places) > placesMax {
		return nil, fmt.Errorf("%d addresses of %d bytes, at most %d of %d: name fewer in "+
			"Config.Advertise: %w",
			len(a.places), len(b), placesMax, driver.AddrMax, driver.ErrBounds)
	}
	return b, nil
}

func decodeAddress(b []byte) (a address, err error) {
	if !bytes.HasPrefix(b, []byte(addressName)) || len(b) < addressMark {
		return a, fmt.Errorf("%d bytes that are no tcp address: %w", len(b), driver.ErrCorrupt)
	}
	if version := b[len(addressName)]; version != '0'+wireVersion {
		return a, fmt.Errorf("tcp address of version %d, ours is %d: use the same release on "+
			"both sides: %w",
			version-'0', wireVersion, driver.ErrVersion)
	}
	if len(b) < addressMark+addressCheck || len(b) > driver.AddrMax {
		return a, fmt.Errorf("tcp address of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	body, check := b[:len(b)-addressCheck], b[len(b)-addressCheck:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:addressCheck], check) {
		return a, fmt.Errorf("tcp address is damaged: %w", driver.ErrCorrupt)
	}
	r := session.ReadMessage(body[addressMark:])
	copy(a.owner[:], r.Bytes(8))
	if a.security = security(r.Uint8()); a.security > pinned {
		r.Fail()
	}
	if a.security == pinned {
		copy(a.pin.key[:], r.Bytes(len(a.pin.key)))
		copy(a.pin.secret[:], r.Bytes(len(a.pin.secret)))
	}
	a.readPlaces(&r)
	if !r.Done() || len(a.places) == 0 {
		return address{}, fmt.Errorf("tcp address: %w", driver.ErrCorrupt)
	}
	return a, nil
}

func (a *address) readPlaces(r *session.MessageReader) {
	n := int(r.Uint8())
	if n > placesMax {
		r.Fail()
	}
	for range n {
		size := int(r.Uint8())<<8 | int(r.Uint8())
		place := string(r.Bytes(size))
		host, port, err := net.SplitHostPort(place)
		number, portErr := strconv.ParseUint(port, 10, 16)
		if r.Failed() || err != nil || portErr != nil || host == "" || number == 0 ||
			size > placeMax {
			r.Fail()
			return
		}
		a.places = append(a.places, place)
	}
}

// Places returns host:port of each place where the owner of an Addr listens, and whether it speaks
// TLS there.
func Places(addr []byte) (places []string, secure bool, err error) {
	a, err := decodeAddress(addr)
	return a.places, a.security != plain, err
}

// proof is the body of a hello: which backend it is for, and that its sender has the address.
func (a *address) proof() []byte {
	if a.security != pinned {
		return a.owner[:]
	}
	return append(append([]byte(nil), a.owner[:]...), a.pin.secret[:]...)
}
