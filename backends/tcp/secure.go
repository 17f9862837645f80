// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"net"
)

// security is how the ends of a connection know each other: both must do it alike.
type security uint8

const (
	plain     security = iota // by tokens alone
	certified                 // TLS with certificates of both sides
	pinned                    // TLS with the key that the owner's address names: see ownKey
)

func (s security) String() string {
	return [...]string{"in plain text (Config.Plaintext)",
		"by certificates (Config.TLS or Identity)",
		"by the key in its address (neither TLS, Identity nor Plaintext)"}[s]
}

// call secures a connection that we began, to a place of its owner's.
func (b *Backend) call(ctx context.Context, tcp *net.TCPConn, to *address, place string) (net.Conn,
	error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return callPinned(ctx, &records{TCPConn: tcp, b: b}, to.pin)
	}
	return b.secure.Call(ctx, &records{TCPConn: tcp, b: b}, withoutPort(place))
}

// answer secures a connection that a peer began.
func (b *Backend) answer(ctx context.Context, tcp *net.TCPConn) (net.Conn, error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return b.own.answer(ctx, &records{TCPConn: tcp, b: b})
	}
	return b.secure.Answer(ctx, &records{TCPConn: tcp, b: b})
}

// refusal says why the owner hung up in place of a welcome: it may have refused our
// certificate.
func (b *Backend) refusal(err error, tcp net.Conn) error {
	if b.address.security != certified {
		return err
	}
	return b.secure.Explain(err, withoutPort(tcp.RemoteAddr().String()))
}

// withoutPort is a place without its port.
func withoutPort(place string) string {
	host, _, err := net.SplitHostPort(place)
	if err != nil {
		return place
	}
	return host
}
