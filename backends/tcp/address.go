// SPDX-License-Identifier: Apache-2.0

package tcp

import (
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
	addressName = "tcp"
	placesMax   = 16
	placeMax    = 253 + 6 // a name and a port
)

// addressMark: see session.EncodeAddress.
var addressMark = addressName + string(rune('0'+wireVersion))

func (a *address) fields(c *session.Codec) {
	c.Raw(a.owner[:])
	c.Uint8((*uint8)(&a.security))
	switch {
	case a.security > pinned:
		c.Fail()
	case a.security == pinned:
		c.Raw(a.pin.key[:])
		c.Raw(a.pin.secret[:])
	}
	session.CodecList(c, &a.places, placesMax, func(place *string) {
		high, low := byte(len(*place)>>8), byte(len(*place))
		c.Uint8(&high)
		c.Uint8(&low)
		text := []byte(*place)
		if c.Decodes() {
			text = make([]byte, min(int(high)<<8|int(low), placeMax+1))
		}
		c.Raw(text)
		*place = string(text)
		host, port, err := net.SplitHostPort(*place)
		number, portErr := strconv.ParseUint(port, 10, 16)
		if err != nil || portErr != nil || host == "" || number == 0 || len(text) > placeMax {
			c.Fail()
		}
	})
}

func (a *address) encode() ([]byte, error) {
	const cure = "name fewer in Config.Advertise"
	for _, p := range a.places {
		if len(p) > placeMax {
			return nil, fmt.Errorf("address %q is longer than %d bytes: %w", p, placeMax,
				driver.ErrBounds)
		}
	}
	if len(a.places) > placesMax {
		return nil, fmt.Errorf("%d addresses, at most %d: %s: %w", len(a.places), placesMax, cure,
			driver.ErrBounds)
	}
	return session.EncodeAddress(addressMark, cure, a.fields)
}

func decodeAddress(b []byte) (a address, err error) {
	if err := session.DecodeAddress(b, addressMark, a.fields); err != nil {
		return address{}, err
	}
	if len(a.places) == 0 {
		return address{}, fmt.Errorf("tcp address: %w", driver.ErrCorrupt)
	}
	return a, nil
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
